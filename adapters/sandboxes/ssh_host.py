"""One host over ssh: its connections, and programs there as channels.

asyncssh lives on the portal's thread: the methods of ``Host`` run there, those of openers and channels on trio's.
A connection that has no room for another session is left to those it serves, and a further one is made. The guard of a
directory waits on the other side for its connection to end, then ends what carries the node's mark and removes it.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from attrs import evolve, frozen

from uniagent.adapters.sandboxes.channels import CHUNK, KEEPER, MARK
from uniagent.engine.config import key
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.portal import Portal

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
    return int(getattr(signal, f"SIG{name}", signal.SIGKILL))
