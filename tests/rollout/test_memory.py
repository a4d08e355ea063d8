"""The limit by memory: no more sessions than the engines hold, and never so few that nothing runs."""

from __future__ import annotations

from typing import Any

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.engine.episode import Episode
from uniagent.engine.ports import TaskResult
from uniagent.engine.rollout.admission import Admission
from uniagent.engine.rollout.memory import Memory
from uniagent.engine.rollout.scheduler import Scheduler
from uniagent.engine.simulate import clock
from uniagent.engine.trajectory.types import Export, Ledger


def episode(sample: int, replica: int) -> Episode:
    return Episode(f"{sample}-{replica}", "t", sample, replica, TaskResult(0.0), Export((), (), Ledger()))


def test_the_expected_length_follows_the_sessions() -> None:
    lengths = iter([1000] + [3000] * 300 + [0])
    memory = Memory(lambda: 8000, 0.5, lambda e: next(lengths))
    assert memory.fits(10**9)  # nothing is known yet
    memory.note(episode(0, 0))
    assert memory.fits(8)
    assert not memory.fits(9)
    for _ in range(301):  # the last says nothing of itself
        memory.note(episode(0, 0))
    assert memory.fits(2)
    assert not memory.fits(3)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    total=st.integers(0, 4000),
    size=st.integers(1, 4),
    threshold=st.floats(0, 3),
)
def test_running_sessions_fit_and_batches_come(seed: int, total: int, size: int, threshold: float) -> None:
    running: list[int] = []

    async def main() -> None:
        now = 0

        async def one(row: Any, sample: int, replica: int) -> Episode:
            nonlocal now
            now += 1
            known = memory.expected
            if now > size and known:
                running.append(now)
            await trio.sleep(1 + (sample * 7 + replica * 3 + seed) % 5)
            now -= 1
            return episode(sample, replica)

        memory = Memory(lambda: total, 1.0, lambda e: 100)
        scheduler = Scheduler(
            ((i, {}) for i in range(10**6)),
            one,
            Admission(3, 1, threshold),
            size=size,
            limit=100,
            wanted=lambda group: None,
            returned=lambda group, cause: None,
            memory=memory,
        )
        with trio.fail_after(10_000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scheduler.run)
                for _ in range(6):
                    assert len(await scheduler.batch(3)) == 3
                    scheduler.synced()
                nursery.cancel_scope.cancel()

    clock.run(main, seed=seed)
    first = 3 * size * (1 + threshold)  # started before anything was known
    assert all(n * 50 <= total or n <= first for n in running)
