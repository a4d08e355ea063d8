"""What one local sandbox is asked to be, from the ``sandbox`` section of a task.

Knows the keys and their meaning; not how they are enforced.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from attrs import frozen

from uniagent.adapters.options import options
from uniagent.engine.config import key
from uniagent.engine.egress.rules import hosts_checked
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json

MIB = 1 << 20
PROXIED = ("allowlist", "guarded")  # the only way out is the egress proxy
TAKEN = ("usr", "etc", "proc", "dev", "run", "tmp", "bin", "sbin", "lib", "lib32", "lib64", "libx32")


@frozen
class LocalConfig:
    """Keys of a sandbox whose provider is ``local``."""

    isolation: str = key("bwrap", "bwrap: namespaces; none: plain processes on this machine", choices=("bwrap", "none"))
    network: str = key(
        "none",
        "none: only a loopback of its own; allowlist: the hosts of allow; guarded: URLs the task's rules allow; "
        "host: this machine's network",
        choices=("none", "allowlist", "guarded", "host"),
    )
    allow: tuple[str, ...] = key((), "hosts that may be reached: name, name:port, *.name (allowlist, guarded)")
    pinned: tuple[str, ...] = key((), "guarded: hosts whose certificates clients pin: judged by the host alone")
    workdir: str = key("/work", "writable directory inside; with isolation none it is a private host directory")
    image: str | None = key(
        None, "folder with a root file system that has bash; every sandbox writes to a layer of its own above it"
    )
    files: Mapping[str, str] = key(
        dict, "written before the first command: path in the workdir -> text; a path ending in / is a directory"
    )
    env: Mapping[str, str] = key(dict, "environment variables")
    read_only: tuple[str, ...] = key((), "more host paths to show inside, read-only, at the same place")
    memory_mib: int | None = key(None, "memory; left out: no limit", at_least=1)
    pids: int | None = key(None, "processes and threads at once; left out: no limit", at_least=4)
    disk_mib: int | None = key(
        None, "room in each of the working directory, /tmp and /dev/shm, held in memory; left out: no limit", at_least=1
    )
    snapshot: str | None = key(None, "what `snapshot` of a local sandbox gave: start from its files")
    prepare: str = key("", "commands run once; all sandboxes of the section start from what they left")
    cpu_s: int | None = key(None, "CPU seconds of one process; left out: no limit", at_least=1)
    file_mib: int | None = key(None, "largest file a process may write; left out: no limit", at_least=1)
    output_mib: float = key(1.0, "output kept of one command: its head and its tail", at_least=0.001)
    start_timeout_s: float = key(30.0, "until the first answer of a new sandbox", at_least=0.1)

    @property
    def output_bytes(self) -> int:
        return int(self.output_mib * MIB)


def local_config(section: Mapping[str, Json]) -> LocalConfig:
    """Checked config; raises UserError that names the key, the value and what is allowed."""
    config = options(LocalConfig, section, "the sandbox section (provider local)")
    parts = PurePosixPath(config.workdir).parts
    if parts[:1] != ("/",) or len(parts) < 2 or parts[1] in TAKEN or ".." in parts:
        places = ", ".join(f"/{name}" for name in TAKEN)
        raise UserError(f"sandbox: workdir = {config.workdir!r} must be an absolute path outside {places}")
    if config.image is not None:
        if config.isolation == "none":
            raise UserError("sandbox: image needs isolation = 'bwrap': without it commands see this machine's files")
        if not any(Path(config.image, place).exists() for place in ("bin/bash", "usr/bin/bash")):
            raise UserError(f"sandbox: image = {config.image!r} is no folder of a root file system with bash in it")
    if config.disk_mib and config.isolation == "none":
        raise UserError("sandbox: disk_mib needs isolation = 'bwrap': nothing else would hold it")
    if config.snapshot is not None and not Path(config.snapshot, "work").is_dir():
        raise UserError(f"sandbox: snapshot = {config.snapshot!r} is no snapshot of this node's local sandboxes")
    for path in config.read_only:
        if not PurePosixPath(path).is_absolute():
            raise UserError(f"sandbox: read_only has {path!r}, which is not an absolute path")
    _check_network(config)
    return config


def _check_network(config: LocalConfig) -> None:
    if config.network in PROXIED and config.isolation == "none":
        raise UserError(f"sandbox: network = {config.network!r} needs isolation = 'bwrap': nothing else would hold it")
    for name, hosts in (("allow", config.allow), ("pinned", config.pinned)):
        if hosts and config.network not in PROXIED:
            raise UserError(f"sandbox: {name} needs network = 'allowlist' or 'guarded', not {config.network!r}")
        if problem := hosts_checked(hosts):
            raise UserError(f"sandbox: {name} = {list(hosts)!r}: {problem}")
