"""Sandboxes of a cloud service: one of its machines each, everything in it over one relayed program.

A ``Service`` is the thin part that knows an SDK; this is what all of them share: options, labels, the relay, warm ones,
prepared images, closing. The SDKs are asyncio's and run on the portal's thread. The sandboxes cannot reach this
machine: the gateway is brought to them by the relay. The service ends a sandbox at ``lifetime_s`` whatever became of
the node; what a node that crashed on this machine left is removed by the next one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, Protocol, TypeVar

import trio
from attrs import evolve, fields_dict, frozen

from uniagent.adapters.options import options
from uniagent.adapters.sandboxes.channel_sandbox import ChannelSandbox
from uniagent.adapters.sandboxes.channels import MARK
from uniagent.adapters.sandboxes.node_dir import NodeFolder, living, root_folder
from uniagent.adapters.sandboxes.pool import PreparedImages, WarmPool
from uniagent.adapters.sandboxes.relay import Relay, relay_command
from uniagent.adapters.sandboxes.snapshots import prepared
from uniagent.engine.config import key
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.portal import Portal, open_portal
from uniagent.engine.ports import Json

log = logging.getLogger(__name__)
LABEL = "uniagent-node"
CLOSE_S = 60.0
T = TypeVar("T")


@frozen
class CloudConfig:
    """Keys of a sandbox of a cloud service."""

    image: str = key(
        "", "image reference (modal, daytona) or template (e2b); it needs bash, coreutils and python3 ≥ 3.8"
    )
    snapshot: str | None = key(None, "name of a snapshot to start from, instead of image")
    prepare: str = key("", "commands run once; all sandboxes of the same section start from what they left")
    network: str = key("none", "none, or internet", choices=("none", "internet"))
    workdir: str = key("/tmp/work", "working directory inside; made where there is none")
    files: Mapping[str, str] = key(dict, "written before the first command: path in the workdir -> text")
    env: Mapping[str, str] = key(dict, "environment variables")
    memory_mib: int | None = key(None, "memory; left out: the service's default", at_least=128)
    cpus: float | None = key(None, "CPU cores; left out: the service's default", at_least=0.125)
    lifetime_s: int = key(3600, "after this the service ends the sandbox, whatever runs in it", at_least=60)
    output_mib: float = key(1.0, "output kept of one command: its head and its tail", at_least=0.001)
    start_timeout_s: float = key(600.0, "for a sandbox to start, its image built included", at_least=1)


@frozen
class CloudOptions:
    """What a run sets for all sandboxes of a service, beside the defaults of their own keys."""

    warm: int = key(0, "sandboxes of a kind kept started and unused; they cost what used ones do", at_least=0)
    app: str = key("uniagent", "modal: the app that its sandboxes belong to")


class AsyncLine(Protocol):
    """``relay.Line`` on the portal's thread."""

    async def send(self, text: str) -> None: ...
    async def receive(self) -> str: ...


class Service(Protocol):
    """An SDK, on the portal's thread. ``expected``: what its calls raise when they fail; ``refused``: those among them
    that the user can mend. ``Any`` is the SDK's own sandbox object."""

    refused: tuple[type[Exception], ...]
    expected: tuple[type[Exception], ...]

    async def start(self, config: CloudConfig, labels: Mapping[str, str]) -> Any: ...
    async def line(self, box: Any, command: str) -> AsyncLine: ...
    async def stop(self, box: Any) -> None: ...
    async def snapshot(self, box: Any, name: str) -> str: ...
    async def forget(self, snapshot: str) -> None: ...
    async def labelled(self) -> Sequence[tuple[str, Any]]: ...
    async def close(self) -> None: ...


class Received:
    """Text that callbacks of an SDK bring, for ``AsyncLine.receive``. Bounded by the relay's windows."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()

    def put(self, text: str) -> None:
        self.queue.put_nowait(text)

    def end(self) -> None:
        self.queue.put_nowait(None)

    async def get(self) -> str:
        """All that is there, at least a piece; "" at the end."""
        pieces: list[str] = []
        piece = await self.queue.get()
        while piece is not None:
            pieces.append(piece)
            if self.queue.empty():
                return "".join(pieces)
            piece = self.queue.get_nowait()
        self.end()
        return "".join(pieces)


class CloudSandbox(ChannelSandbox):
    """A ChannelSandbox that can be kept as a snapshot."""

    def __init__(self, relay: Relay, config: CloudConfig, keep: Callable[[], Awaitable[str]]) -> None:
        super().__init__(
            relay, PurePosixPath(config.workdir), int(config.output_mib * (1 << 20)), relay.reach
        )  # fmt: skip
        self.relay, self.private, self._keep = relay, True, keep

    async def snapshot(self) -> str:
        """See ``snapshots``."""
        return await self._keep()


class CloudProvider:
    """``engine.ports.SandboxProvider`` of one service; an async context manager run by the node."""

    def __init__(self, name: str, service: Callable[[CloudOptions], Service], given: Mapping[str, Json] | None) -> None:
        """``given`` is [sandbox.options.NAME]; ``service`` makes the SDK's part once the provider is entered. Raises
        UserError."""
        self.name, self.make_service = name, service
        self.own = set(fields_dict(CloudOptions))
        mine = {word: value for word, value in (given or {}).items() if word in self.own}
        self.options = options(CloudOptions, mine, f"[sandbox.options.{name}]")
        self.defaults = {word: value for word, value in (given or {}).items() if word not in self.own}
        options(CloudConfig, self.defaults, f"[sandbox.options.{name}]")
        self.pool = WarmPool(self._start, self.options.warm, lambda box: box.relay.lost is None)
        self.images = PreparedImages()
        self.kept: list[str] = []
        self.reaped: list[str] = []  # labels of what dead nodes left
        self.portal: Portal | None = None

    async def __aenter__(self) -> CloudProvider:
        self.service = self.make_service(self.options)
        async with AsyncExitStack() as stack:
            self.portal = await stack.enter_async_context(open_portal())
            stack.push_async_callback(self._close_service)
            root = root_folder(fast=True) / f"nodes-of-{self.name}"
            root.mkdir(exist_ok=True)
            await self._reap(root)
            self.node = NodeFolder(root)
            stack.callback(self.node.close)
            stack.push_async_callback(self._forget_snapshots)
            self.nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(self.nursery.cancel_scope.cancel)
            self.nursery.start_soon(self.pool.run)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self.portal = None

    async def _close_service(self) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
            await self._ask(self.service.close)

    async def _forget_snapshots(self) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
            for name in self.kept:
                try:
                    await self._ask(self.service.forget, name)
                except (InfraError, UserError) as problem:
                    log.warning("snapshot %s stays at the service: %s", name, problem)

    async def _ask(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """A call of the SDK. Raises UserError for what the service refuses, InfraError for what fails."""
        assert self.portal is not None
        try:
            return await self.portal.call(function, *arguments)
        except self.service.expected as problem:
            if isinstance(problem, self.service.refused):
                raise UserError(f"{self.name} refuses: {problem}") from problem
            raise InfraError(f"{self.name}: {type(problem).__name__}: {problem}") from problem

    async def _reap(self, root: Any) -> None:
        """End the sandboxes of nodes of this machine that are dead."""
        mine = f"{_host()}."
        for label, box in await self._ask(self.service.labelled):
            if label.startswith(mine) and not living(root, label.removeprefix(mine)):
                await self._ask(self.service.stop, box)
                self.reaped.append(label)
                log.warning("ended a %s sandbox of a node that crashed (%s)", self.name, label)

    # ------------------------------------------------------------ opening

    @asynccontextmanager
    async def open(self, config: Mapping[str, Json]) -> AsyncIterator[CloudSandbox]:
        """One sandbox. Raises UserError for a config that cannot work, InfraError when this one fails."""
        if self.portal is None:
            raise RuntimeError(f"the {self.name} provider is not running: open it with `async with provider:` first")
        section = {**self.defaults, **{word: value for word, value in config.items() if word not in self.own}}
        wanted = options(CloudConfig, section, f"the sandbox section (provider {self.name})")
        kind = evolve(wanted, files={})
        if kind.prepare:
            name = await self.images.get(repr(kind), lambda: self._prepare(kind))
            kind = evolve(kind, snapshot=name, prepare="")
        async with self.pool.open(kind) as box:
            for path, text in wanted.files.items():
                await box.write(PurePosixPath(path), text.encode())
            yield box

    async def _prepare(self, kind: CloudConfig) -> str:
        async with self._start(evolve(kind, network="internet")) as box:
            return await prepared(box, kind.prepare)

    @asynccontextmanager
    async def _start(self, config: CloudConfig) -> AsyncIterator[CloudSandbox]:
        labels = {LABEL: f"{_host()}.{self.node.path.name}"}
        began = trio.current_time()
        machine, carrying = None, trio.CancelScope()
        try:
            with trio.move_on_after(config.start_timeout_s):
                machine = await self._ask(self.service.start, config, labels)
            if machine is None:
                raise InfraError(f"no {self.name} sandbox within {config.start_timeout_s:g} s")
            line = await self._ask(self.service.line, machine, relay_command())
            relay = Relay(_PortalLine(self._ask, line), {**config.env, MARK: "1"})
            self.nursery.start_soon(_within, carrying, relay.run)
            with trio.CancelScope(deadline=began + config.start_timeout_s):
                await relay.ready.wait()
                if relay.lost is None:
                    await relay.enter(config.workdir)
            if relay.folder is None:
                raise InfraError(
                    f"no program runs in the {self.name} sandbox: {relay.lost or 'no answer'}; the image needs bash, "
                    "coreutils and python3"
                )
            yield CloudSandbox(relay, config, lambda: self._keep(machine))
        finally:
            carrying.cancel()
            if machine is not None:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
                    await self._stop(machine)

    async def _stop(self, machine: Any) -> None:
        try:
            await self._ask(self.service.stop, machine)
        except (InfraError, UserError) as problem:
            log.warning("a %s sandbox may live on to its lifetime_s: %s", self.name, problem)

    async def _keep(self, machine: Any) -> str:
        name = await self._ask(self.service.snapshot, machine, f"{self.node.path.name}-{len(self.kept)}")
        self.kept.append(name)
        return name


async def _within(scope: trio.CancelScope, function: Callable[[], Awaitable[None]]) -> None:
    with scope:
        await function()


class _PortalLine:
    """``relay.Line`` over the portal."""

    def __init__(self, ask: Callable[..., Awaitable[Any]], line: AsyncLine) -> None:
        self.ask, self.line = ask, line

    async def send(self, text: str) -> None:
        await self.ask(self.line.send, text)

    async def receive(self) -> str:
        return str(await self.ask(self.line.receive))


def _host() -> str:
    return re.sub(r"[^a-zA-Z0-9-]", "-", socket.gethostname())


def require(module: str, present: bool, credentials: str) -> None:
    """Raises UserError that names the extra when an SDK is not installed, or what credentials it wants."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"the sandbox provider {module} needs its SDK: pip install 'uniagent[{module}]'")
    if not present:
        raise UserError(f"the sandbox provider {module} has no credentials: {credentials}")
