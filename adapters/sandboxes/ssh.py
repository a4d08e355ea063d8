"""Sandboxes on other machines, over ssh: a private directory of one account, with its processes.

One connection serves many sandboxes; further ones are made when the server refuses another session on it (OpenSSH
allows 10 a connection unless MaxSessions says more). Host keys are checked unless the config says otherwise. A guard on
the other side waits for the connection to end, then ends what the node's sandboxes left and removes their directories,
so a node that crashes leaves nothing.

The account is the boundary: agents can do there what it can. asyncssh runs on the portal's thread.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
import secrets
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import trio
from attrs import evolve, frozen

from uniagent.adapters.options import options
from uniagent.adapters.sandboxes.channel_sandbox import ChannelSandbox
from uniagent.adapters.sandboxes.channels import CHUNK, KEEPER, MARK
from uniagent.engine.config import key
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.portal import Portal, open_portal
from uniagent.engine.ports import Json, ModelEndpoint

log = logging.getLogger(__name__)
CLOSE_S = 30.0
POLL_S = 0.05
GUARD = "trap '' HUP PIPE; exec >/dev/null; cat; end $(marked {label}/); rm -rf -- {folder}"


@frozen
class SshConfig:
    """Keys of a sandbox whose provider is ``ssh``."""

    host: str = key("", "host name, or a Host of ~/.ssh/config")
    port: int | None = key(None, "left out: from ~/.ssh/config, else 22", at_least=1)
    user: str | None = key(None, "left out: from ~/.ssh/config, else yours")
    identity: str | None = key(None, "private key file; left out: ~/.ssh's and the agent's")
    known_hosts: str | None = key(None, "file of accepted host keys; left out: ~/.ssh/known_hosts")
    check_host_key: bool = key(True, "false: any machine may answer for the host")
    jump: str | None = key(None, "[user@]host[:port] to go through")
    directory: str = key("/tmp", "where the sandboxes' directories are made")
    files: Mapping[str, str] = key(dict, "written before the first command: path in the workdir -> text")
    env: Mapping[str, str] = key(dict, "environment variables")
    output_mib: float = key(1.0, "output kept of one command: its head and its tail", at_least=0.001)
    connections: int = key(32, "to one host, at most", at_least=1)
    start_timeout_s: float = key(60.0, "to connect and to make a sandbox", at_least=0.1)

    @property
    def target(self) -> SshConfig:
        """What a connection depends on."""
        return evolve(self, files={}, env={}, directory="", output_mib=1.0)


class SshProvider:
    """``engine.ports.SandboxProvider`` named ssh; an async context manager run by the node."""

    def __init__(self, given: Mapping[str, Json] | None = None) -> None:
        """``given`` is [sandbox.options.ssh]: defaults of every sandbox. Raises UserError."""
        self.defaults = dict(given or {})
        options(SshConfig, self.defaults, "[sandbox.options.ssh]")
        self.label = secrets.token_hex(8)  # of this node, in the mark of every process
        self.hosts: dict[str, Host] = {}
        self.portal: Portal | None = None

    async def __aenter__(self) -> SshProvider:
        self._portal: AbstractAsyncContextManager[Portal] = open_portal()
        self.portal = await self._portal.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.portal is not None
        with trio.CancelScope(shield=True):
            with trio.move_on_after(CLOSE_S):
                for host in self.hosts.values():
                    await self.portal.call(host.close)
            await self._portal.__aexit__(None, None, None)
        self.portal = None

    @asynccontextmanager
    async def open(self, config: Mapping[str, Json]) -> AsyncIterator[ChannelSandbox]:
        """One sandbox. Raises UserError for a config that cannot work, InfraError when the host fails."""
        if self.portal is None:
            raise RuntimeError("the ssh provider is not running: open it with `async with provider:` first")
        wanted = options(SshConfig, {**self.defaults, **config}, "the sandbox section (provider ssh)")
        if not wanted.host:
            raise UserError("the sandbox section (provider ssh): host is missing")
        host = self.hosts.setdefault(repr(wanted.target), Host(wanted, self.label))
        number = secrets.token_hex(6)
        opener = SshOpener(self.portal, host, wanted, number)
        folder = await self._make(opener, wanted, number)
        opener.folder = folder
        box = ChannelSandbox(
            opener, PurePosixPath(folder), int(wanted.output_mib * (1 << 20)), partial(self._reach, host)
        )  # fmt: skip
        try:
            for name, text in wanted.files.items():
                await box.write(PurePosixPath(name), text.encode())
            yield box
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
                await self._unmake(box, number, folder)

    async def _make(self, opener: SshOpener, wanted: SshConfig, number: str) -> str:
        """The sandbox's directory, in one that the guard removes; its real path."""
        above = posixpath.join(wanted.directory, f"uniagent-{self.label}")
        script = 'mkdir -p -m 700 -- "$1" && cd -- "$1" && mkdir "$2" && cd "$2" && pwd -P'
        with trio.move_on_after(wanted.start_timeout_s):
            await opener.portal.call(opener.host.guard, above)
            channel = await opener.open(["sh", "-c", script, "sh", above, number])
            try:
                told = b""
                while data := await channel.read():
                    told += data
                if await channel.code() == 0:
                    return told.decode().strip()
                said = (await channel.read(errors=True)).decode(errors="replace").strip()
                raise InfraError(f"no sandbox could be made on {wanted.host}: {said}")
            finally:
                await channel.close()
        raise InfraError(f"no sandbox could be made on {wanted.host} within {wanted.start_timeout_s:g} s")

    async def _unmake(self, box: ChannelSandbox, number: str, folder: str) -> None:
        try:
            # in two steps: what looks for the marked carries the mark itself
            marked = await box.keeper.ask(f"marked {self.label}/{number}/")
            await box.keeper.ask(f"end {marked}; cd /; rm -rf -- {shlex.quote(folder)}")
            await box.close()
        except InfraError as problem:  # the guard cleans up behind a lost connection
            log.warning("sandbox %s: %s", folder, problem)

    @asynccontextmanager
    async def _reach(self, host: Host, model: ModelEndpoint) -> AsyncIterator[ModelEndpoint]:
        """See the port: a port on the other side's loopback, forwarded to the gateway through the connection."""
        assert self.portal is not None
        place = urlsplit(model.base_url)
        listener = await self.portal.call(host.forward, place.hostname or "127.0.0.1", place.port or 80)
        try:
            near = place._replace(netloc=f"127.0.0.1:{listener.get_port()}")
            yield evolve(model, base_url=urlunsplit(near))
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
                await self.portal.call(_close_listener, listener)


async def _close_listener(listener: Any) -> None:
    listener.close()
    await listener.wait_closed()


# ---------------------------------------------------------------- the asyncio side


class Host:
    """The connections to one host. Every method runs on the portal's thread. Raises InfraError and UserError."""

    def __init__(self, config: SshConfig, label: str) -> None:
        self.config, self.label = config, label
        self.connections: list[Any] = []
        self.guards: dict[str, Any] = {}  # directory -> the guard's process
        self.lock: asyncio.Lock | None = None
        self.guarding: asyncio.Lock | None = None

    async def start(self, command: str) -> Any:
        """A process for a command line, on a connection that has room."""
        import asyncssh

        self.lock = self.lock or asyncio.Lock()
        tried: set[int] = set()
        while True:
            for connection in [c for c in self.connections if id(c) not in tried]:
                tried.add(id(connection))
                try:
                    return await connection.create_process(command, encoding=None)
                except asyncssh.ChannelOpenError:
                    continue  # no room on it, or it is gone
            async with self.lock:
                if all(id(c) in tried for c in self.connections):
                    await self._connect()

    async def _connect(self) -> None:
        import asyncssh

        self.connections = [c for c in self.connections if not c.is_closed()]
        limit = self.config.connections
        if len(self.connections) >= limit:
            raise InfraError(
                f"{self.config.host}: no room for another session on {limit} connections: raise MaxSessions in its "
                "sshd_config, or connections in the sandbox section"
            )
        config = self.config
        given: dict[str, Any] = {"port": config.port, "username": config.user, "tunnel": config.jump}
        given = {name: value for name, value in given.items() if value is not None}
        if config.identity is not None:
            given["client_keys"] = [config.identity]
        if not config.check_host_key:
            given["known_hosts"] = None
        elif config.known_hosts is not None:
            given["known_hosts"] = config.known_hosts
        try:
            self.connections.append(await asyncssh.connect(config.host, keepalive_interval=30, **given))
        except asyncssh.HostKeyNotVerifiable as problem:
            raise UserError(
                f"{config.host}: its host key is not known ({problem}): add it with `ssh-keyscan {config.host} >> "
                "~/.ssh/known_hosts` once you trust it, or set known_hosts in the sandbox section"
            ) from problem
        except asyncssh.PermissionDenied as problem:
            raise UserError(f"{config.host} does not let us in: {problem}; set user and identity") from problem
        except (OSError, asyncssh.Error) as problem:
            raise InfraError(f"{config.host} cannot be reached over ssh: {problem}") from problem

    async def guard(self, folder: str) -> None:
        """See GUARD; one for each directory, again when its connection was lost."""
        self.guarding = self.guarding or asyncio.Lock()
        async with self.guarding:
            guard = self.guards.get(folder)
            if guard is None or guard.is_closing():
                script = KEEPER + GUARD.format(label=self.label, folder=shlex.quote(folder))
                self.guards[folder] = await self.start(shlex.join(["bash", "-c", script]))

    async def forward(self, host: str, port: int) -> Any:
        """A listener on the other side's loopback whose connections go to (host, port) here."""
        import asyncssh

        for connection in self.connections:
            if not connection.is_closed():
                try:
                    return await connection.forward_remote_port("127.0.0.1", 0, host, port)
                except asyncssh.Error as problem:
                    raise InfraError(f"{self.config.host} does not forward ports to us: {problem}") from problem
        raise InfraError(f"the connection to {self.config.host} is lost")

    async def close(self) -> None:
        """Let the guards clean up, then hang up."""
        for guard in self.guards.values():
            guard.stdin.write_eof()
            await guard.wait_closed()
        for connection in self.connections:
            connection.close()
            await connection.wait_closed()


class SshOpener:
    """``channels.Opener`` for one sandbox."""

    def __init__(self, portal: Portal, host: Host, config: SshConfig, number: str) -> None:
        self.portal, self.host, self.config, self.number = portal, host, config, number
        self.folder = "/"

    async def open(self, argv: Sequence[str]) -> SshChannel:
        env = {MARK: f"{self.host.label}/{self.number}/", **self.config.env}
        pairs = [f"{name}={value}" for name, value in env.items()]
        command = f"cd -- {shlex.quote(self.folder)} && exec env {shlex.join(pairs)} {shlex.join(argv)}"
        return SshChannel(self.portal, await self.portal.call(self.host.start, command))


class SshChannel:
    """``channels.Channel`` on a process over ssh. A lost connection reads as the end."""

    def __init__(self, portal: Portal, process: Any) -> None:
        self.portal, self.process = portal, process

    async def write(self, data: bytes) -> None:
        await self.portal.call(self._write, data)

    async def _write(self, data: bytes) -> None:
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def close_stdin(self) -> None:
        await self.portal.call(self._close_stdin)

    async def _close_stdin(self) -> None:
        self.process.stdin.write_eof()

    async def read(self, *, errors: bool = False) -> bytes:
        stream = self.process.stderr if errors else self.process.stdout
        return bytes(await self.portal.call(stream.read, CHUNK))

    async def code(self) -> int:
        await self.portal.call(self._ended)
        if self.process.exit_signal is not None:
            return 128 + _signal_number(self.process.exit_signal[0])
        if self.process.exit_status is None:
            raise InfraError("the connection to the sandbox was lost")
        return int(self.process.exit_status)

    async def _ended(self) -> None:
        """The exit status comes before the channel closes, which a background process with its output may delay."""
        closed = asyncio.ensure_future(self.process.wait_closed())
        try:
            while not closed.done() and self.process.exit_status is None and self.process.exit_signal is None:
                await asyncio.wait([closed], timeout=POLL_S)
        finally:
            closed.cancel()

    async def close(self) -> None:
        await self.portal.call(self._close)

    async def _close(self) -> None:
        self.process.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait_closed(), 2)


def _signal_number(name: str) -> int:
    import signal

    return int(getattr(signal, f"SIG{name}", signal.SIGKILL))
