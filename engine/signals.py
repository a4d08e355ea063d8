"""Asking a run to stop. Ctrl-C and SIGTERM: the first one drains, the second one exits at once.

``Stop.event`` is set by the first signal; work that must end early enters ``Stop.draining``, a cancel scope whose
deadline the first signal moves to ``drain_s`` from then. Knows nothing of what is drained.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import trio

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ENDED_ITSELF = 3  # exit status


class Stop:
    """What the run knows of being asked to stop: ``signal`` is the number of the first one, ``reason`` what the run
    itself found; None before."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.event = trio.Event()
        self.signal: int | None = None
        self.reason: str | None = None
        self._scopes: set[trio.CancelScope] = set()

    @contextlib.contextmanager
    def draining(self) -> Iterator[trio.CancelScope]:
        """A scope that is cancelled ``drain_s`` after the first signal."""
        with trio.CancelScope() as scope:
            if self.event.is_set():
                scope.deadline = trio.current_time() + self.drain_s
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def request(self, number: int) -> None:
        """The first signal; later calls change nothing."""
        if self.event.is_set():
            return
        self.signal = number
        self._drain()

    def end(self, reason: str) -> None:
        """The run is to end, saved, for a reason of its own."""
        if not self.event.is_set():
            self.reason = reason
            self._drain()

    def _drain(self) -> None:
        self.event.set()
        for scope in self._scopes:
            scope.deadline = trio.current_time() + self.drain_s

    @property
    def exit_status(self) -> int:
        """What a shell expects: 0, 128 + the signal, or ENDED_ITSELF."""
        if self.signal is not None:
            return 128 + self.signal
        return ENDED_ITSELF if self.reason is not None else 0


async def watch(stop: Stop, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Turn signals into requests to stop. Run it in the node's nursery; main thread only."""
    with trio.open_signal_receiver(*SIGNALS) as signals:
        task_status.started()
        async for number in signals:
            if stop.event.is_set():
                os._exit(128 + number)
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            print(
                f"{name}: running sessions have {stop.drain_s:g} s to end, then the run is saved; again: exit at once",
                file=sys.stderr,
                flush=True,
            )
            stop.request(number)
