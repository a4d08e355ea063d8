"""Processes of a sandbox as the host sees them in /proc: finding a tree and ending it.

Plain functions over host process ids. They tolerate processes that end while they look.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress


def children(pid: int) -> list[int]:
    """Host ids of the direct children of every thread of a process; empty when it is gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def descendants(roots: Iterable[int]) -> Iterator[int]:
    """The roots and all below them, parents first."""
    for root in roots:
        yield root
        yield from descendants(children(root))


def inner_pid(pid: int) -> int | None:
    """The id a process has in its own pid namespace; None when it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"NSpid:"):
                    return int(line.split()[-1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_trees(roots: Iterable[int]) -> None:
    """Stop every process first, so that none can fork away, then kill them all."""
    stopped: set[int] = set()
    roots = list(roots)
    for _ in range(20):
        fresh = [pid for pid in descendants(roots) if pid not in stopped]
        if not fresh:
            break
        send(fresh, signal.SIGSTOP)
        stopped.update(fresh)
    send(stopped, signal.SIGKILL)


def marked(prefix: bytes) -> list[int]:
    """Processes with an environment variable that starts with ``prefix`` (NAME=value); for sandboxes without a pid
    namespace. One that cleared its environment is not found."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if any(variable.startswith(prefix) for variable in file.read().split(b"\0")):
                    found.append(int(entry))
    return found
