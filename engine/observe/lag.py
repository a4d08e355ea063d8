"""Loop lag: how late the event loop runs a task that is due.

A heartbeat sleeps and measures how much later than asked it woke. High lag means that something slow ran on the loop,
or that another thread held the interpreter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import trio


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed; NaN when there are none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


class Lag:
    """The latest lags in seconds, a window of about three minutes at the default interval."""

    def __init__(self, window: int = 4096) -> None:
        self._lags: deque[float] = deque(maxlen=window)

    def add(self, seconds: float) -> None:
        self._lags.append(seconds)

    def metrics(self) -> dict[str, float]:
        """p50 and p99 in milliseconds of what was seen since the last call."""
        seen = list(self._lags)
        self._lags.clear()
        return {f"loop_lag_p{p}_ms": 1000 * percentile(seen, p) for p in (50, 99)} if seen else {}


async def watch(lag: Lag, *, interval_s: float = 0.05) -> None:
    """The heartbeat; runs until cancelled."""
    while True:
        due = trio.current_time() + interval_s
        await trio.sleep_until(due)
        lag.add(trio.current_time() - due)
