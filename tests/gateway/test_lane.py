"""The lane: first come, first served, and only so many in a round of the scheduler."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from uniagent.engine.gateway.lane import Lane


async def test_a_burst_is_spread_over_rounds_in_order():
    lane = Lane(width=3)
    rounds: list[list[int]] = [[]]
    order: list[int] = []

    async def request(number: int) -> None:
        await lane.turn()
        rounds[-1].append(number)
        order.append(number)

    async def count_rounds() -> None:
        while True:
            rounds.append([])
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(request, number)
            await wait_all_tasks_blocked()
        nursery.start_soon(count_rounds)
        nursery.start_soon(lane.run)
        while len(order) < 10:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert sorted(order) == list(range(10))
    assert max(len(r) for r in rounds) <= 6  # two rounds of the lane may fall between two counts
    assert [n // 3 for n in order] == sorted(n // 3 for n in order)


async def test_who_leaves_the_line_holds_up_nobody():
    lane = Lane(width=1)
    through: list[int] = []

    async def request(number: int) -> None:
        await lane.turn()
        through.append(number)

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as gone:
            gone.cancel()
            await request(0)
        nursery.start_soon(request, 1)
        nursery.start_soon(lane.run)
        with trio.fail_after(1):
            while not through:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert through == [1]
