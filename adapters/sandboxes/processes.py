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
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = [os.read(fd, 1 << 16)]
        while pieces[-1]:
            pieces.append(os.read(fd, 1 << 16))
        return b"".join(pieces)
    finally:
        os.close(fd)


def descendants(roots: Iterable[int]) -> Iterator[int]:
    """The roots and all below them, parents first."""
    for root in roots:
        yield root
        yield from descendants(children(root))


def inner_pid(pid: int) -> int | None:
    """The id a process has in its own pid namespace; None when it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        _, found, rest = _read(f"/proc/{pid}/status").partition(b"\nNSpid:")
        return int(rest.partition(b"\n")[0].split()[-1]) if found else None
    return None


def ended(pid: int) -> bool:
    """Whether a process is gone, or only its exit status is left."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return _read(f"/proc/{pid}/stat").rpartition(b") ")[2][:1] in (b"Z", b"X")
    return True


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
            with suppress(OSError):
                if any(variable.startswith(prefix) for variable in _read(f"/proc/{entry}/environ").split(b"\0")):
                    found.append(int(entry))
    return found


def holding(prefix: str, *, but: str) -> list[int]:
    """Processes with a file open whose path starts with ``prefix``, the file ``but`` not counted."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                links = {os.readlink(f"/proc/{entry}/fd/{fd}") for fd in os.listdir(f"/proc/{entry}/fd")} - {but}
                if any(link.startswith(prefix) for link in links):
                    found.append(int(entry))
    return found
