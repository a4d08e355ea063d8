"""Results, errors and cancellation cross the portal, and nothing is left on the other side."""

from __future__ import annotations

import asyncio
import threading

import pytest
import trio

from uniagent.engine.portal import open_portal


async def test_results_and_arguments() -> None:
    async def add(a: int, b: int) -> int:
        await asyncio.sleep(0)
        assert threading.current_thread().name == "asyncio-portal"
        return a + b

    async with open_portal() as portal:
        assert await portal.call(add, 2, 3) == 5


async def test_exceptions_come_back() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async with open_portal() as portal:
        with pytest.raises(ValueError, match="no"):
            await portal.call(fail)


async def test_many_at_once() -> None:
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    results: list[int] = []
    async with open_portal() as portal, trio.open_nursery() as nursery:

        async def one(n: int) -> None:
            results.append(await portal.call(double, n))

        for n in range(500):
            nursery.start_soon(one, n)
    assert sorted(results) == [2 * n for n in range(500)]


async def test_cancelling_waits_for_the_other_sides_cleanup() -> None:
    steps: list[str] = []

    async def hang(begun: asyncio.Event) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned")

    async def make() -> asyncio.Event:
        return asyncio.Event()

    async def wait(event: asyncio.Event) -> None:
        await event.wait()

    async with open_portal() as portal:
        begun = await portal.call(make)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(portal.call, hang, begun)
            await portal.call(wait, begun)
            nursery.cancel_scope.cancel()
        steps.append("returned")
    assert steps == ["cleaned", "returned"]


async def test_a_result_that_beats_the_cancellation_is_delivered() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "finished anyway"
        return ""

    async with open_portal() as portal:
        with trio.move_on_after(0.01):
            assert await portal.call(stubborn) == "finished anyway"
            return
    raise AssertionError("the result was lost")


async def test_cancelled_from_inside_is_an_error_not_a_hang() -> None:
    async def cancel_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async with open_portal() as portal:
        with pytest.raises(RuntimeError, match="cancelled from the asyncio side"):
            await portal.call(cancel_itself)


async def test_leaving_ends_tasks_that_were_left_running() -> None:
    ended: list[str] = []

    async def leave_one_behind() -> None:
        async def forever() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("yes")

        leave_one_behind.task = asyncio.create_task(forever())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    async with open_portal() as portal:
        await portal.call(leave_one_behind)
    assert ended == ["yes"]
    assert "asyncio-portal" not in [t.name for t in threading.enumerate()]
