"""The turn tree as plain data: nodes, actions, requests, and the place of a request.

A node is one message after its parent's; the root's children are tool lists, the first message of every request. An
action node is an answer of the model. Tokens live in two places only: an action holds what was sampled, and the
*delta* it was sampled after: every segment between the nearest action above (its anchor) and its own first token,
generation prompt included. So the prompt of an action is its anchor's prompt, what the anchor said, and its delta.
Nodes are only added, and nothing that a chain of tokens is made of changes afterwards.

Knows no matching, no judging, no tokenizer.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from attrs import define, evolve, field, frozen

from uniagent.engine.messages import Message, ModelCall
from uniagent.engine.ports import Ids
from uniagent.engine.trajectory import echo
from uniagent.engine.trajectory.tape import Position, read
from uniagent.engine.trajectory.types import Sampled, Segment


@frozen
class TreePolicy:
    """What becomes of answers that a harness gave up; the keys of the same names in ``config.Gateway``."""

    rewind: str = "split"  # split | discard
    refused: str = "discard"  # discard | train
    side_call: str = "discard"  # discard | train
    edited: str = "train"  # train | context


@frozen(eq=False)
class Delta:
    """Segments and the same tokens in one array; the segments are views of it."""

    segments: tuple[Segment, ...]
    ids: Ids

    @classmethod
    def of(cls, segments: tuple[Segment, ...]) -> Delta:
        ids = np.concatenate([np.empty(0, np.int32), *(s.ids for s in segments)], dtype=np.int32)
        views, start = [], 0
        for s in segments:
            views.append(Segment(s.kind, ids[start : start + len(s.ids)], s.action))
            start += len(s.ids)
        return cls(tuple(views), ids)

    def same(self, other: Delta) -> bool:
        return np.array_equal(self.ids, other.ids) and [(s.kind, s.action, len(s.ids)) for s in self.segments] == [
            (s.kind, s.action, len(s.ids)) for s in other.segments
        ]


@frozen(eq=False)
class Request:
    """One request that was committed. ``known``: how many actions the tree held when it was located, which orders
    requests and answers at the same instant. ``end`` is the node of its last message."""

    at: float
    known: int
    end: Node
    tool_names: frozenset[str]
    stops: tuple[str, ...]

    def after(self, action: Action) -> bool:
        """Whether it came when that answer was complete."""
        return self.at > action.ended or (self.at == action.ended and self.known > action.order)


@frozen(eq=False)
class Echo:
    """An action that came back as ``message``, with the first ``kept`` of its sampled tokens standing there."""

    node: Node
    tier: str
    kept: int
    message: Message


@define(eq=False)
class Action:
    """One answer. ``sent``: a reply was made of it, so that it can be echoed; ``echoes`` holds the first of each tier;
    ``kept`` is the most of its tokens that an echo kept."""

    order: int
    sampled: Sampled
    delta: Delta
    request: Request
    started: float
    ended: float
    sent: bool
    parse_problem: str | None
    spoken: Position = field(repr=False)  # all tokens through this answer
    delivered: bool = False
    kept: int = 0
    echoes: dict[str, Echo] = field(factory=dict)

    @property
    def size(self) -> int:
        """Tokens that stand in the conversation: all but the overrun."""
        return len(self.sampled.said)

    @property
    def whole(self) -> bool:
        """Whether the harness has all of it: it was delivered, or came back whole."""
        return self.delivered or (bool(self.echoes) and self.kept == self.size)

    @property
    def tier(self) -> str | None:
        """The loosest in which it came back."""
        return max(self.echoes, key=echo.TIERS.index, default=None)

    def news(self, echo: Echo) -> bool:
        """Whether an echo says what no earlier one said."""
        return echo.tier not in self.echoes or echo.kept > self.kept


@define(eq=False)
class Node:
    """``above`` is the nearest action strictly above; ``index`` counts nodes as they are made, ``depth`` from the root.
    ``moved``: this context message is the first n sampled tokens of an action that stands, or stood, elsewhere.
    ``delta`` is what follows the anchor in requests that end here, as first encoded."""

    parent: Node | None = field(repr=False)
    above: Node | None = field(repr=False)
    message: Message
    index: int
    depth: int
    action: Action | None = field(default=None, repr=False)
    moved: tuple[Node, int] | None = field(default=None, repr=False)
    delta: Delta | None = field(default=None, repr=False)
    context: dict[Hashable, list[Node]] = field(factory=dict, repr=False)  # several of one key: moved or not
    answers: list[Node] = field(factory=list, repr=False)  # children: actions, and moved echoes of whole actions
    speakers: int = 0  # children with role assistant, actions included
    memo: tuple[Message, tuple[Option, ...]] | None = field(default=None, repr=False)  # a cache of ``TurnTree``

    @property
    def anchor(self) -> Node | None:
        """The nearest action at or above."""
        return self if self.action is not None else self.above

    @property
    def order(self) -> int:
        """The number in the session of an action."""
        return self.acted.order

    @property
    def sampled(self) -> Sampled:
        """What was sampled for an action."""
        return self.acted.sampled

    @property
    def acted(self) -> Action:
        if self.action is None:
            raise ValueError(f"node {self.index} ({self.message.role}) is no action")
        return self.action

    def path(self) -> list[Node]:
        """From the tool list to here."""
        out: list[Node] = []
        node = self
        while node.parent is not None:
            out.append(node)
            node = node.parent
        return out[::-1]

    def chain(self) -> list[Node]:
        """The actions from the root to here, this one included."""
        out: list[Node] = []
        node = self.anchor
        while node is not None:
            out.append(node)
            node = node.above
        return out[::-1]


Option = tuple[Node, Echo | None]  # a child that a message may be, and the echo it then is


@frozen(eq=False)
class History:
    """All of one session, in the order it happened."""

    nodes: list[Node] = field(factory=list)
    requests: list[Request] = field(factory=list)
    actions: list[Node] = field(factory=list)


@frozen
class ActionRecord:
    """What the session's record says of an action, whatever its fate. ``tier`` is the loosest in which it came back
    (None: it did not), ``differences`` what those echoes changed, ``messages`` the length of its request."""

    order: int
    tier: str | None
    differences: tuple[str, ...]
    messages: int
    tokens: int
    delivered: bool
    parse_problem: str | None
    started: float
    ended: float

    @classmethod
    def of(cls, node: Node) -> ActionRecord:
        a = node.acted
        changed = [d for e in a.echoes.values() for d in echo.differences(node.message, e.message)]
        return cls(
            order=a.order,
            tier=a.tier,
            differences=tuple(dict.fromkeys(changed)),
            messages=a.request.end.depth - 1,
            tokens=len(a.sampled.token_ids),
            delivered=a.delivered,
            parse_problem=a.parse_problem,
            started=a.started,
            ended=a.ended,
        )


@frozen(eq=False)
class Pending:
    """A message of a request after its anchor. ``moved``: it stands as the first n sampled tokens of that action."""

    message: Message
    moved: tuple[Node, int] | None = None


Echoes = tuple[Echo, "Echoes"] | None  # a linked list, newest first: the branches of a search share it
Branch = tuple[int, Node, Echoes]  # of a search: messages matched, the node reached, what was echoed on the way


@frozen(eq=False)
class Tip:
    """Where a request ended, so that the next one that begins with it need not be searched from the root: its messages,
    its end, and the branches its search had left. Holds as long as ``version`` is the tree's."""

    tools: Message
    messages: tuple[Message, ...]
    node: Node
    others: tuple[Branch, ...]
    version: int


@frozen(eq=False)
class Place:
    """Where a request stands in the tree.

    ``node``: the deepest match. ``anchor``: the nearest action at or above it. ``pending``: all messages between the
    anchor and the end of the request, known ones and new ones, without the tool list. ``known_delta``: what those
    encoded to when the same request came before, if it did. ``echoes``: answers that come back in a tier new to them.
    """

    call: ModelCall = field(repr=False)
    at: float
    known: int  # actions of the tree when it was located
    node: Node
    pending: tuple[Pending, ...] = field(repr=False)
    echoes: tuple[Echo, ...]
    fresh: tuple[Pending, ...] = field(repr=False)  # messages that have no node yet; the tool list may be the first
    tools: Message = field(repr=False)
    tool_names: frozenset[str] = field(repr=False)
    others: tuple[Branch, ...] = field(repr=False)  # what its search had left
    resumed: Tip | None = field(repr=False)  # where its search began
    version: int = field(repr=False)  # of the tree

    @property
    def anchor(self) -> Node | None:
        return self.node.anchor

    @property
    def known_delta(self) -> tuple[Segment, ...] | None:
        delta = self.node.delta
        return delta.segments if delta is not None and not self.fresh else None

    def apart(self) -> Place:
        """The same request as a chain of its own: no anchor, all of it pending, and the answers it echoes as their
        sampled ids. For templates that rewrite what stood before; a token is trained once all the same."""
        known: list[Pending] = []
        node = self.node
        while node.parent is not None:
            known.append(Pending(node.message, (node, node.acted.size) if node.action is not None else node.moved))
            node = node.parent
        fresh = (*reversed(known), *self.fresh)
        return evolve(self, node=node, pending=fresh[1:], fresh=fresh, others=(), resumed=None, version=-1)

    def prefix(self) -> Ids:
        """[P] everything through the anchor, as the engine saw it: one copy."""
        return read(self.anchor.acted.spoken if self.anchor is not None else None)

    def prompt(self, delta: tuple[Segment, ...]) -> Ids:
        """[P] the prefix and the delta: what the engine is asked to continue, in one copy."""
        return read(self.anchor.acted.spoken if self.anchor is not None else None, *(s.ids for s in delta))
