"""Sandboxes in containers of runc, on an unpacked root file system: no engine and no daemon, root's rights needed.

The root is shared and read-only; the working directory, /tmp and /dev/shm are each a tmpfs of bounded size. Everything
of a node (bundles, runc's state) is in a folder that the node holds locked, so the next node ends and removes what one
that crashed left. Knows no image registry.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any

import trio
from attrs import frozen

from uniagent.adapters.options import options
from uniagent.adapters.sandboxes.channel_sandbox import ChannelSandbox
from uniagent.adapters.sandboxes.channels import MARK
from uniagent.adapters.sandboxes.loopback import inside
from uniagent.adapters.sandboxes.node_dir import NodeFolder, living, reap, root_folder
from uniagent.adapters.sandboxes.process_channel import ProcessOpener
from uniagent.engine.config import key
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import Json, ModelEndpoint

log = logging.getLogger(__name__)
CLOSE_S = 30.0
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MASKED = ("/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/sched_debug",
          "/proc/scsi", "/sys/firmware")  # fmt: skip


@frozen
class RuncConfig:
    """Keys of a sandbox whose provider is ``runc``."""

    image: str = key("", "folder of an unpacked root file system; it needs bash, coreutils, grep and tar")
    workdir: str = key("/work", "working directory inside")
    user: int = key(1000, "user and group id inside", at_least=0)
    files: Mapping[str, str] = key(dict, "written before the first command: path in the workdir -> text")
    env: Mapping[str, str] = key(dict, "environment variables")
    memory_mib: int | None = key(None, "memory, files in memory included; left out: no limit", at_least=6)
    pids: int | None = key(None, "processes and threads at once; left out: no limit", at_least=8)
    cpus: float | None = key(None, "CPU cores; left out: no limit", at_least=0.01)
    disk_mib: int = key(1024, "room in each of the working directory, /tmp and /dev/shm, held in memory", at_least=1)
    output_mib: float = key(1.0, "output kept of one command: its head and its tail", at_least=0.001)
    start_timeout_s: float = key(60.0, "for a container to start", at_least=1)


class RuncProvider:
    """``engine.ports.SandboxProvider`` named runc; an async context manager run by the node."""

    def __init__(self, given: Mapping[str, Json] | None = None) -> None:
        """``given`` is [sandbox.options.runc]: defaults of every sandbox. Raises UserError."""
        self.defaults = dict(given or {})
        options(RuncConfig, self.defaults, "[sandbox.options.runc]")
        self.node: NodeFolder | None = None
        self.reaped: list[str] = []  # ids of containers of nodes that are dead
        self.count = 0

    async def __aenter__(self) -> RuncProvider:
        """Raises UserError where runc is not installed or may not run."""
        found = shutil.which("runc")
        if found is None or os.geteuid() != 0:
            lacks = "root's rights" if found else "runc, which is not on the PATH"
            raise UserError(f"the sandbox provider runc needs {lacks}: use provider = 'local' or 'container'")
        self.program = found
        root = root_folder(fast=True) / "nodes-of-runc"
        root.mkdir(exist_ok=True)
        for node in root.iterdir():
            if not node.name.startswith(".") and not living(root, node.name):
                for container in (await self._call(node, "list", "-q")).split():
                    await self._call(node, "delete", "-f", container)
                    self.reaped.append(container)
                    log.warning("removed container %s of a node that crashed", container)
        await trio.to_thread.run_sync(reap, root)
        self.node = NodeFolder(root)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.node is not None
        self.node.close()
        self.node = None

    @asynccontextmanager
    async def open(self, config: Mapping[str, Json]) -> AsyncIterator[ChannelSandbox]:
        """One sandbox. Raises UserError for a config that cannot work, InfraError when this one fails."""
        if self.node is None:
            raise RuntimeError("the runc provider is not running: open it with `async with provider:` first")
        wanted = options(RuncConfig, {**self.defaults, **config}, "the sandbox section (provider runc)")
        if not any(Path(wanted.image, place).exists() for place in ("bin/bash", "usr/bin/bash")) or not wanted.image:
            raise UserError(f"sandbox: image = {wanted.image!r} is no folder of a root file system with bash in it")
        if wanted.user and not os.stat(wanted.image).st_mode & stat.S_IXOTH:
            raise UserError(f"sandbox: image = {wanted.image!r} is closed to user {wanted.user}: chmod 755 it")
        self.count += 1
        node, name = self.node.path, f"{self.node.path.name}-{self.count}"
        bundle = node / name
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(bundle_config(wanted, name)))
        try:
            # its streams are not ours: they would be held open by what waits inside
            await self._call(node, "run", "-d", "-b", str(bundle), name, timeout_s=wanted.start_timeout_s, quiet=True)
            box = ChannelSandbox(
                ProcessOpener(exec_words([self.program, "--root", f"{node}/state"], wanted.workdir, name)),
                PurePosixPath(wanted.workdir),
                int(wanted.output_mib * (1 << 20)),
                partial(self._reach, name),
            )
            box.private = True
            try:
                for path, text in wanted.files.items():
                    await box.write(PurePosixPath(path), text.encode())
                yield box
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
                    await box.close()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
                await self._call(node, "delete", "-f", name)
                await trio.to_thread.run_sync(shutil.rmtree, bundle)

    @asynccontextmanager
    async def _reach(self, name: str, model: ModelEndpoint) -> AsyncIterator[ModelEndpoint]:
        """See the port: a socket in the container's network namespace."""
        assert self.node is not None
        state = json.loads(await self._call(self.node.path, "state", name))
        async with inside(model, int(state["pid"])) as near:
            yield near

    async def _call(self, node: Path, *words: str, timeout_s: float = CLOSE_S, quiet: bool = False) -> str:
        """What a command of runc prints. ``quiet``: it gives nothing."""
        command = [self.program, "--root", f"{node}/state", *words]
        with trio.move_on_after(timeout_s), TemporaryFile() as told:
            if quiet:
                done = await trio.run_process(command, stdout=told, stderr=told, stdin=b"", check=False)
            else:
                done = await trio.run_process(command, capture_stdout=True, stderr=told, stdin=b"", check=False)
            if done.returncode == 0:
                return (done.stdout or b"").decode(errors="replace")
            told.seek(0)
            raise InfraError(f"runc {words[0]} failed: {told.read().decode(errors='replace').strip()}")
        raise InfraError(f"runc {words[0]} took longer than {timeout_s:g} s")


def exec_words(runc: Sequence[str], workdir: str, name: str) -> list[str]:
    """What stands before a program's own words. Its streams are handed in as descriptors: runc copies its standard ones
    and would wait for what a program left in the background to close them."""
    outside = 'exec 3<&0 4>&1 5>&2 </dev/null; exec "$@"'
    within = 'exec <&3 >&4 2>&5 3<&- 4>&- 5>&-; exec "$@"'
    options = ["exec", "--preserve-fds", "3", "--env", f"{MARK}=1", "--cwd", workdir, name]
    return ["sh", "-c", outside, "sh", *runc, *options, "sh", "-c", within, "sh"]


def bundle_config(config: RuncConfig, name: str) -> dict[str, Any]:
    """config.json of the OCI runtime specification, 1.0.2."""
    # runc gives a tmpfs the mode of what it is mounted on: it belongs to the user instead
    private = ["nosuid", "nodev", f"uid={config.user}", f"gid={config.user}", f"size={config.disk_mib}m"]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
         "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]},
        *({"destination": place, "type": "tmpfs", "source": "tmpfs", "options": private}
          for place in ("/dev/shm", "/tmp", config.workdir)),
    ]  # fmt: skip
    resources: dict[str, Any] = {"devices": [{"allow": False, "access": "rwm"}]}
    if config.memory_mib:
        resources["memory"] = {"limit": config.memory_mib << 20}
    if config.pids:
        resources["pids"] = {"limit": config.pids}
    if config.cpus:
        resources["cpu"] = {"quota": int(100_000 * config.cpus), "period": 100_000}
    nothing: list[str] = []
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": config.user, "gid": config.user},
            # the first process takes in orphans: a bash that waits
            "args": ["bash", "-c", "trap 'exit 0' TERM; while :; do sleep 1000000 & wait; done"],
            "env": [PATH, "HOME=/tmp", *(f"{k}={v}" for k, v in config.env.items())],
            "cwd": config.workdir,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), nothing),
            "noNewPrivileges": True,
        },
        "root": {"path": os.path.abspath(config.image), "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {
            "resources": resources,
            "cgroupsPath": f"/uniagent/{name}",
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            "maskedPaths": [*MASKED],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    }
