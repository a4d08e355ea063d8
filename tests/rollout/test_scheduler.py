"""The scheduler and its door: everything that starts ends in one place, the bound holds, and nothing hangs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.engine.episode import Episode
from uniagent.engine.ports import Failure, TaskResult
from uniagent.engine.rollout.admission import Admission
from uniagent.engine.rollout.scheduler import Group, Scheduler, Starved
from uniagent.engine.trajectory.types import Export, Ledger


def episode(sample: int, replica: int, failure: Failure | None = None) -> Episode:
    result = TaskResult(0.0, failure=failure)
    return Episode(f"{sample}-{replica}", "t", sample, replica, result, Export((), (), Ledger()))


class World:
    """Sessions of random length on the virtual clock; some fail outside the model."""

    def __init__(self, seed: int, *, failing: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.failing = failing
        self.running = 0
        self.most = 0
        self.started: list[tuple[int, int]] = []
        self.returned: list[int] = []

    async def run_one(self, row: Mapping[str, Any], sample: int, replica: int) -> Episode:
        self.started.append((sample, replica))
        self.running += 1
        self.most = max(self.most, self.running)
        await trio.sleep(self.random.lognormvariate(0, 1))
        self.running -= 1
        return episode(sample, replica, Failure.INFRA if self.random.random() < self.failing else None)

    def wanted(self, group: Group) -> str | None:
        return None if any(e.counts for e in group) else "infra"

    def give_back(self, group: Group, cause: str) -> None:
        self.returned.append(group[0].sample)

    def scheduler(self, admission: Admission, *, size: int, limit: int, rows: int = 10**9) -> Scheduler:
        return Scheduler(
            ((i, {}) for i in range(rows)),
            self.run_one,
            admission,
            size=size,
            limit=limit,
            wanted=self.wanted,
            returned=self.give_back,
        )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    per_step=st.integers(1, 5),
    every=st.integers(1, 3),
    threshold=st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5]),
    size=st.integers(1, 4),
    spare=st.integers(0, 12),
    failing=st.sampled_from([0.0, 0.3, 0.7]),
)
def test_every_group_ends_in_one_place_and_the_staleness_bound_holds(
    seed: int, per_step: int, every: int, threshold: float, size: int, spare: int, failing: float
) -> None:
    async def main() -> None:
        world = World(seed, failing=failing)
        admission = Admission(per_step, every, threshold)
        scheduler = world.scheduler(admission, size=size, limit=size + spare)
        batches: list[list[Group]] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scheduler.run)
            for step in range(1, 8):
                batches.append(await scheduler.batch(per_step))
                await trio.sleep(world.random.random())  # training
                if step % every == 0:
                    scheduler.synced()
                assert admission.outstanding <= admission.limit
            scheduler.close()
        trained = [g[0].sample for batch in batches for g in batch]
        left = [g[0].sample for g in scheduler.leftover]
        assert all(len(batch) == per_step for batch in batches)
        assert sorted(trained + left + world.returned) == list(range(admission.admitted))
        assert len(world.started) == admission.admitted * size
        assert world.most <= size + spare
        assert world.running == scheduler.sessions == admission.running == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_without_staleness_a_batch_is_the_next_samples_and_nothing_runs_while_training(
    autojump_clock: trio.testing.MockClock,
) -> None:
    world = World(1)
    scheduler = world.scheduler(Admission(4), size=2, limit=100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduler.run)
        for step in range(5):
            batch = await scheduler.batch(4)
            assert [g[0].sample for g in batch] == list(range(4 * step, 4 * step + 4))
            await trio.sleep(100)
            assert world.running == 0
            scheduler.synced()
        scheduler.close()


async def test_a_batch_that_nothing_can_fill_is_an_error_with_the_counters(
    autojump_clock: trio.testing.MockClock,
) -> None:
    world = World(1)
    scheduler = world.scheduler(Admission(2), size=1, limit=4)
    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scheduler.run)
            await scheduler.batch(2)
            await scheduler.batch(2)  # without a sync in between, admission grants nothing
    assert caught.group_contains(Starved, match="'consumed': 2")


async def test_the_end_of_the_data_gives_what_is_left(autojump_clock: trio.testing.MockClock) -> None:
    world = World(3)
    scheduler = world.scheduler(Admission(2, staleness_threshold=1.0), size=2, limit=8, rows=3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduler.run)
        sizes = []
        for _ in range(3):
            sizes.append(len(await scheduler.batch(2)))
            scheduler.synced()
    assert sizes == [2, 1, 0]


async def test_a_short_group_overtakes_a_long_one(autojump_clock: trio.testing.MockClock) -> None:
    async def run_one(row: Mapping[str, Any], sample: int, replica: int) -> Episode:
        await trio.sleep(100 if sample == 0 else 1)
        return episode(sample, replica)

    world = World(0)
    world.run_one = run_one  # type: ignore[method-assign]
    scheduler = world.scheduler(Admission(1, staleness_threshold=2.0), size=1, limit=3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scheduler.run)
        first = await scheduler.batch(1)
        assert first[0][0].sample in (1, 2)
        assert trio.current_time() < 50
        scheduler.close()


def test_a_limit_below_the_group_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a group starts whole"):
        World(0).scheduler(Admission(1), size=4, limit=3)


def test_counters_survive_a_checkpoint_and_grant_nothing_twice() -> None:
    before = Admission(2, staleness_threshold=1.0)
    for _ in range(4):
        before.admit()
    before.complete(fills=True)
    before.complete(fills=True)
    before.consume(2)
    after = Admission(2, staleness_threshold=1.0)
    after.restore(before.counters())
    assert (after.admitted, after.consumed) == (4, 2)
    assert after.room == after.limit
