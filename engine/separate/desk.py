"""The head's desk: work is put on it and awaited here; nodes take it and bring results, by messages.

``handle`` answers one message, whoever carried it: HTTP (``server``), a call in this process, a test that loses every
third one. Invariants: whoever awaits a part gets it once, whatever happens to the nodes; a message said twice has the
effect of one; nodes that are silent for ``lease_s`` lose what they hold; messages for another head, from before a
restart, change nothing and are told so. A result is checked before it counts. Knows the work as JSON and results by
``read``; no policy, no weights.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import trio
from attrs import define, field

from uniagent.engine.episode import Episode
from uniagent.engine.messages import Problem
from uniagent.engine.ports import Generation, Json
from uniagent.engine.separate import messages
from uniagent.engine.separate.leases import Kind, Leases

LOOKS = 4  # at who is silent, in the time a node may be


@define(eq=False)
class _Place:
    """Where a part's result goes."""

    value: Any = None
    done: trio.Event = field(factory=trio.Event)


@define(eq=False)
class _Asked:
    """A generation that a node asked for; forgotten when it does not ask again."""

    heard: float
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    answer: Generation | None = None
    done: trio.Event = field(factory=trio.Event)


@define(eq=False)
class Desk:
    """``size`` sessions make a group. ``version`` is the policy version nodes should have (-1: there are no weights
    yet); ``shift`` counts the training mesh's changes of role: while it is odd the mesh serves; ``ending`` sends nodes
    home. ``canary`` is what engines of the newest version must answer."""

    size: int
    lease_s: float
    nursery: trio.Nursery
    mesh: frozenset[str] = frozenset()  # names of the training mesh's own nodes
    offload: Callable[..., Any] = trio.to_thread.run_sync
    head: str = field(factory=lambda: secrets.token_hex(8))
    leases: Leases = field(factory=Leases)
    version: int = -1
    shift: int = 0
    ending: bool = False
    canary: Json = None
    duplicates: int = 0
    _told: dict[str, tuple[int, bool]] = field(factory=dict)  # node -> version it has, whether it knows of the end
    _places: dict[tuple[str, int], _Place] = field(factory=dict)
    _asked: dict[str, _Asked] = field(factory=dict)
    _changed: trio.Event = field(factory=trio.Event)

    # ------------------------------------------------------------ at the head

    async def session(self, row: Mapping[str, Json], sample: int, replica: int) -> Episode:
        """The episode of one session of a group, from whichever node. Its siblings are asked for at the same time."""
        id = f"group-{sample}"
        if (id, replica) not in self._places:
            self._add(id, Kind.GROUP, self.size, {"row": dict(row), "sample": sample, "version": self.version})
        found: Episode = await self._result(id, replica)
        return found

    async def generate(self, id: str, ask: Mapping[str, Json]) -> Generation:
        """A generation by whichever node; ``ask`` as ``messages.ask`` makes it."""
        self._add(id, Kind.ASK, 1, {**ask, "version": self.version})
        found: Generation = await self._result(id, 0)
        return found

    def announce(self, **changes: Any) -> None:
        """Change ``version``, ``shift``, ``ending`` or ``canary``, and let nodes know at once."""
        for name, value in changes.items():
            setattr(self, name, value)
        self._notify()

    def others(self) -> int:
        """Nodes beside the training mesh's that take groups."""
        return len(set(self.leases.serving(Kind.GROUP)) - self.mesh)

    def reached(self, version: int) -> frozenset[str]:
        """Nodes that have the version, or a newer one."""
        return frozenset(name for name, (has, _) in self._told.items() if has >= version)

    async def wait_until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self._changed.wait()

    async def watch(self) -> None:
        """Until cancelled: takes the work of nodes that are silent, and forgets asks that nobody asks about. A head
        that was itself held up has heard nobody meanwhile, and judges no one for it."""
        look_s = self.lease_s / LOOKS
        while True:
            before = trio.current_time()
            await trio.sleep(look_s)
            now = trio.current_time()
            if now - before > 2 * look_s:
                continue
            if silent := self.leases.expire(now, self.lease_s):
                for name in silent:
                    self._told.pop(name, None)
                self._notify()
            for id, asked in tuple(self._asked.items()):
                if now - asked.heard > self.lease_s:
                    asked.scope.cancel()
                    del self._asked[id]

    def _add(self, id: str, kind: Kind, parts: int, payload: Json) -> None:
        self.leases.add(id, kind, range(parts), payload)
        self._places |= {(id, part): _Place() for part in range(parts)}
        self._notify()

    async def _result(self, id: str, part: int) -> Any:
        place = self._places[id, part]
        try:
            await place.done.wait()
            return place.value
        finally:
            del self._places[id, part]
            self.leases.cancel(id, part)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # ------------------------------------------------------------ messages

    async def handle(self, verb: str, body: Mapping[str, Json]) -> dict[str, Json]:
        """The answer to a message; Problem for one that makes no sense."""
        await trio.lowlevel.checkpoint()  # a node in this process lets others have their turn
        if verb == "hello":
            return {"head": self.head, "version": self.version}
        known = {"pull": self._pull, "push": self._push, "ask": self._ask, "leave": self._leave}
        if verb not in known:
            raise Problem(404, "unknown_verb", f"nodes say hello, pull, push, ask or leave, not {verb!r}")
        if body["head"] != self.head:
            return {"head": self.head}  # it knew an earlier run: it begins anew
        try:
            return {"head": self.head, **await known[verb](body)}
        except (KeyError, TypeError, ValueError) as problem:
            raise Problem(400, "bad_message", f"{verb}: {type(problem).__name__}: {problem}") from problem

    async def _pull(self, body: Mapping[str, Json]) -> dict[str, Json]:
        """Waits ``wait_s`` at most for something that the node does not know."""
        name, capacity = body["node"], {Kind(k): n for k, n in body["capacity"].items()}
        knows = (body["version"], body["shift"], body["canary"], False)
        self._told[name] = (body["has"], False)
        heard = trio.current_time()
        self._notify()
        with trio.move_on_after(body["wait_s"]):
            while True:
                now = self._state()
                pulled = self.leases.pull(name, body["held"], capacity, heard)
                if pulled.give or pulled.drop or knows != now:
                    break
                await self._changed.wait()
        if self.ending:
            self._told[name] = (body["has"], True)
            self._notify()
        return {
            "give": [messages.lease(lease) for lease in pulled.give],
            "drop": list(pulled.drop),
            "version": self.version,
            "shift": self.shift,
            "ending": self.ending,
            "canary": self.canary,
        }

    def _state(self) -> tuple[Json, ...]:
        return (self.version, self.shift, self.canary["version"] if self.canary else -1, self.ending)

    async def _push(self, body: Mapping[str, Json]) -> dict[str, Json]:
        id, part = body["id"], body["part"]
        if (id, part) not in self._places:
            self.duplicates += 1
            return {"first": False}
        if id.startswith("group-"):
            value: Any = await self.offload(messages.read_episode, body["result"])
            if (id, part) != (f"group-{value.sample}", value.replica):
                raise ValueError(f"a push of {id}, part {part}, brought sample {value.sample}, replica {value.replica}")
        else:
            value = messages.read_generation(body["result"])
        first = self.leases.push(body["node"], id, part, trio.current_time())
        place = self._places.get((id, part))
        if first and place is not None:
            place.value = value
            place.done.set()
        self.duplicates += not first
        self._notify()
        return {"first": first}

    async def _ask(self, body: Mapping[str, Json]) -> dict[str, Json]:
        """Asked again until it is answered; the first time begins it."""
        id = f"ask-{body['node']}-{body['id']}"
        asked = self._asked.get(id)
        if asked is None:
            asked = self._asked[id] = _Asked(trio.current_time())
            self.nursery.start_soon(self._make, id, body["ask"], asked)
        asked.heard = trio.current_time()
        with trio.move_on_after(body["wait_s"]):
            await asked.done.wait()
        asked.heard = trio.current_time()
        return {"answer": None if asked.answer is None else messages.generation(asked.answer)}

    async def _make(self, id: str, ask: Mapping[str, Json], asked: _Asked) -> None:
        with asked.scope:
            asked.answer = await self.generate(id, ask)
            asked.done.set()

    async def _leave(self, body: Mapping[str, Json]) -> dict[str, Json]:
        self.leases.leave(body["node"])
        self._told.pop(body["node"], None)
        self._notify()
        return {}
