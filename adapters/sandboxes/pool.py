"""Sandboxes of slow backends, ready before they are wanted: a bounded pool of started ones, and prepared images.

Invariants: at most ``size`` of a kind and KINDS kinds stand ready, at most STARTING are on their way; whoever opens
gets one that is alive or starts one; nothing of the pool is open once ``run`` has ended. Knows no backend: a kind is a
config, ``start`` makes a sandbox of it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, TypeVar

import trio
from attrs import define, field

from uniagent.engine.errors import InfraError, UserError

log = logging.getLogger(__name__)
KINDS, STARTING = 4, 16
Kind = TypeVar("Kind")
Box = TypeVar("Box")


@define(eq=False)
class _Held(Generic[Box]):
    """A sandbox that a task of the pool keeps open until it is released."""

    box: Box
    released: trio.Event = field(factory=trio.Event)
    closed: trio.Event = field(factory=trio.Event)


@define(eq=False)
class _Shelf(Generic[Kind, Box]):
    kind: Kind
    ready: deque[_Held[Box]] = field(factory=deque)
    coming: int = 0


class WarmPool(Generic[Kind, Box]):
    """``open`` as ``start``, only sooner. ``run`` is a task that lives as long as the pool."""

    def __init__(
        self,
        start: Callable[[Kind], AbstractAsyncContextManager[Box]],
        size: int,
        alive: Callable[[Box], bool] = lambda box: True,
    ) -> None:
        self.start, self.size, self.alive = start, size, alive
        self.shelves: OrderedDict[str, _Shelf[Kind, Box]] = OrderedDict()
        self.asked = trio.Event()

    @asynccontextmanager
    async def open(self, kind: Kind) -> AsyncIterator[Box]:
        """One sandbox of a kind. Raises what ``start`` raises."""
        held = self._take(kind)
        if held is None:
            async with self.start(kind) as box:
                yield box
            return
        try:
            yield held.box
        finally:
            held.released.set()
            with trio.CancelScope(shield=True):  # bounded by the closing itself
                await held.closed.wait()

    def _take(self, kind: Kind) -> _Held[Box] | None:
        """A ready one, or None; either way more are asked for."""
        if not self.size:
            return None
        shelf = self.shelves.setdefault(repr(kind), _Shelf(kind))
        self.shelves.move_to_end(repr(kind))
        if len(self.shelves) > KINDS:
            _, oldest = self.shelves.popitem(last=False)
            for held in oldest.ready:
                held.released.set()
        self.asked.set()
        while shelf.ready:
            held = shelf.ready.popleft()
            if self.alive(held.box):
                return held
            held.released.set()
        return None

    async def run(self) -> None:
        """Fill the shelves whenever something was taken; on cancellation everything held is closed."""
        places = trio.CapacityLimiter(STARTING)
        async with trio.open_nursery() as nursery:
            while True:
                await self.asked.wait()
                self.asked = trio.Event()
                for shelf in self.shelves.values():
                    for _ in range(self.size - len(shelf.ready) - shelf.coming):
                        shelf.coming += 1
                        nursery.start_soon(self._hold, shelf, places)

    async def _hold(self, shelf: _Shelf[Kind, Box], places: trio.CapacityLimiter) -> None:
        """One sandbox from its start to its end. A start that fails is told and left: who opens next tries anew."""
        coming = True
        held: _Held[Box] | None = None
        try:
            await places.acquire()
            try:
                manager = self.start(shelf.kind)
                box = await manager.__aenter__()
            finally:
                places.release()
                shelf.coming -= 1
                coming = False
            held = _Held(box)
            try:
                if self.shelves.get(repr(shelf.kind)) is shelf:
                    shelf.ready.append(held)
                    await held.released.wait()
            finally:
                await manager.__aexit__(None, None, None)
        except (InfraError, UserError) as problem:
            log.warning("no warm sandbox: %s", problem)
        finally:
            if coming:
                shelf.coming -= 1
            if held is not None:
                held.closed.set()


class PreparedImages:
    """Images made once for all that want the same: whoever asks first makes it, the others wait for it."""

    def __init__(self) -> None:
        self.made: dict[str, str] = {}
        self.locks: dict[str, trio.Lock] = {}

    async def get(self, key: str, make: Callable[[], Awaitable[str]]) -> str:
        """The image's name. A failure is raised to its caller; the next one tries again."""
        async with self.locks.setdefault(key, trio.Lock()):
            if key not in self.made:
                self.made[key] = await make()
            return self.made[key]
