"""A request to stop drains what runs, and gives the shell the status it expects."""

from __future__ import annotations

import signal

import trio
import trio.testing

from uniagent.engine.signals import Stop


async def test_draining_work_ends_by_itself_within_the_time_it_has(autojump_clock: trio.testing.MockClock) -> None:
    stop = Stop(drain_s=20)
    with stop.draining() as limit:
        stop.request(signal.SIGINT)
        await trio.sleep(19)
    assert not limit.cancelled_caught
    assert stop.exit_status == 130


async def test_draining_work_is_cut_when_its_time_is_over(autojump_clock: trio.testing.MockClock) -> None:
    stop = Stop(drain_s=20)
    began = trio.current_time()
    with stop.draining() as limit:
        stop.request(signal.SIGTERM)
        await trio.sleep_forever()
    assert limit.cancelled_caught
    assert trio.current_time() - began == 20
    assert stop.exit_status == 143


async def test_work_that_starts_after_the_request_has_the_same_time(autojump_clock: trio.testing.MockClock) -> None:
    stop = Stop(drain_s=5)
    stop.request(signal.SIGINT)
    with stop.draining() as limit:
        await trio.sleep_forever()
    assert limit.cancelled_caught


def test_a_run_that_nobody_stopped_exits_with_zero() -> None:
    async def main() -> int:
        return Stop(drain_s=1).exit_status

    assert trio.run(main) == 0


async def test_a_run_that_ends_itself_drains_too_and_exits_with_three(autojump_clock: trio.testing.MockClock) -> None:
    stop = Stop(drain_s=5)
    with stop.draining() as limit:
        stop.end("alarm entropy")
        stop.end("another")
        await trio.sleep_forever()
    assert limit.cancelled_caught
    assert (stop.reason, stop.exit_status) == ("alarm entropy", 3)
