"""What a person sees: one plain line a step, or the same with a live line on a terminal."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from uniagent.engine.observe.progress import Lines


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lines(clock: Clock, steps: int, *, terminal: bool) -> tuple[Lines, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    return Lines(steps, console, clock), out


def test_plain_is_one_line_a_step(clock: Clock) -> None:
    progress, out = lines(clock, 80, terminal=False)
    with progress:
        progress.note("run folder [runs]/x " + "y" * 100)
        progress.phase("rollout", 3, 128)
        clock.now = 2.0
        progress.step(1, {"success": 0.25, "loss": -0.01, "tokens_per_s": 1234.5, "reward": math.nan, "grad_norm": 3.0})
        progress.phase("rollout", 4, 128)
        clock.now = 6.0
        progress.step(2, {"success": 0.5, "staleness": 0.5})
    assert out.getvalue().splitlines() == [
        "run folder [runs]/x " + "y" * 100,
        "step  1/80  success 0.250  loss -0.0100  1,234 tok/s",
        "step  2/80  success 0.500  stale 0.50  5:12 left",
    ]


def test_time_left_follows_the_latest_pace(clock: Clock) -> None:
    progress, out = lines(clock, 4000, terminal=False)
    for step in range(1, 31):
        clock.now += 100.0 if step < 15 else 1.0
        progress.step(step, {})
    assert out.getvalue().splitlines()[-1].endswith("1:06:10 left")


def test_a_terminal_gets_a_live_line_that_goes_away(clock: Clock) -> None:
    progress, out = lines(clock, 4, terminal=True)
    with progress:
        progress.phase("rollout", 57, 128)
        for step in range(1, 4):
            clock.now += 1.0
            progress.step(step, {"success": step / 4})
        progress.phase("training")
    text = out.getvalue()
    for seen in ("rollout 57/128", "training", "step 1/4  success 0.250", "success ▃▅▇", "0:01 left"):
        assert seen in text
    assert text.rstrip("\x1b[?25h\n ").splitlines()[-1].strip("\x1b[2K1AG\r ") == ""


def test_a_terminal_is_drawn_at_most_ten_times_a_second(clock: Clock) -> None:
    progress, out = lines(clock, 4, terminal=True)
    with progress:
        for done in range(1000):
            clock.now += 0.001
            progress.phase("rollout", done, 1000)
    assert out.getvalue().count("rollout") <= 12
