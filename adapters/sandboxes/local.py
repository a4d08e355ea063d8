"""Sandboxes on this machine: opens them, keeps some warm, and buries them.

Invariants: what ``open`` gives is closed when its block ends, whatever happened there; closing kills at once and never
waits, processes and files are gone when the provider is; a node that dies leaves a labelled folder that the next
provider removes. No command ever runs unconfined unless the config says so.

Starting costs about 5 ms of CPU, most of it the kernel's: a sandbox starts in the background of whoever opened
it, and with ``warm`` some of each kind stand ready.
"""

from __future__ import annotations

import datetime
import logging
import resource
import signal
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType

import trio
from attrs import evolve, fields_dict, frozen

from uniagent.adapters.options import options
from uniagent.adapters.sandboxes import bwrap
from uniagent.adapters.sandboxes.cgroups import Hierarchy, hierarchies, remove_left
from uniagent.adapters.sandboxes.config import LocalConfig, local_config
from uniagent.adapters.sandboxes.local_sandbox import ROOT, LocalSandbox, Place, start_words
from uniagent.adapters.sandboxes.loopback import listen_inside
from uniagent.adapters.sandboxes.node_dir import MARK, NodeFolder, reap, root_folder
from uniagent.adapters.sandboxes.pool import PreparedImages
from uniagent.adapters.sandboxes.processes import marked, send
from uniagent.adapters.sandboxes.snapshots import prepared
from uniagent.adapters.sandboxes.starter import Starter
from uniagent.adapters.sandboxes.trust import PROXY_PORT, write_trust
from uniagent.engine.config import key
from uniagent.engine.egress.authority import Authority
from uniagent.engine.egress.outside import Outside
from uniagent.engine.egress.proxy import EgressProxy
from uniagent.engine.errors import InfraError
from uniagent.engine.ports import Json

log = logging.getLogger(__name__)
KINDS_KEPT_WARM = 4
BURIAL_S = 10.0


@frozen
class ProviderOptions:
    """What a run sets for all its local sandboxes, beside the defaults of their own keys."""

    warm: int = key(8, "sandboxes of a kind kept started and unused", at_least=0)
    storage: str = key(
        "disk", "where their files are: disk, or memory (small files: quicker)", choices=("disk", "memory")
    )
    root: str | None = key(None, "folder for their files; left out: a private one in the temporary directory")
    bwrap: str | None = key(None, "path of bubblewrap; left out: the installed one")


class LocalProvider:
    """``engine.ports.SandboxProvider`` named local; an async context manager run by the node."""

    def __init__(self, given: Mapping[str, Json] | None = None) -> None:
        """``given`` is [sandbox.options.local]: ProviderOptions, and defaults of every sandbox. Raises UserError."""
        own = {name: value for name, value in (given or {}).items() if name in fields_dict(ProviderOptions)}
        self.options = options(ProviderOptions, own, "[sandbox.options.local]")
        self.defaults = {name: value for name, value in (given or {}).items() if name not in own}
        local_config(self.defaults)
        self.folder: NodeFolder | None = None
        self.program: str | None = None
        self.started_once = False
        self.count = 0
        self.groups: Mapping[str, Hierarchy] = {}
        self.warm: OrderedDict[str, tuple[LocalConfig, deque[LocalSandbox]]] = OrderedDict()
        self.retired: list[LocalSandbox] = []
        self.images = PreparedImages()
        self.asked = trio.Event()
        self.died = trio.Event()
        self.authority: Authority | None = None
        self.outside: Outside | None = None  # how egress proxies reach the world, where it is not as this machine does

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> LocalProvider:
        fast = root_folder(fast=True)
        root = fast if self.options.storage == "memory" and not self.options.root else root_folder(self.options.root)
        self.groups = hierarchies()
        for label in await trio.to_thread.run_sync(lambda: [*reap(root), *reap(fast)]):
            log.warning("removed what a node that crashed left behind: %s", label)
            remove_left(self.groups, label)
        _raise_descriptor_limit()
        self.folder, self.pipes = NodeFolder(root), NodeFolder(fast)
        self.starter = Starter()
        bwrap.make_etc(self.pipes.path / "etc")
        self._nursery_manager = trio.open_nursery()
        nursery = await self._nursery_manager.__aenter__()
        nursery.start_soon(self._keep_warm)
        nursery.start_soon(self._bury)
        self._scope = nursery.cancel_scope
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.cancel()
        try:
            await self._nursery_manager.__aexit__(None, None, None)
        finally:
            assert self.folder is not None
            for _, boxes in self.warm.values():
                self._retire(*boxes)
            self.warm.clear()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + BURIAL_S):
                await self._bury_retired()
            self.starter.close()
            self.folder.close()
            self.pipes.close()
            self.folder = None

    # ------------------------------------------------------------ opening and closing

    @asynccontextmanager
    async def open(self, config: Mapping[str, Json]) -> AsyncIterator[LocalSandbox]:
        """One sandbox. Raises UserError for a config that cannot work here, InfraError when this one fails."""
        if self.folder is None:
            raise RuntimeError("the local sandbox provider is not running: open it with `async with provider:` first")
        section = {name: value for name, value in config.items() if name not in fields_dict(ProviderOptions)}
        wanted = local_config({**self.defaults, **section})
        if wanted.prepare:
            kind = evolve(wanted, files={})
            name = await self.images.get(repr(kind), lambda: self._prepare(kind))
            wanted = evolve(wanted, snapshot=name, prepare="")
        box = await self._take(wanted)
        try:
            async with self._way_out(box):
                yield box
        finally:
            self._retire(box)

    async def _prepare(self, kind: LocalConfig) -> str:
        box = await self._start(kind)
        try:
            async with self._way_out(box):
                return await prepared(box, kind.prepare)
        finally:
            self._retire(box)

    @asynccontextmanager
    async def _way_out(self, box: LocalSandbox) -> AsyncIterator[None]:
        """The egress proxy of a sandbox that has one, listening inside while the block lasts."""
        if box.egress is None:
            yield
            return
        proxy = EgressProxy(box.egress, self.outside or Outside(), self.authority)
        listener = await listen_inside(await box.init.first(), PROXY_PORT)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(proxy.serve, listener)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()

    async def _take(self, config: LocalConfig) -> LocalSandbox:
        kind = evolve(config, files={})
        key = repr(kind)
        _, ready = self.warm.get(key, (kind, deque[LocalSandbox]()))
        while ready:
            self.asked.set()
            box = ready.popleft()
            if box.init.alive():
                box.plant(config.files)
                return box
            self._retire(box)
        if key not in self.warm:
            self._remember(key, kind)
        box = await self._start(config)
        self.asked.set()
        return box

    async def _start(self, config: LocalConfig) -> LocalSandbox:
        """A sandbox that is on its way: its first command waits for it."""
        assert self.folder is not None
        program: str | None = None
        if config.isolation == "bwrap":
            self.program = program = self.program or bwrap.find_bwrap(self.options.bwrap)
        if config.network == "guarded" and self.authority is None:
            await self._make_authority()
        if config.snapshot and (root := Path(config.snapshot, ROOT)).is_dir():
            config = evolve(config, image=str(root))
        self.count += 1
        place = Place(self.folder.path, self.pipes.path, self.count)
        try:
            box = LocalSandbox(place, config, self.groups)
        except OSError as problem:
            place.remove()
            raise InfraError(f"a sandbox could not be started: {problem}") from problem
        try:
            await self.starter.start(start_words(config, program, place), place.folder, place.pipes)
            if not self.started_once:
                await self._first_answer(box)
            if config.disk_mib or config.snapshot:
                await box.settle()
        except BaseException:
            self._retire(box)
            raise
        return box

    async def _make_authority(self) -> None:
        """The run's own certificate authority, made when the first guarded sandbox is wanted."""
        now = datetime.datetime.now(datetime.UTC)
        made = await trio.to_thread.run_sync(Authority, now)
        if self.authority is None:
            self.authority = made
            write_trust(self.pipes.path / "trust", made.bundle(), made.certificate)

    async def _first_answer(self, box: LocalSandbox) -> None:
        """Whether sandboxes work here at all; from then on they are trusted to start."""
        try:
            await box.init.ask("true", "started", timeout_s=box.config.start_timeout_s)
        except InfraError as problem:
            raise bwrap.refusal(str(problem)) from problem
        self.started_once = True

    def _retire(self, *boxes: LocalSandbox) -> None:
        for box in boxes:
            box.kill()
            self.retired.append(box)
        self.died.set()

    async def _bury(self) -> None:
        while True:
            await self.died.wait()
            self.died = trio.Event()
            await self._bury_retired()

    async def _bury_retired(self) -> None:
        """Wait for the processes of closed sandboxes, then remove their files."""
        while self.retired:
            boxes = list(self.retired)
            for box in boxes:
                if not await box.init.wait(BURIAL_S):
                    log.error(
                        "a process of sandbox %s does not die; its folder is left to the next start", box.place.folder
                    )
            await trio.to_thread.run_sync(_remove_all, boxes)
            del self.retired[: len(boxes)]

    # ------------------------------------------------------------ warm pool

    def _remember(self, key: str, kind: LocalConfig) -> None:
        self.warm[key] = kind, deque()
        if len(self.warm) > KINDS_KEPT_WARM:
            _, (_, boxes) = self.warm.popitem(last=False)
            self._retire(*boxes)

    async def _keep_warm(self) -> None:
        """One at a time, whenever one was taken: sandboxes in use come first."""
        while True:
            await self.asked.wait()
            self.asked = trio.Event()
            for kind, boxes in list(self.warm.values()):
                while len(boxes) < self.options.warm:
                    if not await self._add_warm(kind, boxes):
                        break

    async def _add_warm(self, kind: LocalConfig, boxes: deque[LocalSandbox]) -> bool:
        try:
            box = await self._start(kind)
        except InfraError as problem:
            log.warning("no warm sandbox: %s", problem)
            return False
        try:
            await (await box.shell()).start()
        except InfraError as problem:
            log.warning("no warm sandbox: %s", problem)
            self._retire(box)
            return False
        except BaseException:
            self._retire(box)
            raise
        boxes.append(box)
        return True


def _remove_all(boxes: list[LocalSandbox]) -> None:
    for box in boxes:
        if not box.init.confined:
            send(marked(f"{MARK}={box.place.folder}/".encode()), signal.SIGKILL)
        box.let_go()
        with suppress(OSError):  # a process that would not die may still write: reaped at the next start
            box.place.remove()
        if box.group is not None:
            box.group.close()


def _raise_descriptor_limit() -> None:
    """Six descriptors a sandbox: thousands need more than the usual soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
