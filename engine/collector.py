"""Python's garbage collector, kept off the event loop's busy moments.

A full collection looks at every object there is: with thousands of live sessions it stops the loop for the better part
of a second, and by itself it comes when there is most to do. Here it comes when nothing runs, or after a long time at
the latest. What ends often (sessions) breaks its cycles itself, so that little waits for it. Young objects are
collected as always.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import trio

NEVER = 1 << 30
QUIET_S = 60.0  # at least this long between two full collections
LATEST_S = 1800.0  # and at most this long, whatever runs
LOOK_S = 1.0


async def at_quiet_moments(busy: Callable[[], bool]) -> None:
    """From now until cancelled, full collections happen here alone, and do not look at what exists now."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], NEVER)
    try:
        last = trio.current_time()
        while True:
            await trio.sleep(LOOK_S)
            since = trio.current_time() - last
            if since > LATEST_S or (since > QUIET_S and not busy()):
                gc.collect()
                last = trio.current_time()
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
