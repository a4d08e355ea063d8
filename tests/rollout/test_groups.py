"""Groups run whole, under a limit, and come back in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import trio
import trio.testing

from uniagent.engine.episode import Episode
from uniagent.engine.ports import TaskResult
from uniagent.engine.rollout.groups import run_groups
from uniagent.engine.trajectory.types import Export, Ledger


def episode(sample: int, replica: int) -> Episode:
    return Episode(f"{sample}-{replica}", "t", sample, replica, TaskResult(0.0), Export((), (), Ledger()))


async def test_groups_come_back_whole_and_in_order_whatever_order_they_end_in(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def run_one(row: Mapping[str, Any], sample: int, replica: int) -> Episode:
        await trio.sleep(10 - sample + replica)
        return episode(sample, replica)

    groups = await run_groups(((i, {}) for i in range(5)), run_one, size=3, limit=6)
    assert [[(e.sample, e.replica) for e in g] for g in groups] == [[(i, r) for r in range(3)] for i in range(5)]


async def test_no_more_sessions_run_at_once_than_the_limit_and_groups_start_whole(
    autojump_clock: trio.testing.MockClock,
) -> None:
    running: set[tuple[int, int]] = set()
    most = 0

    async def run_one(row: Mapping[str, Any], sample: int, replica: int) -> Episode:
        nonlocal most
        running.add((sample, replica))
        most = max(most, len(running))
        await trio.sleep(1 + replica)
        running.discard((sample, replica))
        return episode(sample, replica)

    await run_groups(((i, {}) for i in range(7)), run_one, size=4, limit=11)
    assert most == 8


async def test_no_group_starts_after_a_stop_and_the_started_ones_end(autojump_clock: trio.testing.MockClock) -> None:
    stop = trio.Event()

    async def run_one(row: Mapping[str, Any], sample: int, replica: int) -> Episode:
        await trio.sleep(1)
        if sample == 1:
            stop.set()
        return episode(sample, replica)

    groups = await run_groups(((i, {}) for i in range(10)), run_one, size=1, limit=1, stop=stop)
    assert [g[0].sample for g in groups] == [0, 1]


async def test_a_broken_session_ends_the_others_and_says_why(autojump_clock: trio.testing.MockClock) -> None:
    ended = []

    async def run_one(row: Mapping[str, Any], sample: int, replica: int) -> Episode:
        try:
            await trio.sleep(1 if sample == 0 else trio.current_time() + 1e9)
            raise RuntimeError("the engine is gone")
        finally:
            ended.append(sample)

    with pytest.raises(ExceptionGroup) as caught:
        await run_groups(((i, {}) for i in range(3)), run_one, size=1, limit=3)
    assert caught.group_contains(RuntimeError, match="the engine is gone")
    assert sorted(ended) == [0, 1, 2]
