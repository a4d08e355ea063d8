"""Sandboxes on other machines, over ssh: a private directory of one account, with its processes.

One connection serves many sandboxes; further ones are made when the server refuses another session on it (OpenSSH
allows 10 a connection unless MaxSessions says more). Host keys are checked unless the config says otherwise. A guard on
the other side waits for the connection to end, then ends what the node's sandboxes left and removes their directories,
so a node that crashes leaves nothing.

The account is the boundary: agents can do there what it can. asyncssh runs on the portal's thread.
"""

from __future__ import annotations

import logging
import posixpath
import secrets
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import trio
from attrs import evolve

from uniagent.adapters.options import options
from uniagent.adapters.sandboxes.channel_sandbox import ChannelSandbox
from uniagent.adapters.sandboxes.ssh_host import Host, SshConfig, SshOpener
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.portal import Portal, open_portal
from uniagent.engine.ports import Json, ModelEndpoint

log = logging.getLogger(__name__)
CLOSE_S = 30.0


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
