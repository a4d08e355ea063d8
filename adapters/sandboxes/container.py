"""Sandboxes in containers, through the command line of Docker or Podman.

A sandbox is one container that waits; the shell and programs are ``exec``s in it. Every container carries the node's
label, so that what a node that crashed left behind is removed by the next one. Works with a remote daemon too: nothing
is shared with the host but the command line.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from types import TracebackType

import trio
from attrs import evolve, fields_dict, frozen

from uniagent.adapters.options import options
from uniagent.adapters.sandboxes.channel_sandbox import ChannelSandbox, Reach
from uniagent.adapters.sandboxes.channels import MARK, Opener
from uniagent.adapters.sandboxes.config import PROXIED
from uniagent.adapters.sandboxes.loopback import inside
from uniagent.adapters.sandboxes.node_dir import NodeFolder, living, root_folder
from uniagent.adapters.sandboxes.pool import PreparedImages, WarmPool
from uniagent.adapters.sandboxes.process_channel import ProcessOpener
from uniagent.adapters.sandboxes.snapshots import prepared
from uniagent.engine.config import key
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import Json, ModelEndpoint

log = logging.getLogger(__name__)
LABEL = "uniagent.node"
KEPT = "uniagent-"  # before the node's name, in the names of snapshots
PROGRAMS = ("docker", "podman")
CLOSE_S, COMMIT_S = 60.0, 600.0


@frozen
class ContainerConfig:
    """Keys of a sandbox whose provider is ``container``."""

    image: str = key("", "image reference, such as debian:12-slim; it needs bash, coreutils, grep and tar")
    snapshot: str | None = key(None, "name of a snapshot to start from, instead of image")
    prepare: str = key("", "commands run once, with a network; all sandboxes of the section start from what they left")
    network: str = key("none", "none, or the name of a network of the engine (bridge, host, …)")
    workdir: str = key("/work", "working directory inside; made where the image has none")
    user: str | None = key(None, "user inside, as the command line takes it; left out: the image's")
    files: Mapping[str, str] = key(dict, "written before the first command: path in the workdir -> text")
    env: Mapping[str, str] = key(dict, "environment variables")
    memory_mib: int | None = key(None, "memory; left out: no limit", at_least=6)
    pids: int | None = key(None, "processes and threads at once; left out: no limit", at_least=8)
    cpus: float | None = key(None, "CPU cores; left out: no limit", at_least=0.01)
    pull: str = key("missing", "when the image is fetched", choices=("missing", "always", "never"))
    arguments: tuple[str, ...] = key((), "more words for `run`, such as --runtime=runsc")
    output_mib: float = key(1.0, "output kept of one command: its head and its tail", at_least=0.001)
    start_timeout_s: float = key(600.0, "for a container to start, its image fetched included", at_least=1)


@frozen
class EngineOptions:
    """What a run sets for all its containers, beside the defaults of their own keys."""

    program: str | None = key(None, "docker or podman, or a path; left out: the first that is installed")
    warm: int = key(0, "containers of a kind kept started and unused", at_least=0)
    prepare_network: str = key("bridge", "network of `prepare` where the sandboxes themselves have none")
    mirrors: Mapping[str, str] = key(dict, "registry host -> where its images are fetched from instead")


class ContainerSandbox(ChannelSandbox):
    """A ChannelSandbox that can be kept as an image."""

    def __init__(
        self,
        opener: Opener,
        workdir: PurePosixPath,
        output_bytes: int,
        reach: Reach,
        keep: Callable[[], Awaitable[str]],
    ) -> None:
        super().__init__(opener, workdir, output_bytes, reach)
        self.private, self._keep = True, keep

    async def snapshot(self) -> str:
        """See ``snapshots``."""
        return await self._keep()


class ContainerProvider:
    """``engine.ports.SandboxProvider`` named container; an async context manager run by the node."""

    def __init__(self, given: Mapping[str, Json] | None = None) -> None:
        """``given`` is [sandbox.options.container]. Raises UserError."""
        self.own = set(fields_dict(EngineOptions))
        mine = {name: value for name, value in (given or {}).items() if name in self.own}
        self.options = options(EngineOptions, mine, "[sandbox.options.container]")
        self.defaults = {name: value for name, value in (given or {}).items() if name not in self.own}
        options(ContainerConfig, self.defaults, "[sandbox.options.container]")
        self.pool = WarmPool(self._start, self.options.warm)
        self.images = PreparedImages()
        self.kept: list[str] = []
        self.reaped: list[str] = []  # containers and snapshots of nodes that are dead
        self.node: NodeFolder | None = None
        self.program = ""

    async def __aenter__(self) -> ContainerProvider:
        self.program = await self._choose()
        root = root_folder(fast=True) / "nodes-of-containers"
        root.mkdir(exist_ok=True)
        await self._reap(root)
        self.node = NodeFolder(root)
        async with AsyncExitStack() as stack:
            stack.callback(self.node.close)
            stack.push_async_callback(self._forget_snapshots)
            nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            nursery.start_soon(self.pool.run)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self.node = None

    async def _forget_snapshots(self) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
            for image in self.kept:
                try:
                    await self._call(["rmi", "-f", image])
                except InfraError as problem:
                    log.warning("snapshot %s stays: %s", image, problem)

    async def _choose(self) -> str:
        """The program; where both are installed and none was chosen, the first whose engine answers."""
        installed = [path for name in PROGRAMS if (path := shutil.which(name))]
        if self.options.program is None and len(installed) > 1:
            for self.program in installed:
                try:
                    await self._call(["ps", "-q"])
                    return self.program
                except InfraError as problem:
                    log.info("%s is not used: %s", self.program, problem)
        return find_program(self.options.program)

    async def _reap(self, root: Path) -> None:
        """Remove the containers and snapshots of nodes that are dead."""
        listed = await self._call(["ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.ID}} {{.Labels}}"])
        for line in listed.splitlines():
            container, _, labels = line.partition(" ")
            node = next((p.partition("=")[2] for p in _labels(labels) if p.startswith(f"{LABEL}=")), "")
            if node and not living(root, node):
                await self._call(["rm", "-f", container])
                self.reaped.append(container)
                log.warning("removed container %s of a node that crashed", container)
        listed = await self._call(["images", "--filter", f"label={LABEL}", "--format", "{{.Repository}}:{{.Tag}}"])
        for image in listed.split():  # what was built from a snapshot has its label, but a name of its own
            name = image.rpartition("/")[2].partition(":")[0]
            if name.startswith(KEPT) and not living(root, name.removeprefix(KEPT)):
                await self._call(["rmi", "-f", image])
                self.reaped.append(image)
                log.warning("removed snapshot %s of a node that crashed", image)

    @asynccontextmanager
    async def open(self, config: Mapping[str, Json]) -> AsyncIterator[ContainerSandbox]:
        """One sandbox. Raises UserError for a config that cannot work, InfraError when this one fails."""
        if self.node is None:
            raise RuntimeError("the container provider is not running: open it with `async with provider:` first")
        section = {**self.defaults, **{name: value for name, value in config.items() if name not in self.own}}
        wanted = options(ContainerConfig, section, "the sandbox section (provider container)")
        if wanted.network in PROXIED:
            raise UserError(
                f"the sandbox section (provider container): network = {wanted.network!r} is of provider = 'local' "
                "alone; use network = 'none', or give the local one the image as an unpacked folder"
            )
        if not (wanted.image or wanted.snapshot):
            raise UserError(
                "the sandbox section (provider container): image is missing, such as image = 'debian:12-slim'"
            )
        kind = evolve(wanted, files={})
        if kind.prepare:
            name = await self.images.get(repr(kind), lambda: self._prepare(kind))
            kind = evolve(kind, snapshot=name, prepare="")
        async with self.pool.open(kind) as box:
            for name, text in wanted.files.items():
                await box.write(PurePosixPath(name), text.encode())
            yield box

    async def _prepare(self, kind: ContainerConfig) -> str:
        network = self.options.prepare_network if kind.network == "none" else kind.network
        async with self._start(evolve(kind, network=network)) as box:
            return await prepared(box, kind.prepare)

    @asynccontextmanager
    async def _start(self, wanted: ContainerConfig) -> AsyncIterator[ContainerSandbox]:
        assert self.node is not None
        image = wanted.snapshot or mirrored(wanted.image, self.options.mirrors)
        words = run_words(wanted, image, self.node.path.name)
        container = (await self._call(words, timeout_s=wanted.start_timeout_s)).split()[-1]
        prefix = [self.program, "exec", "-i", "-e", f"{MARK}=1", "-w", wanted.workdir, container]
        box = ContainerSandbox(
            ProcessOpener(prefix),
            PurePosixPath(wanted.workdir),
            int(wanted.output_mib * (1 << 20)),
            partial(self._reach, container, wanted.network),
            partial(self._keep, container),
        )
        try:
            await self._make_workdir(container, wanted.workdir)
            yield box
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
                await box.close()
                await self._call(["rm", "-f", "-v", container])

    async def _make_workdir(self, container: str, path: str) -> None:
        """Docker would make it at ``run``, Podman does not; where the image's user may not, root makes it."""
        try:
            await self._call(["exec", container, "sh", "-c", 'mkdir -p -- "$1" && [ -w "$1" ]', "sh", path])
        except InfraError:
            make = 'mkdir -p -- "$1" && chmod 1777 -- "$1"'
            await self._call(["exec", "-u", "0", container, "sh", "-c", make, "sh", path])

    async def _keep(self, container: str) -> str:
        """The image of a container as it is now; its name carries the node's, its label the mark of all of ours."""
        assert self.node is not None
        name = f"localhost/{KEPT}{self.node.path.name}:{len(self.kept) + 1}"
        self.kept.append(name)
        change = f"LABEL {LABEL}={self.node.path.name}"
        await self._call(["commit", "--change", change, container, name], timeout_s=COMMIT_S)
        return name

    @asynccontextmanager
    async def _reach(self, container: str, network: str, model: ModelEndpoint) -> AsyncIterator[ModelEndpoint]:
        """See the port. A container without a network gets a socket in its network namespace, where this user may."""
        if network == "host":
            yield model
        elif network == "none":
            pid = await self._call(["inspect", "--format", "{{.State.Pid}}", container])
            async with inside(model, int(pid)) as near:
                yield near
        else:
            raise UserError(
                f"from the network {network!r} the gateway is not reachable: use network = 'none' or 'host'"
            )

    async def _call(self, words: Sequence[str], *, timeout_s: float = CLOSE_S) -> str:
        """What a command of the engine prints. Raises InfraError with what it says of an error."""
        with trio.move_on_after(timeout_s):
            done = await trio.run_process(
                [self.program, *words], capture_stdout=True, capture_stderr=True, check=False, stdin=b""
            )
            if done.returncode == 0:
                return done.stdout.decode(errors="replace")
            said = done.stderr.decode(errors="replace").strip()
            raise InfraError(f"{self.program} {words[0]} failed: {said or done.returncode}")
        raise InfraError(f"{self.program} {words[0]} took longer than {timeout_s:g} s")


def find_program(chosen: str | None) -> str:
    """Raises UserError where there is none."""
    names = [chosen] if chosen else PROGRAMS
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise UserError(
            f"the sandbox provider container needs {' or '.join(names)}, and there is none on the PATH: install one, "
            "or use provider = 'local'"
        )
    return found


def mirrored(image: str, mirrors: Mapping[str, str]) -> str:
    """An image reference with its registry replaced; a reference without a registry is docker.io's."""
    host, slash, rest = image.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, rest = "docker.io", image if slash else f"library/{image}"
    return f"{mirrors[host].rstrip('/')}/{rest}" if host in mirrors else image


def run_words(config: ContainerConfig, image: str, node: str) -> list[str]:
    """The words of ``run`` that start a container which waits."""
    words = ["run", "-d", "--rm", "--init", "--label", f"{LABEL}={node}", "--network", config.network]
    words += ["--pull", config.pull]
    words += ["--user", config.user] if config.user else []
    words += ["--memory", f"{config.memory_mib}m"] if config.memory_mib else []
    words += ["--pids-limit", str(config.pids)] if config.pids else []
    words += ["--cpus", f"{config.cpus:g}"] if config.cpus else []
    for name, value in config.env.items():
        words += ["-e", f"{name}={value}"]
    return [*words, *config.arguments, "--entrypoint", "sleep", image, "infinity"]


def _labels(text: str) -> list[str]:
    """Docker prints ``a=b,c=d``, Podman ``map[a:b c:d]`` or JSON."""
    if text.startswith("{"):
        return [f"{k}={v}" for k, v in json.loads(text).items()]
    if text.startswith("map["):
        return [part.replace(":", "=", 1) for part in text[4:-1].split(" ")]
    return text.split(",")
