"""A rollout node's work: pulls groups and asks from the head, runs them, pushes what they gave.

The same code runs on a rollout rank, on a node that joined from a job of its own, and on a rank of the training mesh
while that serves. Invariants: a session or ask begins only under the policy version it was given with, or a newer one;
what the head does not want any more is cancelled; a message is repeated until it is answered; when the head is another
one (it was restarted), everything from before is dropped. A head that does not answer for ``patience_s`` ends the node
with ``HeadLost``. Knows sessions, generations and updates as functions; no socket, no engine, no tensor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import trio
from attrs import define, field, frozen

from uniagent.engine.episode import Episode
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Generation, Ids, Json, Sampling, SessionId
from uniagent.engine.separate import messages
from uniagent.engine.separate.leases import Kind, Lease

Call = Callable[[str, Mapping[str, Json]], Awaitable[dict[str, Json]]]  # (verb, message) -> answer; Unreachable

RETRY_S = (0.05, 2.0)  # between attempts to reach the head: the first, the longest


class Unreachable(ConnectionError):
    """A message or its answer was lost."""


class HeadLost(UserError):
    """The head has not answered for too long."""


@frozen
class Doings:
    """What a node can do. ``update`` brings the engine to the version, or a newer one, which it gives; ``check``
    compares the engine with the head's canary; ``role`` is called when the training mesh changes its role, with
    the number of changes so far: while it is odd the mesh serves."""

    session: Callable[[Mapping[str, Json], int, int], Awaitable[Episode]]
    generate: Callable[[Ids, Sampling, SessionId], Awaitable[Generation]]
    update: Callable[[int], Awaitable[int]]
    check: Callable[[Json], Awaitable[None]]
    role: Callable[[int], Awaitable[None]]
    offload: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync


@define(eq=False)
class _Held:
    """A lease this node works on. ``after`` is when the same item's earlier lease has ended here."""

    attempt: int
    head: str
    after: trio.Event
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    ended: trio.Event = field(factory=trio.Event)


@define(eq=False)
class Worker:
    """``capacity`` is the most groups and asks it holds at once; 0 while ``draining``, and on the training mesh
    (``mesh``) while that trains. ``has`` is the engine's version."""

    name: str
    call: Call
    doings: Doings
    capacity: Mapping[Kind, int]
    wait_s: float = 5.0
    patience_s: float = 300.0
    mesh: bool = False
    has: int = -1
    draining: bool = False
    lost_work: int = 0  # items dropped unfinished
    _head: str = ""
    _told: int = -1  # the version the head named last
    _shift: int = 0
    _canary: int = -1
    _held: dict[str, _Held] = field(factory=dict)
    _news: trio.Event = field(factory=trio.Event)
    _pull: trio.CancelScope = field(factory=trio.CancelScope)

    async def run(self) -> None:
        """Until the head ends, or it is drained."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._updates)
            while not (self.draining and not self._held):
                with trio.CancelScope() as self._pull:
                    answer = await self._say("pull", self._state())
                if not self._pull.cancelled_caught and await self._told_by(answer, nursery):
                    break
            with trio.move_on_after(RETRY_S[1]):
                await self._say("leave", {})
            nursery.cancel_scope.cancel()

    async def drain(self, within_s: float) -> None:
        """Takes nothing more; returns when all that runs has ended and was pushed, or was given up after so long."""
        self.draining = True
        self._pull.cancel()
        with trio.move_on_after(within_s):
            while self._held:
                await self._changed()
        for held in self._held.values():
            held.scope.cancel()

    async def ask(self, id: str, prompt: Ids, sampling: Sampling, session: SessionId) -> Generation:
        """A generation by another node."""
        body = {"id": id, "ask": messages.ask(prompt, sampling, session), "wait_s": self.wait_s}
        while True:
            answer = (await self._say("ask", body)).get("answer")
            if answer is not None:
                return messages.read_generation(answer)

    # ------------------------------------------------------------ what the head says

    def _state(self) -> dict[str, Json]:
        closed = self.draining or (self.mesh and self._shift % 2 == 0)
        return {
            "held": {id: held.attempt for id, held in self._held.items()},
            "capacity": {kind.value: 0 if closed else n for kind, n in self.capacity.items()},
            "has": self.has,
            "version": self._told,
            "shift": self._shift,
            "canary": self._canary,
            "wait_s": self.wait_s,
        }

    async def _told_by(self, answer: Mapping[str, Json], nursery: trio.Nursery) -> bool:
        """Does what the head says; True when it ends."""
        if answer["head"] != self._head or "version" not in answer:
            self._begin_anew(answer["head"])
            return False
        for id in answer["drop"]:
            if (held := self._held.get(id)) is not None:
                held.scope.cancel()
        if answer["version"] != self._told:
            self._told = answer["version"]
            self._notify()
        if answer["shift"] != self._shift:
            self._shift = answer["shift"]
            await self.doings.role(self._shift)
        if answer["canary"] is not None and answer["canary"]["version"] > self._canary:
            self._canary = answer["canary"]["version"]
            nursery.start_soon(self._check, answer["canary"])
        for given in map(messages.read_lease, answer["give"]):
            self._take(given, nursery)
        return bool(answer["ending"])

    def _begin_anew(self, head: str) -> None:
        for held in self._held.values():
            held.scope.cancel()
        self._head, self._told, self._canary, self._shift, self.has = head, -1, -1, 0, -1

    async def _say(self, verb: str, body: Mapping[str, Json], head: str | None = None) -> dict[str, Json]:
        """Repeats the message until it is answered. ``head``: whom it is for, where that is not the one of now."""
        pause, begun = RETRY_S[0], trio.current_time()
        while True:
            try:
                if not self._head:
                    self._head = (await self.call("hello", {"node": self.name}))["head"]
                return await self.call(verb, {"node": self.name, "head": head or self._head, **body})
            except Unreachable as problem:
                if trio.current_time() - begun > self.patience_s:
                    raise HeadLost(f"the head has not answered for {self.patience_s:g} s: {problem}") from problem
            await trio.sleep(pause)
            pause = min(2 * pause, RETRY_S[1])

    # ------------------------------------------------------------ versions

    async def _updates(self) -> None:
        """Brings the engine to each version that the head names."""
        while True:
            if self.has < self._told:
                head = self._head
                reached = await self.doings.update(self._told)
                if head == self._head:
                    self.has = reached
                    self._notify()
                    self._pull.cancel()  # the head waits to hear of it
            else:
                await self._changed()

    async def _check(self, canary: Mapping[str, Json]) -> None:
        """Once the engine has the canary's version, if it does not move on before."""
        while self.has < canary["version"]:
            await self._changed()
        if self.has == canary["version"]:
            await self.doings.check(canary)

    # ------------------------------------------------------------ work

    def _take(self, lease: Lease, nursery: trio.Nursery) -> None:
        before = self._held.get(lease.id)
        if before is not None and before.attempt == lease.attempt and not before.scope.cancel_called:
            return  # given again because an answer was late
        after = before.ended if before is not None else _set()
        if before is not None:
            before.scope.cancel()
        held = self._held[lease.id] = _Held(lease.attempt, self._head, after)
        nursery.start_soon(self._work, lease, held)

    async def _work(self, lease: Lease, held: _Held) -> None:
        with held.scope:
            await held.after.wait()
            while self.has < lease.payload["version"]:
                await self._changed()
            async with trio.open_nursery() as parts:
                for part in lease.parts:
                    parts.start_soon(self._part, lease, part, held.head)
        self.lost_work += held.scope.cancelled_caught
        if self._held.get(lease.id) is held:
            del self._held[lease.id]
        held.ended.set()
        self._notify()
        if self.draining:
            self._pull.cancel()

    async def _part(self, lease: Lease, part: int, head: str) -> None:
        payload = lease.payload
        if lease.kind is Kind.GROUP:
            episode = await self.doings.session(payload["row"], payload["sample"], part)
            result: Json = await self.doings.offload(messages.episode, episode)
        else:
            result = messages.generation(await self.doings.generate(*messages.read_ask(payload)))
        await self._say("push", {"id": lease.id, "part": part, "result": result}, head)

    async def _changed(self) -> None:
        await self._news.wait()

    def _notify(self) -> None:
        self._news.set()
        self._news = trio.Event()


def _set() -> trio.Event:
    event = trio.Event()
    event.set()
    return event
