"""The accelerator thread: order, fairness, crashes, cancellation, shutdown. Real threads, so the real clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio

from uniagent.engine.accelerator import Accelerator, AcceleratorError


class Ticker:
    """A worker that steps ``left`` times; ``on_step`` runs on the thread."""

    def __init__(self, left: int, on_step: Callable[[], object] = lambda: None) -> None:
        self.left, self.on_step = left, on_step
        self.delivered: list[int] = []
        self.done = trio.Event()
        self.failed: list[BaseException | None] = []

    def gather_s(self) -> float:
        return 0.0

    def busy(self) -> bool:
        return self.left > 0

    def step(self) -> int:
        self.on_step()
        self.left -= 1
        return self.left

    def deliver(self, batch: int) -> None:
        self.delivered.append(batch)
        if batch == 0:
            self.done.set()

    def fail(self, cause: BaseException | None) -> None:
        self.failed.append(cause)
        self.done.set()


async def test_calls_run_in_order_on_one_other_thread() -> None:
    seen: list[tuple[int, str]] = []
    async with Accelerator.start() as accelerator, trio.open_nursery() as nursery:
        for n in range(20):
            nursery.start_soon(accelerator.run, lambda n=n: seen.append((n, threading.current_thread().name)))
    assert sorted(seen) == [(n, "accelerator") for n in range(20)]


async def test_a_result_and_an_exception_reach_the_caller_alone() -> None:
    async with Accelerator.start() as accelerator:
        assert await accelerator.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await accelerator.run(divmod, 7, 0)
        assert await accelerator.run(divmod, 7, 2) == (3, 1)


async def test_steps_and_calls_take_turns() -> None:
    """While a worker is busy, waiting calls get one turn a step, and the other way round."""
    order: list[str] = []
    begun = threading.Event()
    async with Accelerator.start() as accelerator:
        ticker = Ticker(6, lambda: order.append("step"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accelerator.run, begun.wait)  # holds the thread until all is queued
            await trio.testing.wait_all_tasks_blocked()
            accelerator.attach(ticker)
            for _ in range(6):
                nursery.start_soon(accelerator.run, lambda: order.append("call"))
            await trio.testing.wait_all_tasks_blocked()
            begun.set()
        await ticker.done.wait()
    assert ticker.delivered == [5, 4, 3, 2, 1, 0]
    turns = "".join(each[0] for each in order)
    assert "ccc" not in turns.rstrip("c")
    assert "sss" not in turns.rstrip("s")


async def test_an_idle_thread_wakes_for_a_worker_that_becomes_busy() -> None:
    async with Accelerator.start() as accelerator:
        ticker = Ticker(0)
        accelerator.attach(ticker)
        await accelerator.run(lambda: None)
        accelerator.post(lambda: setattr(ticker, "left", 2))
        await ticker.done.wait()
    assert ticker.delivered == [1, 0]


async def test_a_crash_in_a_step_fails_every_waiter_and_the_block() -> None:
    ticker = Ticker(3, lambda: divmod(1, 0))
    waiters: list[BaseException] = []

    async def wait(accelerator: Accelerator, hold: threading.Event) -> None:
        try:
            await accelerator.run(hold.wait)
            while True:
                await accelerator.run(lambda: None)
        except AcceleratorError as error:
            waiters.append(error)

    async def body() -> None:
        hold = threading.Event()
        async with Accelerator.start() as accelerator:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(wait, accelerator, hold)
                await trio.testing.wait_all_tasks_blocked()
                accelerator.attach(ticker)
                hold.set()
            await trio.sleep_forever()

    with pytest.raises(AcceleratorError, match="ZeroDivisionError") as caught:
        await body()
    assert len(waiters) == 3
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(ticker.failed) == 1
    assert isinstance(ticker.failed[0], ZeroDivisionError)


async def test_an_error_in_deliver_ends_the_block_too() -> None:
    class Bad(Ticker):
        def deliver(self, batch: int) -> None:
            raise KeyError(batch)

    async def body() -> None:
        async with Accelerator.start() as accelerator:
            accelerator.attach(Bad(1))
            await trio.sleep_forever()

    with pytest.raises(AcceleratorError, match="KeyError"):
        await body()


async def test_after_a_crash_or_the_end_calls_are_refused() -> None:
    async with Accelerator.start() as accelerator:
        pass
    with pytest.raises(AcceleratorError, match="closed"):
        await accelerator.run(lambda: None)
    with pytest.raises(AcceleratorError, match="closed"):
        accelerator.post(lambda: None)


async def test_a_cancelled_call_that_has_not_begun_never_runs() -> None:
    ran: list[int] = []
    hold = threading.Event()
    async with Accelerator.start() as accelerator, trio.open_nursery() as nursery:
        nursery.start_soon(accelerator.run, hold.wait)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.001):
            await accelerator.run(ran.append, 1)
        hold.set()
        await accelerator.run(ran.append, 2)
    assert ran == [2]


async def test_the_thread_is_joined_and_the_bodys_own_error_passes_through_bare() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with Accelerator.start() as accelerator:
            raise KeyError("mine")
    assert not accelerator._thread.is_alive()


async def test_leaving_is_bounded_when_the_thread_is_stuck() -> None:
    hold = threading.Event()

    async def body() -> None:
        async with Accelerator.start(stop_s=0.02) as accelerator:
            with trio.move_on_after(0.01):
                await accelerator.run(hold.wait)

    with pytest.raises(AcceleratorError, match="did not stop"):
        await body()
    hold.set()


def test_a_run_that_ended_stops_the_thread() -> None:
    """The trio run dies around the thread: its next delivery finds no loop, and it ends without a sound."""
    threads: list[threading.Thread] = []

    async def main() -> None:
        accelerator = Accelerator()
        accelerator.attach(Ticker(1_000_000))
        accelerator._thread.start()
        threads.append(accelerator._thread)

    trio.run(main)
    threads[0].join(5)
    assert not threads[0].is_alive()


async def test_busy_seconds_are_counted_by_kind() -> None:
    def work() -> Any:
        return sum(range(100_000))

    async with Accelerator.start() as accelerator:
        await accelerator.run(work)
        assert accelerator.learner_s > 0
        assert accelerator.engine_s == 0
        ticker = Ticker(1, work)
        accelerator.attach(ticker)
        await ticker.done.wait()
        assert accelerator.engine_s > 0
