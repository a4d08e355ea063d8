"""Who works on what: the state of all work that the head has handed out, as a pure machine over messages and times.

An item is a group of sessions, or one generation that its own node cannot make (an ask); it has parts, each of which
is done once. Nodes pull items and push parts. Every message is idempotent: a pull says what the node holds, and the
answer says what it should hold, so that a lost answer is simply given again; a push counts the first time.

Invariants
 - a part is done at most once, whoever did it; an item leaves when all of its parts are done or it is cancelled;
 - an item is leased to at most one node; a node that says nothing for long loses its items, which are leased again,
   without the parts that are done; a node that was only silent keeps what nobody took meanwhile;
 - a node holds at most its capacity, and on taking more at most an even share of its kind; older items go first.

Knows no clock, socket, session or policy: times, payloads and results are the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

from attrs import define, field, frozen

from uniagent.engine.ports import Json


class Kind(StrEnum):
    GROUP = "group"
    ASK = "ask"


@frozen
class Lease:
    """An item in a node's hands: the parts that are still to do. ``attempt`` counts its leases."""

    id: str
    kind: Kind
    attempt: int
    parts: tuple[int, ...]
    payload: Json


@define
class _Item:
    id: str
    kind: Kind
    payload: Json
    missing: set[int]
    node: str | None = None
    attempt: int = 0

    def lease(self) -> Lease:
        return Lease(self.id, self.kind, self.attempt, tuple(sorted(self.missing)), self.payload)


@define
class _Node:
    seen: float
    capacity: Mapping[Kind, int] = field(factory=dict)


@frozen
class Pulled:
    """The answer to a pull: items the node should begin, and those it holds in vain."""

    give: tuple[Lease, ...]
    drop: tuple[str, ...]


@define
class Leases:
    """``nodes`` by name, ``lost`` counts those that fell silent while they held something."""

    nodes: dict[str, _Node] = field(factory=dict)
    lost: int = 0
    _items: dict[str, _Item] = field(factory=dict)  # in the order they came

    # ------------------------------------------------------------ the owner of the work

    def add(self, id: str, kind: Kind, parts: Iterable[int], payload: Json) -> None:
        if id in self._items:
            raise AssertionError(f"{kind} {id} is under way already")
        self._items[id] = _Item(id, kind, payload, set(parts))

    def cancel(self, id: str, part: int) -> None:
        """The part is not wanted any more; nothing happens when it is done."""
        self._finish(id, part)

    def __contains__(self, id: str) -> bool:
        return id in self._items

    def holder(self, id: str) -> str | None:
        """The node that works on an item."""
        item = self._items.get(id)
        return item.node if item else None

    def open(self, kind: Kind) -> int:
        return sum(i.kind is kind for i in self._items.values())

    def serving(self, kind: Kind) -> list[str]:
        """Nodes that take such items."""
        return [name for name, node in self.nodes.items() if node.capacity.get(kind, 0)]

    # ------------------------------------------------------------ messages of nodes

    def pull(self, name: str, held: Mapping[str, int], capacity: Mapping[Kind, int], now: float) -> Pulled:
        """``held``: the attempt of every item the node has, those included whose last push is not answered yet.
        ``capacity``: the most items of a kind it would hold; 0: it takes none now."""
        node = self.nodes.setdefault(name, _Node(now))
        node.seen, node.capacity = max(now, node.seen), dict(capacity)
        drop = []
        for id, attempt in held.items():
            item = self._items.get(id)
            if item is not None and item.node is None and item.attempt == attempt:
                item.node = name  # it fell silent and is back before anyone took this
            elif item is None or item.node != name or item.attempt != attempt:
                drop.append(id)
        mine = [i for i in self._items.values() if i.node == name]
        give = [i.lease() for i in mine if held.get(i.id) != i.attempt]
        for kind in Kind:
            limit = min(capacity.get(kind, 0), self._share(kind))
            room = limit - sum(i.kind is kind for i in mine)
            give += [self._take(name, item) for item in self._queue(kind)[: max(0, room)]]
        return Pulled(tuple(give), tuple(drop))

    def push(self, name: str, id: str, part: int, now: float) -> bool:
        """A part's result came; whether it is the first. Who sent it, and under which lease, is no matter."""
        if name in self.nodes:
            self.nodes[name].seen = now
        return self._finish(id, part)

    def leave(self, name: str) -> None:
        """The node is gone; what it held is free."""
        self.nodes.pop(name, None)
        for item in self._items.values():
            if item.node == name:
                item.node = None

    def expire(self, now: float, after_s: float) -> list[str]:
        """Nodes that were silent for longer, now gone."""
        silent = [name for name, node in self.nodes.items() if now - node.seen > after_s]
        for name in silent:
            self.lost += any(i.node == name for i in self._items.values())
            self.leave(name)
        return silent

    def _queue(self, kind: Kind) -> list[_Item]:
        return [i for i in self._items.values() if i.kind is kind and i.node is None]

    def _share(self, kind: Kind) -> int:
        return math.ceil(self.open(kind) / max(1, len(self.serving(kind))))

    def _take(self, name: str, item: _Item) -> Lease:
        item.node = name
        item.attempt += 1
        return item.lease()

    def _finish(self, id: str, part: int) -> bool:
        item = self._items.get(id)
        if item is None or part not in item.missing:
            return False
        item.missing.discard(part)
        if not item.missing:
            del self._items[id]
        return True
