"""Virtual time: a deterministic trio run, and one timer for everything that ends at a known moment.

Invariants: with one seed, tasks that may run at the same moment run in the same order every time; ``Timers`` has one
alarm an owner, and the latest ``arm`` counts. Knows nothing of engines or sessions.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio
import trio.testing
from attrs import define, field

T = TypeVar("T")


def run(main: Callable[[], Awaitable[T]], *, seed: int) -> T:
    """``main`` on a clock that jumps to the next moment at which anything happens."""
    with _deterministic(seed):
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """trio orders ready tasks by chance; this is the switch that its hypothesis plugin uses to seed that chance."""
    loop: Any = trio._core._run
    before, state = loop._ALLOW_DETERMINISTIC_SCHEDULING, loop._r.getstate()
    loop._ALLOW_DETERMINISTIC_SCHEDULING = True
    loop._r.seed(seed)
    try:
        yield
    finally:
        loop._ALLOW_DETERMINISTIC_SCHEDULING = before
        loop._r.setstate(state)


@define(eq=False)
class Timers:
    """Alarms of many owners, served by one task: moving an alarm wakes nobody."""

    _due: dict[object, tuple[float, int]] = field(factory=dict)
    _heap: list[tuple[float, int, object, Callable[[], None]]] = field(factory=list)
    _count: Iterator[int] = field(factory=itertools.count)
    _scope: trio.CancelScope | None = None

    def arm(self, owner: object, when: float, ring: Callable[[], None]) -> None:
        """Call ``ring`` at virtual time ``when``; replaces the owner's earlier alarm. inf: none."""
        if when == math.inf:
            self._due.pop(owner, None)
            return
        order = next(self._count)
        self._due[owner] = (when, order)
        heapq.heappush(self._heap, (when, order, owner, ring))
        if self._scope is not None and when < self._scope.deadline:
            self._scope.deadline = when

    async def run(self) -> None:
        """Ring until cancelled."""
        while True:
            self._drop_replaced()
            with trio.CancelScope(deadline=self._heap[0][0] if self._heap else math.inf) as self._scope:
                await trio.sleep_forever()
            self._scope = None
            now = trio.current_time()
            while self._heap and self._heap[0][0] <= now:
                when, order, owner, ring = heapq.heappop(self._heap)
                if self._due.get(owner) == (when, order):
                    del self._due[owner]
                    ring()

    def _drop_replaced(self) -> None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
