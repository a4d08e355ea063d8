"""Many programs and sockets of one sandbox over one program's text lines: what a service needs to offer is a program
with stdin and stdout, and text is enough.

``relay_program`` is the end inside. Invariants: every stream has at most WINDOW bytes on the way (so nothing piles up
here, and a stream that nobody reads holds no other up); when the line ends, every reader and writer gets InfraError.
Connections that programs inside make to a relayed port are carried to the gateway by this process: the sandbox needs no
way to reach this machine.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

import trio
from attrs import evolve

from uniagent.adapters.sandboxes.channels import CHUNK, opened
from uniagent.engine.errors import InfraError
from uniagent.engine.ports import ModelEndpoint

WINDOW, PIECE = 1 << 18, 1 << 15  # as in relay_program
SEND_S = 60.0  # of one call that carries lines
READY = "uniagent relay ready"


class Line(Protocol):
    """The text streams of one program in a sandbox. ``receive`` gives "" at the end."""

    async def send(self, text: str) -> None: ...
    async def receive(self) -> str: ...


def relay_command() -> str:
    """A line of shell that runs the end inside."""
    packed = base64.b64encode(zlib.compress(Path(__file__).with_name("relay_program.py").read_bytes(), 9)).decode()
    return f"exec python3 -u -c \"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))\""


class Stream:
    """Bytes that came and were not read; the window opens as they are."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = False
        self.changed = trio.Event()

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class RelayChannel:
    """``channels.Channel`` of one program or connection inside."""

    def __init__(self, relay: Relay, name: str) -> None:
        self.relay, self.name = relay, name
        self.streams = {1: Stream(), 2: Stream()}
        self.status: int | None = None
        self.room, self.broken = WINDOW, False
        self.changed = trio.Event()

    def wake(self) -> None:
        for stream in self.streams.values():
            stream.wake()
        self.changed.set()
        self.changed = trio.Event()

    async def write(self, data: bytes) -> None:
        """Raises BrokenResourceError when the program no longer reads."""
        rest = memoryview(data)
        while rest:
            self.relay.check()
            if self.broken or self.status is not None:
                raise trio.BrokenResourceError("the program does not read its stdin any more")
            if self.room <= 0:
                await self.changed.wait()
                continue
            piece, rest = rest[: min(PIECE, self.room)], rest[min(PIECE, self.room) :]
            self.room -= len(piece)
            await self.relay.say(self.name, "data", base64.b64encode(piece).decode())

    async def close_stdin(self) -> None:
        await self.relay.say(self.name, "eof")

    async def read(self, *, errors: bool = False) -> bytes:
        number = 2 if errors else 1
        stream = self.streams[number]
        while not stream.data:
            if stream.ended:
                return b""
            self.relay.check()
            await stream.changed.wait()
        data = bytes(stream.data[:CHUNK])
        del stream.data[: len(data)]
        await self.relay.say(self.name, "ack", number, len(data))
        return data

    async def code(self) -> int:
        while self.status is None:
            self.relay.check()
            await self.changed.wait()
        return self.status

    async def close(self) -> None:
        """End the program if it still runs."""
        if self.relay.channels.pop(self.name, None) is not None and self.relay.lost is None:
            await self.relay.say(self.name, "close")


class Relay:
    """``channels.Opener`` over a line. ``run`` carries what comes; it returns when the line ends."""

    def __init__(self, line: Line, env: Mapping[str, str]) -> None:
        """``env``: of every program, above the sandbox's own."""
        self.line, self.env = line, dict(env)
        self.folder: str | None = None  # where programs start
        self.channels: dict[str, RelayChannel] = {}
        self.listeners: dict[str, trio.MemorySendChannel[RelayChannel]] = {}
        self.ports: dict[str, int] = {}
        self.lost: str | None = None
        self.changed = trio.Event()
        self.ready = trio.Event()
        self._count = 0
        self._sending: list[str] = []
        self._idle = trio.Lock()

    def check(self) -> None:
        """Raises InfraError once the line has ended."""
        if self.lost is not None:
            raise InfraError(self.lost)

    async def say(self, *words: object) -> None:
        """Lines of concurrent callers travel together while one call to the service is under way."""
        self.check()
        self._sending.append(" ".join(str(word) for word in words) + "\n")
        async with self._idle:
            if self._sending:
                text, self._sending = "".join(self._sending), []
                # shielded: half a line would be the end of all
                with trio.CancelScope(shield=True, deadline=trio.current_time() + SEND_S) as limit:
                    try:
                        await self.line.send(text)
                    except InfraError as problem:
                        self._lose(str(problem))
                        raise
                if limit.cancelled_caught:
                    self._lose(f"the sandbox took nothing for {SEND_S:g} s")
                    self.check()

    async def open(self, argv: Sequence[str]) -> RelayChannel:
        channel = RelayChannel(self, self._name())
        self.channels[channel.name] = channel
        asked = json.dumps({"argv": list(argv), "env": self.env, "cwd": self.folder})
        await self.say(channel.name, "open", base64.b64encode(asked.encode(errors="surrogateescape")).decode())
        return channel

    async def enter(self, folder: str) -> None:
        """Make a folder; programs start there from now on. Raises InfraError."""
        async with opened(self, ["mkdir", "-p", "--", folder]) as channel:
            said = await channel.read(errors=True)
            if await channel.code() != 0:
                raise InfraError(f"{folder} cannot be made in the sandbox: {said.decode(errors='replace').strip()}")
        self.folder = folder

    def _name(self) -> str:
        self._count += 1
        return f"c{self._count}"

    # ------------------------------------------------------------ what comes

    async def run(self) -> None:
        """Until the line ends; a line that is not ours (an image's greeting) before the first is left out."""
        text = ""
        try:
            while received := await self.line.receive():
                *lines, text = (text + received).split("\n")
                for line in lines:
                    if self.ready.is_set():
                        self._take(line.strip())
                    elif line.strip() == READY:
                        self.ready.set()
            self._lose("the sandbox is gone: the program that carries its streams ended")
        except InfraError as problem:
            self._lose(str(problem))

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
        self.ready.set()
        for channel in list(self.channels.values()):
            channel.wake()
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def _take(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        verb, _, rest = rest.partition(" ")
        if verb == "at":
            self.ports[name] = int(rest)
            self._wake()
        elif verb == "taken":
            channel = RelayChannel(self, name)
            self.channels[name] = channel
            if rest in self.listeners:
                self.listeners[rest].send_nowait(channel)
        elif (known := self.channels.get(name)) is not None:
            self._of_channel(known, verb, rest)

    def _of_channel(self, channel: RelayChannel, verb: str, rest: str) -> None:
        if verb in ("data", "end"):
            number, _, data = rest.partition(" ")
            stream = channel.streams[int(number)]
            stream.data += base64.b64decode(data)
            stream.ended = stream.ended or verb == "end"
            stream.wake()
            return
        if verb == "code":
            channel.status = int(rest)
        elif verb == "ack":
            channel.room += int(rest.split()[1])
        elif verb == "broken":
            channel.broken = True
        channel.wake()

    # ------------------------------------------------------------ the way to the gateway

    @asynccontextmanager
    async def reach(self, model: ModelEndpoint) -> AsyncIterator[ModelEndpoint]:
        """See the port: a port on the sandbox's loopback, whose connections this process makes to the gateway."""
        place = urlsplit(model.base_url)
        name = self._name()
        sender, receiver = trio.open_memory_channel[RelayChannel](10_000)
        self.listeners[name] = sender
        await self.say(name, "listen")
        while name not in self.ports:
            self.check()
            await self.changed.wait()

        async def carry_all() -> None:
            async for channel in receiver:
                nursery.start_soon(_carry, channel, place.hostname or "127.0.0.1", place.port or 80)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry_all)
            try:
                near = place._replace(netloc=f"127.0.0.1:{self.ports[name]}")
                yield evolve(model, base_url=urlunsplit(near))
            finally:
                nursery.cancel_scope.cancel()
                del self.listeners[name]
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                    if self.lost is None:
                        await self.say(name, "close")


async def _carry(channel: RelayChannel, host: str, port: int) -> None:
    """One connection from inside to the gateway, both ways, until both ended."""
    try:
        stream = await trio.open_tcp_stream(host, port)
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(_inward, stream, channel)
            while data := await channel.read():
                await stream.send_all(data)
            await stream.send_eof()
    except* (OSError, trio.BrokenResourceError, InfraError):
        pass  # to the program inside it is a connection that was closed
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5), suppress(InfraError):
            await channel.close()


async def _inward(stream: trio.SocketStream, channel: RelayChannel) -> None:
    while data := await stream.receive_some(CHUNK):
        await channel.write(data)
    await channel.close_stdin()
