"""Pipes to sandboxed processes: non-blocking descriptors waited for by trio, with capped collection of output.

A command's end is told on a status pipe of its own. By then all that the command wrote is in the output pipe, so the
collector takes exactly what lies there at that moment and stops: no marker in the output, nothing to forge, and a
background process that goes on writing cannot hold it up.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import termios
from collections import deque
from contextlib import suppress

import trio

CHUNK = 1 << 16  # bytes; a pipe holds no more by default


class Capped:
    """Output kept to ``cap`` bytes: the head and the tail, with the number of bytes between them."""

    def __init__(self, cap: int) -> None:
        self.head_cap = cap - cap // 2
        self.tail_cap = cap // 2
        self.head = bytearray()
        self.tail: deque[bytes] = deque()
        self.tail_size = 0
        self.dropped = 0

    def add(self, data: bytes) -> None:
        room = self.head_cap - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if not data:
            return
        self.tail.append(data)
        self.tail_size += len(data)
        while self.tail_size - len(self.tail[0]) >= self.tail_cap:
            oldest = self.tail.popleft()
            self.tail_size -= len(oldest)
            self.dropped += len(oldest)
            if not self.tail:
                return

    def finish(self) -> tuple[bytes, int]:
        """(kept bytes, dropped bytes)."""
        tail = b"".join(self.tail)
        extra = max(0, len(tail) - self.tail_cap)
        return bytes(self.head) + tail[extra:], self.dropped + extra


def waiting(fd: int) -> int:
    """Bytes that lie in a pipe now."""
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


def read_now(fd: int, size: int = CHUNK) -> bytes | None:
    """What is there, b"" at the end, None when nothing is there yet."""
    try:
        return os.read(fd, size)
    except BlockingIOError:
        return None


async def write_all(fd: int, data: bytes) -> None:
    """Raises BrokenPipeError when the other side is gone."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(fd)


def close_all(fds: list[int]) -> None:
    """Close descriptors and empty the list; tasks waiting on one get trio.ClosedResourceError."""
    while fds:
        fd = fds.pop()
        trio.lowlevel.notify_closing(fd)
        with suppress(OSError):
            os.close(fd)


class Collector:
    """Waits on a status pipe and output pipes at once (one epoll descriptor, so one wait)."""

    def __init__(self, status: int, outputs: list[int]) -> None:
        self.status = status
        self.outputs = outputs
        self.epoll = select.epoll()
        self.closed = False
        for fd in (status, *outputs):
            self.epoll.register(fd, select.EPOLLIN)

    async def collect(self, kept: dict[int, Capped]) -> bytes:
        """Fill ``kept`` (by output descriptor) until something is on the status pipe; gives that, b"" at its end.
        Raises trio.ClosedResourceError."""
        while True:
            await trio.lowlevel.wait_readable(self.epoll.fileno())
            if self.closed:
                raise trio.ClosedResourceError
            ready = dict(self.epoll.poll(0))
            if self.status in ready and (told := read_now(self.status)) is not None:
                for fd in self.outputs:
                    self.drain(fd, kept[fd])
                return told
            for fd in self.outputs:
                if fd in ready:
                    self._take(fd, kept[fd])

    def drain(self, fd: int, kept: Capped) -> None:
        """Exactly what lies in the pipe now."""
        left = waiting(fd)
        while left > 0 and (data := read_now(fd, min(left, CHUNK))):
            kept.add(data)
            left -= len(data)

    def _take(self, fd: int, kept: Capped) -> None:
        data = read_now(fd)
        if data:
            kept.add(data)
        elif data == b"":
            # every writer is gone: readable for ever, so no longer watched
            with suppress(FileNotFoundError):
                self.epoll.unregister(fd)

    def close(self) -> None:
        self.closed = True
        trio.lowlevel.notify_closing(self.epoll.fileno())
        self.epoll.close()
