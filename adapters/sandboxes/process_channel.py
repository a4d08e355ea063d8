"""Channels that are local processes: what a command line such as ``docker exec -i`` gives."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress

import trio

from uniagent.adapters.sandboxes.channels import CHUNK
from uniagent.engine.errors import InfraError


class ProcessChannel:
    """``channels.Channel`` on a process of ours."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send_all(data)

    async def close_stdin(self) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.aclose()

    async def read(self, *, errors: bool = False) -> bytes:
        stream = self.process.stderr if errors else self.process.stdout
        assert stream is not None
        return bytes(await stream.receive_some(CHUNK))

    async def code(self) -> int:
        code = await self.process.wait()
        return 128 - code if code < 0 else code

    async def close(self) -> None:
        """End the process if it still runs."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                await trio.aclose_forcefully(stream)


class ProcessOpener:
    """``channels.Opener``: every program behind the same words, such as those of ``docker exec``."""

    def __init__(self, prefix: Sequence[str]) -> None:
        self.prefix = list(prefix)

    async def open(self, argv: Sequence[str]) -> ProcessChannel:
        pipe = subprocess.PIPE
        try:
            process = await trio.lowlevel.open_process(
                [*self.prefix, *argv], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as problem:
            raise InfraError(f"{self.prefix[0]} could not be run: {problem}") from problem
        return ProcessChannel(process)
