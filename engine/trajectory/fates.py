"""What became of every answer, read off the whole tree once the session is over.

A fate is ``live`` or the cause of its discard. An echo is proof of delivery and of acceptance: live. Then, in this
order: ``aborted``, ``undelivered``, ``retried``, ``replaced`` or ``dropped`` (``refused`` where its call could not be
run), ``side_call``; and ``rewound`` for accepted answers under ``rewind = "discard"``.

Cost: linear in the tree, and for an answer that never came back what was said in its place. Knows no tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import define, field, frozen

from uniagent.engine.trajectory.echo import could_run
from uniagent.engine.trajectory.nodes import History, Node, Request, TreePolicy

LIVE = "live"
MIN_LINE = 20  # an answer comes back in a text when a line of at least this many characters does


def judge(history: History, policy: TreePolicy) -> list[str]:
    """One fate an action, in order."""
    if not history.actions:
        return []
    return _Judge(history, policy, _traffic(history), main_opening(history)).fates()


def opening(node: Node) -> tuple[Node, str]:
    """Whose conversation it is: the tool list, and the system text before anything else is said."""
    path = node.path()
    texts = []
    for n in path[1:]:
        if n.message.role != "system":
            break
        texts.append(n.message.text.rstrip())
    return path[0], "\n".join(texts)


def main_opening(history: History) -> tuple[Node, str]:
    """That of the main conversation: of the first request with tools, else of the longest one."""
    requests = _in_time(history)
    with_tools = next((r for r in requests if r.tool_names), None)
    if with_tools is not None:
        return opening(with_tools.end)
    size = [0] * len(history.nodes)
    for node in history.nodes[1:]:
        size[node.index] = len(node.message.text) + (size[node.parent.index] if node.parent else 0)
    return opening(max(requests, key=lambda r: size[r.end.index]).end)


def _in_time(history: History) -> list[Request]:
    return sorted(history.requests, key=lambda r: (r.at, r.known))


# ---------------------------------------------------------------- requests through a node


@frozen(eq=False)
class _Traffic:
    """By node: the places in time of the first and the last request through it (-1: none), and whether a talk went on
    at or below it, that is, one request went on from where another ended."""

    requests: list[Request]
    first: list[int]
    last: list[int]
    went_on: list[bool]

    def first_after(self, node: Node, answer: Node) -> int | None:
        """The earliest request through a node that came when an answer was complete."""
        first, last = self.first[node.index], self.last[node.index]
        if last < 0 or not self.requests[last].after(answer.acted):
            return None
        place = first
        while not (self.requests[place].after(answer.acted) and self._through(place, node)):
            place += 1
        return place

    def _through(self, place: int, node: Node) -> bool:
        at: Node | None = self.requests[place].end
        while at is not None and at.depth > node.depth:
            at = at.parent
        return at is node


def _traffic(history: History) -> _Traffic:
    requests, n = _in_time(history), len(history.nodes)
    first, last = [len(requests)] * n, [-1] * n
    ends, below, went_on = [False] * n, [False] * n, [False] * n
    for place, request in enumerate(requests):
        i = request.end.index
        first[i], last[i], ends[i] = min(first[i], place), place, True
    for node in reversed(history.nodes):  # children come after their parents
        i = node.index
        went_on[i] = went_on[i] or (ends[i] and below[i])
        if node.parent is not None and last[i] >= 0:
            p = node.parent.index
            first[p], last[p] = min(first[p], first[i]), max(last[p], last[i])
            below[p], went_on[p] = True, went_on[p] or went_on[i]
    return _Traffic(requests, first, last, went_on)


# ---------------------------------------------------------------- judging


@define(eq=False)
class _Judge:
    history: History
    policy: TreePolicy
    traffic: _Traffic
    main: tuple[Node, str]
    _clusters: dict[int, dict[int, int]] = field(factory=dict)  # by parent: the cluster of each action
    _lines: dict[int, list[str]] = field(factory=dict)  # by action: the long lines of its answer

    def fates(self) -> list[str]:
        fates = [self._fate(node) for node in self.history.actions]
        if self.policy.rewind == "discard":
            for order in self._rewound(fates):
                fates[order] = "rewound"
            for node in self.history.actions:  # what a live answer was said after stays as well
                up = node.above if fates[node.order] == LIVE else None
                while up is not None and fates[up.order] != LIVE:
                    fates[up.order] = LIVE
                    up = up.above
        return fates

    def _fate(self, node: Node) -> str:
        action = node.acted
        if action.echoes:
            return LIVE
        if action.sampled.finish == "aborted":
            return "aborted"
        if not action.delivered:
            return "undelivered"
        gone = "retried" if self._retried(node) else next((fate for fate, _ in self._instead(node)), None)
        if gone is None:
            side = self.policy.side_call == "discard" and is_side_call(self.history, node, self.main)
            return "side_call" if side else LIVE
        names = action.request.tool_names
        if action.parse_problem is not None or any(not could_run(c, names) for c in node.message.calls):
            return LIVE if self.policy.refused == "train" else "refused"
        return gone

    def _retried(self, node: Node) -> bool:
        """The same request was answered again, later and not beside it."""
        parent = node.parent
        assert parent is not None
        if parent.index not in self._clusters:
            self._clusters[parent.index] = _clusters(parent)
        cluster = self._clusters[parent.index]
        return any(
            n.action is not None and cluster[n.order] > cluster[node.order] and (n.action.delivered or n.action.echoes)
            for n in parent.answers
        )

    def _instead(self, node: Node) -> Iterator[tuple[str, Node]]:
        """What later requests have in an answer's place, the earliest first, each with what that makes of the answer.
        What carries it back, or is the answer itself, is no such thing."""
        assert node.parent is not None
        children = [
            c for same in node.parent.context.values() for c in same if c.moved is None or c.moved[0] is not node
        ]
        places = [(place, c.index) for c in children if (place := self.traffic.first_after(c, node)) is not None]
        for place, index in sorted(places):
            child = self.history.nodes[index]
            if self._brings_back(place, child, node):
                continue
            if child.message.role == "assistant":
                yield "replaced", child
            elif node.message.calls or self.traffic.went_on[index]:
                yield "dropped", child  # a last answer without calls stays unless the talk goes on without it

    def _brings_back(self, place: int, child: Node, node: Node) -> bool:
        """Compaction: what stands in the answer's place carries a line of it or of a later one (a summary)."""
        request = self.traffic.requests[place]
        texts = []
        at: Node | None = request.end
        while at is not None and at.depth >= child.depth:
            texts.append(at.message.text)
            at = at.parent
        text = "\n".join(texts)
        return any(
            line in text and not _asked(b, line)
            for b in self.history.actions[node.order : request.known]
            for line in self._long_lines(b)
        )

    def _long_lines(self, node: Node) -> list[str]:
        if node.order not in self._lines:
            self._lines[node.order] = long_lines(node.message.text)
        return self._lines[node.order]

    def _rewound(self, fates: list[str]) -> list[int]:
        """Accepted answers that a later request went back behind, and that nobody came back to."""
        last = self.traffic.last
        places = {request: place for place, request in enumerate(self.traffic.requests)}
        last_seen = [max(last[n.index], places[n.acted.request]) for n in self.history.actions]
        for node in self.history.nodes:
            if node.moved is not None:
                order = node.moved[0].order
                last_seen[order] = max(last_seen[order], last[node.index])
        behind: dict[int, int] = {}  # by action: the last request that went back behind it
        out = []
        for node in self.history.actions:
            gone = [last[child.index] for _, child in self._instead(node)]
            inherited = behind[node.above.order] if node.above is not None else -1
            behind[node.order] = max([inherited, *gone])
            if fates[node.order] == LIVE and behind[node.order] > last_seen[node.order]:
                out.append(node.order)
        return out


def _clusters(parent: Node) -> dict[int, int]:
    """Answers to one request, numbered by when they were asked for: those whose requests overlap in time,
    transitively, have one number."""
    actions = [n.acted for n in parent.answers if n.action is not None]
    actions.sort(key=lambda a: (a.request.at, a.request.known, a.order))
    out: dict[int, int] = {}
    number, latest = 0, actions[0]
    for action in actions:
        if action.request.after(latest):
            number += 1
        out[action.order] = number
        latest = max(latest, action, key=lambda a: (a.ended, a.order))
    return out


def is_side_call(history: History, node: Node, main: tuple[Node, str]) -> bool:
    """No tools, a system text other than the main one, no echo in its request, and its answer never comes back."""
    request = node.acted.request
    if request.tool_names or any(n.action or n.moved for n in request.end.path()):
        return False
    if opening(request.end)[1] == main[1]:
        return False
    later = (n for n in history.nodes[node.index + 1 :] if n.action is None or n.action.echoes)
    lines = long_lines(node.message.text)
    return not any(line in n.message.text and not _asked(node, line) for n in later for line in lines)


def long_lines(text: str) -> list[str]:
    """The lines of a text that are long enough to be recognised; tags end a line."""
    lines = (line.strip() for line in re.sub(r"<[^<>]*>", "\n", text).splitlines())
    return [line for line in dict.fromkeys(lines) if len(line) >= MIN_LINE]


def _asked(node: Node, line: str) -> bool:
    """Whether a line of an answer stood in its request already."""
    at: Node | None = node.acted.request.end
    while at is not None:
        if line in at.message.text:
            return True
        at = at.parent
    return False
