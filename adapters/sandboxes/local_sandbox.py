"""One local sandbox: commands through its first process, files directly in the host directories behind it.

Knows one sandbox's life and no other's; who starts and buries it is ``local``.
"""

from __future__ import annotations

import errno
import os
import posixpath
import secrets
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path, PurePosixPath

import trio
from attrs import frozen

from uniagent.adapters.sandboxes import bwrap, hostfiles
from uniagent.adapters.sandboxes.cgroups import Group, Hierarchy
from uniagent.adapters.sandboxes.config import PROXIED, LocalConfig
from uniagent.adapters.sandboxes.fifo_channel import FifoChannel
from uniagent.adapters.sandboxes.init import Init
from uniagent.adapters.sandboxes.loopback import inside
from uniagent.adapters.sandboxes.node_dir import MARK
from uniagent.adapters.sandboxes.pipes import Capped, Collector
from uniagent.adapters.sandboxes.processes import children, ended, kill_trees, marked
from uniagent.adapters.sandboxes.shell import LocalShell
from uniagent.adapters.sandboxes.starter import BASH, FOLDER, PIPES
from uniagent.engine.egress.record import Egress
from uniagent.engine.egress.rules import Listed
from uniagent.engine.egress.target import authority
from uniagent.engine.errors import InfraError
from uniagent.engine.ports import Completed, ModelEndpoint

# descriptors 11, 12, 13: stdout, stderr, status; 10 is stdin
EXEC = "( cd -- {cwd} && exec {argv} ) <&10 >&11 2>&12 10<&- 11>&- 12>&- 13>&-; printf '%d\\n' $? >&13"
# 11, 12, 13, 14: stdin, stdout, stderr, status
STREAM = (
    "( cd -- {cwd} && exec {argv} ) <&11 >&12 2>&13 10<&- 11<&- 12>&- 13>&- 14>&-; R=$?; exec 11<&- 12>&- 13>&-; "
    "printf '%d\n' $R >&14"
)
ENDING_POLL_S = 0.002
KEPT, ROOT = ("work", "tmp"), "root"  # in a snapshot: of the mounts in their order, and of an image
TREE_BATCH = 64  # files read before other tasks get a turn


@frozen
class Place:
    """Where one sandbox keeps its files on the host and, on memory where there is some, its pipes and its /etc."""

    node: Path
    node_pipes: Path
    number: int

    @property
    def folder(self) -> str:
        return f"{self.node}/{self.number}"

    @property
    def pipes(self) -> str:
        return f"{self.node_pipes}/{self.number}"

    @property
    def etc(self) -> str:
        return f"{self.node_pipes}/etc"

    @property
    def trust(self) -> str:
        return f"{self.node_pipes}/trust"

    @property
    def label(self) -> str:
        return f"{self.node.name}-{self.number}"

    def remove(self) -> None:
        hostfiles.remove(self.folder)
        hostfiles.remove(self.pipes)


def start_words(config: LocalConfig, program: str | None, place: Place) -> list[str]:
    """The argv of a sandbox's first process, for the starter. ``program`` is bubblewrap's path, None for isolation
    none, whose processes are marked with their folder."""
    if program is not None:
        work, tmp = f"{FOLDER}/work", f"{FOLDER}/tmp"
        confined = bwrap.confine(program, config, work=work, tmp=tmp, run=PIPES, etc=place.etc, trust=place.trust)
        return [*confined, *BASH]
    env = {**bwrap.environment(config, home=f"{FOLDER}/tmp"), MARK: f"{FOLDER}/"}
    pairs = [f"{name}={value}" for name, value in env.items()]
    return ["env", "-i", "-C", f"{FOLDER}/work", *pairs, *BASH]


def way_out(config: LocalConfig) -> Egress:
    """The record and the rules that a sandbox behind the proxy begins with."""
    pinned = {authority(host, 443) for host in config.pinned}
    return Egress(config.network, Listed(config.allow), pinned)


async def _copy(source: str, target: str) -> None:
    """A tree with its links as they are, without what is mounted in it. Raises InfraError."""
    words = ["cp", "-a", "-x", "--reflink=auto", "--", source, target]
    done = await trio.run_process(words, capture_stderr=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise InfraError(f"files of a sandbox could not be copied: {said[-1] if said else done.returncode}")


class LocalSandbox:
    """``engine.ports.Sandbox`` on this machine. The file methods raise OSError as the calls of the same name do; a
    symbolic link is never followed (ELOOP)."""

    def __init__(self, place: Place, config: LocalConfig, groups: Mapping[str, Hierarchy]) -> None:
        """Makes its folders and pipes; ``start_words`` is to be started next. ``groups``: the usable control groups."""
        self.place, self.config = place, config
        work, tmp, run = f"{place.folder}/work", f"{place.folder}/tmp", place.pipes
        for path in (place.folder, work, tmp, run):
            os.mkdir(path, 0o755)
        confined = config.isolation == "bwrap"
        self.workdir = PurePosixPath(config.workdir if confined else work)
        self.mounts = {str(self.workdir): work, **({"/tmp": tmp} if confined else {})}
        self.held: list[int] = []  # directories in memory, seen from here through descriptors
        if not config.disk_mib:
            self.plant(config.files)
        limits = bwrap.limits(config, groups)
        self.init = Init(run, bwrap.RUN if confined else run, confined=confined, limits=limits)
        self.group = None
        if groups and (config.memory_mib or config.pids):
            self.group = Group(groups, place.label, config.memory_mib, config.pids)
            self.init.enter = self.group.enter
        self.egress: Egress | None = None
        if config.network in PROXIED:
            self.egress = way_out(config)
        self._shell = LocalShell(self.init, config.output_bytes)

    @property
    def private(self) -> bool:
        """Whether all that can be written to inside is this sandbox's own."""
        return self.init.confined

    async def settle(self) -> None:
        """What can only be done once it runs: reach its directories that are in memory; files from a snapshot."""
        if self.config.disk_mib:
            pid = await self.init.first()
            for place in self.mounts:
                fd = os.open(f"/proc/{pid}/root{place}", os.O_RDONLY | os.O_DIRECTORY)
                self.held.append(fd)
                self.mounts[place] = f"/proc/{os.getpid()}/fd/{fd}/."
        if self.config.snapshot is not None:
            for place, name in zip(self.mounts, KEPT, strict=False):
                await _copy(f"{self.config.snapshot}/{name}/.", self.mounts[place])
        if self.config.disk_mib:
            self.plant(self.config.files)

    def let_go(self) -> None:
        """Its directories in memory end with the last descriptor."""
        while self.held:
            os.close(self.held.pop())

    async def snapshot(self) -> str:
        """See ``snapshots``: a folder of the node. With an image the whole root is copied."""
        kept = f"{self.place.node}/kept-{self.place.number}-{secrets.token_hex(4)}"
        for (_, host), name in zip(self.mounts.items(), KEPT, strict=False):
            os.makedirs(f"{kept}/{name}")
            await _copy(f"{host}/.", f"{kept}/{name}")
        if self.config.image is not None:
            os.mkdir(f"{kept}/{ROOT}")
            await _copy(f"/proc/{await self.init.first()}/root/.", f"{kept}/{ROOT}")
        return kept

    def plant(self, files: Mapping[str, str]) -> None:
        """Write the config's files."""
        for name, text in files.items():
            host, path = self._own(PurePosixPath(name))
            if name.endswith("/"):
                hostfiles.make_directory(host, path)
            else:
                hostfiles.write(host, path, text.encode())

    def kill(self) -> None:
        """End every process now; the files stay until they are removed."""
        self._shell.close()
        self.init.kill()

    async def end_processes(self) -> None:
        """Kill all that runs inside but its first process; the shell's next command finds a fresh one."""
        first = await self.init.first()
        mark = f"{MARK}={self.place.folder}/".encode()  # who left its parents, where there is no pid namespace
        while pids := [
            pid
            for pid in (children(first) if self.init.confined else [p for p in marked(mark) if p != first])
            if not ended(pid)
        ]:
            kill_trees(pids)
            await trio.sleep(ENDING_POLL_S)

    # ------------------------------------------------------------ commands

    async def shell(self) -> LocalShell:
        """The sandbox's persistent shell: always the same one, started at its first command."""
        return self._shell

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        cwd: PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """A new process beside the shell, in the same namespaces; at the time limit its tree is killed and ``code`` is
        None. stdin is a file with those bytes. Raises InfraError when the sandbox is gone."""
        began = trio.current_time()
        words = [*(["env", *(f"{k}={v}" for k, v in env.items())] if env else []), *argv]
        place = shlex.quote(str(self.workdir / (cwd or "")))
        program = EXEC.format(cwd=place, argv=shlex.join(words))
        out, err = Capped(self.config.output_bytes), Capped(self.config.output_bytes)
        code: int | None = None
        with trio.move_on_after(timeout_s):
            started = await self.init.spawn(program, ("out", "err", "status"), feed=stdin or None)
            out_fd, err_fd, status_fd = started.fds
            collector = Collector(status_fd, [out_fd, err_fd])
            try:
                told = await collector.collect({out_fd: out, err_fd: err})
                code = int(told) if told else await self.init.exit_code(started)
            except trio.ClosedResourceError:
                raise InfraError("the sandbox is gone: it was closed under a running program") from None
            finally:
                if code is None and started.pid:
                    kill_trees([started.pid])
                collector.close()
                started.close()
        (output, dropped), (errors, dropped_errors) = out.finish(), err.finish()
        return Completed(code, output, errors, dropped + dropped_errors, trio.current_time() - began)

    async def open(self, argv: Sequence[str]) -> FifoChannel:
        """A program with its standard streams, until it is closed (``channels.Opener``). Raises InfraError."""
        place = shlex.quote(str(self.workdir))
        started = await self.init.spawn(STREAM.format(cwd=place, argv=shlex.join(argv)), ("in", "out", "err", "status"))
        return FifoChannel(self.init, started)

    @asynccontextmanager
    async def reach(self, model: ModelEndpoint) -> AsyncIterator[ModelEndpoint]:
        """See the port. Where the network is this machine's, the endpoint as it is."""
        if not self.init.confined or self.config.network == "host":
            yield model
            return
        async with inside(model, await self.init.first()) as near:
            yield near

    # ------------------------------------------------------------ files

    def _locate(self, path: PurePosixPath) -> tuple[str, PurePosixPath] | None:
        """(host directory, path below it) behind a path of the sandbox; None when it is not one of ours."""
        whole = posixpath.normpath(self.workdir / path)
        if any(whole == shown or whole.startswith(f"{shown}/") for shown in self.config.read_only):
            return None
        for mount, host in self.mounts.items():
            if whole == mount or whole.startswith(f"{mount}/"):
                return host, PurePosixPath(whole[len(mount) + 1 :])
        return None

    def _own(self, path: PurePosixPath) -> tuple[str, PurePosixPath]:
        if (found := self._locate(path)) is None:
            places = " and ".join(self.mounts)
            raise OSError(errno.EXDEV, f"not in {places}, the sandbox's own directories", str(path))
        return found

    async def read(self, source: PurePosixPath, *, limit: int = 1 << 20) -> bytes:
        """At most the first ``limit`` bytes."""
        await trio.lowlevel.checkpoint()
        if (found := self._locate(source)) is not None:
            return hostfiles.read(*found, limit)
        done = await self.exec(["head", "-c", str(limit), "--", str(source)], timeout_s=60)
        if done.code != 0:
            raise OSError(errno.EIO, done.errors.decode(errors="replace").strip(), str(source))
        return done.output

    async def write(self, target: PurePosixPath, data: bytes) -> None:
        """Directories above it are made."""
        await trio.lowlevel.checkpoint()
        hostfiles.write(*self._own(target), data)

    async def files(self, root: PurePosixPath) -> Mapping[PurePosixPath, bytes]:
        """See the port; a file above 8 MiB is described by its size (``b"<9000000 bytes>"``)."""
        found: dict[PurePosixPath, bytes] = {}
        for count, (path, content) in enumerate(hostfiles.tree(*self._own(root))):
            found[path] = content
            if count % TREE_BATCH == 0:
                await trio.lowlevel.checkpoint()
        return found

    async def upload(self, source: Path, target: PurePosixPath) -> None:
        """A file or a whole tree of the host; links inside the tree are left out."""
        await trio.to_thread.run_sync(partial(hostfiles.copy_in, source, *self._own(target)))

    async def download(self, source: PurePosixPath, target: Path) -> None:
        """A file or a whole tree to the host; links and special files are left out."""
        await trio.to_thread.run_sync(partial(hostfiles.copy_out, *self._own(source), target))
