"""A program in a local sandbox with its standard streams, over the FIFOs that ``Init.spawn`` made."""

from __future__ import annotations

import trio

from uniagent.adapters.sandboxes.init import Init, Started
from uniagent.adapters.sandboxes.pipes import close_all, read_now, write_all
from uniagent.adapters.sandboxes.processes import kill_trees
from uniagent.engine.errors import InfraError


class FifoChannel:
    """``channels.Channel``; the descriptors of ``started`` are stdin, stdout, stderr and status."""

    def __init__(self, init: Init, started: Started) -> None:
        self.init, self.started = init, started
        stdin, self.stdout, self.stderr, self.status = started.fds
        self.stdin = [stdin]
        started.fds = [self.stdout, self.stderr, self.status]
        self.ended: int | None = None

    async def write(self, data: bytes) -> None:
        await write_all(self.stdin[0], data)

    async def close_stdin(self) -> None:
        close_all(self.stdin)

    async def read(self, *, errors: bool = False) -> bytes:
        return await self._read(self.stderr if errors else self.stdout)

    async def _read(self, fd: int) -> bytes:
        while (data := read_now(fd)) is None:
            await trio.lowlevel.wait_readable(fd)
        return data

    async def code(self) -> int:
        if self.ended is None:
            told = await self._read(self.status)
            if not told:
                raise InfraError("the sandbox is gone")
            self.ended = int(told)
        return self.ended

    async def close(self) -> None:
        """End the program and all it started."""
        if self.ended is None and self.started.pid is not None and self.init.alive():
            kill_trees([self.started.pid])
        close_all(self.stdin)
        self.started.close()
