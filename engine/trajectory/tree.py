"""The turn tree of one agent session: what the model saw and said, located and recorded while the session runs.

    place = tree.locate(call, at)          # pure: the deepest node this request extends, and what is new
    node = tree.commit(place, delta=..., answer=..., reply=...)   # before the last byte is sent
    tree.mark_delivered(node)              # after it
    export = tree.export()                 # once, at the end: trajectories, fates, ledger

Invariants: nodes are only added; ``locate`` changes nothing but caches; locating never judges, so a rollback, a split
and a retry are all a new child of the deepest shared node, and ``fates`` reads off the whole tree what became of an
answer. A request that begins with the messages of an earlier one costs what is new in it: the search goes on where
the earlier one ended. Otherwise one walk compares each message with the one last seen at its node.

Knows no tokenizer, clock, socket or engine: tokens and times are passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from uniagent.engine.messages import Message, ModelCall
from uniagent.engine.trajectory import echo, export
from uniagent.engine.trajectory.match import Answers, deepest, unlinked
from uniagent.engine.trajectory.nodes import (
    Action,
    ActionRecord,
    Branch,
    Delta,
    History,
    Node,
    Pending,
    Place,
    Request,
    Tip,
    TreePolicy,
)
from uniagent.engine.trajectory.tape import extended
from uniagent.engine.trajectory.types import Export, Provenance, Sampled, Segment

__all__ = ["ActionRecord", "Node", "Pending", "Place", "TreePolicy", "TurnTree"]

TIPS = 4  # conversations that go on side by side without a walk from the root


class TurnTree:
    """One session. Not for several threads; ``locate`` and ``commit`` of concurrent requests may interleave."""

    def __init__(self, policy: TreePolicy = TreePolicy()) -> None:
        self.policy = policy
        self.history = History()
        self.root = self._node(None, Message("root"))
        self._answers = Answers()
        self._tool_lists: list[tuple[tuple[Mapping[str, Any], ...], Message, frozenset[str]]] = []
        self._tips: list[Tip] = []
        self._version = 0  # changes when a message seen before may match another child now
        self._exported = False

    # ------------------------------------------------------------ while the session runs

    def locate(self, call: ModelCall, at: float) -> Place:
        """Where the request stands; ``at`` is when it came, in the seconds that ``commit`` is given."""
        tools, tool_names = self._tools(call)
        resumed = self._resume(tools, call.messages)
        start = self._start(tools, resumed)
        if start:
            (depth, node, link), others = deepest(start, call.messages, self._answers)
        else:
            (depth, node, link), others = (-1, self.root, None), ()
        echoes = unlinked(link)
        fresh = [] if depth >= 0 else [Pending(tools)]
        for i, message in enumerate(call.messages[max(depth, 0) :]):
            parent = node if i == 0 else None
            back = self._answers.elsewhere(message, parent) if message.role == "assistant" else None
            fresh.append(Pending(message, (back.node, back.kept) if back else None))
            if back and back.node.acted.news(back):
                echoes.append(back)
        known: list[Pending] = []
        up = node
        while up.action is None and up.depth > 1:
            known.append(Pending(up.message, up.moved))
            up = up.parent  # type: ignore[assignment]
        new = fresh[1:] if depth < 0 else fresh
        return Place(
            call=call,
            at=at,
            known=len(self.history.actions),
            node=node,
            pending=(*reversed(known), *new),
            echoes=tuple(echoes),
            fresh=tuple(fresh),
            tools=tools,
            tool_names=tool_names,
            others=others,
            resumed=resumed,
            version=self._version,
        )

    def commit(
        self,
        place: Place,
        *,
        delta: tuple[Segment, ...],
        answer: Sampled | None,
        reply: Message | None,
        started: float,
        ended: float,
        parse_problem: str | None = None,
    ) -> Node:
        """Records the request and, when something was sampled, its answer: the node of the answer, or the end of the
        request. ``delta``: all segments between the anchor and the first sampled token. ``reply``: the answer as it is
        sent, None when nothing is. AssertionError where tokens do not fit together."""
        if self._exported:
            raise RuntimeError("this session is exported: nothing can be committed to it any more")
        if answer is not None:
            answer.check()
        made = place.node.delta if delta is place.known_delta and place.node.delta else self._checked(delta)
        steady = self._version == place.version
        end = place.node
        for pending in place.fresh:
            end = self._context(end, pending)
        if end.delta is None:
            end.delta = made
        elif end.delta.same(made):
            made = end.delta
        for back in place.echoes:
            action = back.node.acted
            action.echoes.setdefault(back.tier, back)
            action.kept = max(action.kept, back.kept)
            if back.tier == "edited":
                self._answers.also(back.message, back.node, back.kept)
        request = Request(place.at, place.known, end, place.tool_names, place.call.stop)
        self.history.requests.append(request)
        node = end
        if answer is not None:
            if answer.opening is not None:
                made = Delta.of((*made.segments, Segment(Provenance.TEMPLATE, answer.opening)))
            order = len(self.history.actions)
            anchor = end.anchor
            spoken = extended(anchor.acted.spoken if anchor is not None else None, made.ids, answer.said)
            sent = reply is not None
            action = Action(order, answer, made, request, started, ended, sent, parse_problem, spoken)
            node = self._node(end, reply or Message("assistant"), action=action)
            self.history.actions.append(node)
            if reply is not None:
                self._answers.sent(reply, node)
        self._tips = [t for t in self._tips if t is not place.resumed and t.messages is not place.call.messages]
        if steady:
            others = () if place.fresh else place.others
            tip = Tip(place.tools, place.call.messages, end, others, self._version)
            self._tips = [tip, *self._tips[: TIPS - 1]]
        elif place.fresh:  # it may have gone on where the searches behind the tips saw an end
            self._version += 1
        return node

    def mark_delivered(self, node: Node) -> None:
        """The last byte of this answer was written."""
        node.acted.delivered = True
        parent = node.parent
        if parent is not None:
            parent.memo = None
            self._version += parent.speakers > 1

    def records(self) -> tuple[ActionRecord, ...]:
        """The actions so far, in order."""
        return tuple(ActionRecord.of(node) for node in self.history.actions)

    def export(self) -> Export:
        """What the session leaves behind. Once: RuntimeError when called again."""
        if self._exported:
            raise RuntimeError("this session is exported already: keep the first export")
        self._exported = True
        return export.build(self.history, self.policy)

    # ------------------------------------------------------------ locating

    def _tools(self, call: ModelCall) -> tuple[Message, frozenset[str]]:
        """The tool list as the first message, and the names in it. The last few lists are known as they came."""
        for i, entry in enumerate(self._tool_lists):
            if entry[0] is call.tools or entry[0] == call.tools:
                self._tool_lists.insert(0, self._tool_lists.pop(i))
                return entry[1], entry[2]
        written = echo.canonical([{k: v for k, v in t.items() if k != "cache_control"} for t in call.tools])
        message = Message("tools", written if call.tools else "")
        self._tool_lists = [(call.tools, message, call.tool_names), *self._tool_lists[: TIPS - 1]]
        return message, call.tool_names

    def _resume(self, tools: Message, messages: tuple[Message, ...]) -> Tip | None:
        """The longest request remembered that this one begins with. Comparing costs a pointer a message where the
        caller passes the same objects again."""
        best = None
        for tip in self._tips:
            n = len(tip.messages)
            if tip.version == self._version and n <= len(messages) and (best is None or n > len(best.messages)):
                same_tools = tip.tools is tools or tip.tools == tools
                if same_tools and messages[:n] == tip.messages:
                    best = tip
        return best

    def _start(self, tools: Message, tip: Tip | None) -> list[Branch]:
        if tip is not None:
            return [*tip.others, (len(tip.messages), tip.node, None)]
        return [(0, node, None) for node in self.root.context.get(echo.key(tools), [])]

    # ------------------------------------------------------------ recording

    def _node(
        self,
        parent: Node | None,
        message: Message,
        *,
        action: Action | None = None,
        moved: tuple[Node, int] | None = None,
    ) -> Node:
        nodes = self.history.nodes
        above, depth = (None, 0) if parent is None else (parent.anchor, parent.depth + 1)
        node = Node(parent, above, message, len(nodes), depth, action=action, moved=moved)
        nodes.append(node)
        if parent is None:
            return node
        parent.memo = None
        if message.role == "assistant":
            self._version += parent.speakers > 0
            parent.speakers += 1
        if action is not None or (moved is not None and moved[1] == moved[0].acted.size):
            parent.answers.append(node)
        return node

    def _context(self, parent: Node, pending: Pending) -> Node:
        """The child for a message that was new when it was located; another request may have made it since."""
        same = parent.context.setdefault(echo.key(pending.message), [])
        for child in same:
            if child.moved == pending.moved:
                return child
        node = self._node(parent, pending.message, moved=pending.moved)
        same.append(node)
        if pending.message.role != "assistant":
            parent.memo = pending.message, ((node, None),)
        return node

    def _checked(self, delta: tuple[Segment, ...]) -> Delta:
        for s in delta:
            if (s.kind is Provenance.SAMPLED) != (s.action is not None):
                raise AssertionError("a sampled segment of a delta, and no other, names its action")
            if s.action is not None:
                said = self.history.actions[s.action].sampled.said
                if not np.array_equal(said[: len(s.ids)], s.ids):
                    raise AssertionError(f"a segment of action {s.action} differs from what was sampled")
        return Delta.of(delta)
