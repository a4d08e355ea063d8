"""Where a task folder runs: its ``task.toml`` as a sandbox section, and its image built where an engine can.

What the Task Config or the sample say about the sandbox lies on top of what the folder says. Knows the keys of the
backends ``local`` and ``container``; others get image, workdir and env.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import trio
from attrs import evolve

from uniagent.adapters.sandboxes.config import TAKEN
from uniagent.adapters.sandboxes.container import find_program
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import Json, Providers
from uniagent.tasks.config import SandboxConfig, merge
from uniagent.tasks.harbor.dockerfile import read_dockerfile
from uniagent.tasks.harbor.folder import TaskFolder

TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
DEFAULT_WORKDIR = "/app"
BUILD_LOG = 1500  # characters of a failed build's output


def workdir(folder: TaskFolder, sandbox: SandboxConfig) -> PurePosixPath | None:
    """Where the agent and the tests begin: as task.toml says, else the Dockerfile; None: the image's own."""
    environment = folder.config.environment
    if environment.workdir:
        return PurePosixPath(environment.workdir)
    if folder.dockerfile and (sandbox.provider == "local" or not environment.docker_image):
        found = _workdir_of(folder.dockerfile)
        return PurePosixPath(found) if found else None
    return PurePosixPath(DEFAULT_WORKDIR) if sandbox.provider == "local" else None


def section(folder: TaskFolder, sandbox: SandboxConfig, place: PurePosixPath | None) -> SandboxConfig:
    """The sandbox of the folder under the one that was asked for; raises UserError where they do not fit."""
    environment = folder.config.environment
    where = folder.path / ("task.yaml" if folder.exit_code else "task.toml")
    wanted: dict[str, Json] = {"env": resolved(environment.env, f"{where}: environment.env")}
    if sandbox.provider == "local":
        if sandbox.image is None:
            raise UserError(
                f"{folder.path}: provider local builds no image: give sandbox.image, a folder with an unpacked root "
                "file system (the Dockerfile's steps are carried out on top of it), or use provider = 'container'"
            )
        wanted |= _local_network(folder)
        if folder.dockerfile:
            wanted["env"] = {**read_dockerfile(folder.dockerfile).env, **wanted["env"]}
        if place is not None and _may_be_bound(place, sandbox.image):
            wanted["workdir"] = str(place)
    elif sandbox.provider == "container":
        if environment.network_mode == "allowlist" and "network" not in sandbox.options:
            raise UserError(
                f"{where}: environment.network_mode = 'allowlist': provider container cannot keep to a list of hosts; "
                "use provider = 'local', or set sandbox.network yourself"
            )
        wanted["network"] = "bridge" if environment.network_mode == "public" else "none"
        wanted |= {"cpus": environment.cpus} if environment.cpus else {}
        wanted |= {"arguments": [f"--gpus={environment.gpus}"]} if environment.gpus else {}
        wanted |= {"workdir": str(place)} if place is not None else {}
    if sandbox.provider in ("local", "container") and environment.memory_mb:
        wanted["memory_mib"] = environment.memory_mb
    return evolve(sandbox, options=merge(wanted, sandbox.options))


def resolved(env: Mapping[str, Json], where: str) -> dict[str, str]:
    """``${VAR}`` and ``${VAR:-default}`` by this machine's environment; raises UserError for one that is not set."""
    found: dict[str, str] = {}
    for name, value in env.items():
        if not isinstance(value, str):
            raise UserError(f"{where}.{name} = {value!r} is no text")

        def one(match: re.Match[str], name: str = name) -> str:
            default = match.group(2)
            given = os.environ.get(match.group(1), default)
            if given is None:
                raise UserError(f"{where}.{name}: the environment variable {match.group(1)} is not set")
            return given

        found[name] = TEMPLATE.sub(one, value)
    return found


async def image(folder: TaskFolder, sandbox: SandboxConfig, providers: Providers) -> SandboxConfig:
    """The sandbox with its image: the one asked for, the folder's published one, or its Dockerfile, built (layers that
    are there are used again). Raises InfraError where the engine cannot."""
    environment = folder.config.environment
    if sandbox.provider == "local" or sandbox.image not in (None, environment.docker_image):
        return sandbox
    name = environment.docker_image
    if sandbox.provider != "container":
        if name is None:
            raise UserError(f"{folder.path}: provider {sandbox.provider} builds no image: give sandbox.image")
        return evolve(sandbox, image=name)
    program = find_program(providers.sandbox_options("container").get("program"))
    if name is None:
        assert folder.dockerfile is not None
        digest = await trio.to_thread.run_sync(_digest, folder.context)
        name = f"uniagent-harbor/{re.sub(r'[^a-z0-9.-]+', '-', folder.path.name.lower()).strip('-.')}:{digest}"
        words = ["build", "-q", "-t", name, str(folder.context)]
        await _engine(program, words, f"{folder.dockerfile}: cannot be built", environment.build_timeout_sec)
    if "workdir" not in sandbox.options:
        sandbox = evolve(sandbox, options={**sandbox.options, "workdir": await _image_workdir(program, name, folder)})
    return evolve(sandbox, image=name)


async def _image_workdir(program: str, name: str, folder: TaskFolder) -> str:
    """The WORKDIR that an image has, which is fetched where it is not there."""
    limit_s = folder.config.environment.build_timeout_sec
    words = ["image", "inspect", "--format", "{{.Config.WorkingDir}}", name]
    try:
        found = await _engine(program, words, name, limit_s)
    except InfraError:
        await _engine(program, ["pull", "-q", name], f"{folder.path}: environment.docker_image", limit_s)
        found = await _engine(program, words, name, limit_s)
    return found.strip() or "/"


async def _engine(program: str, words: list[str], what: str, timeout_s: float) -> str:
    with trio.move_on_after(timeout_s):
        done = await trio.run_process(
            [program, *words], capture_stdout=True, capture_stderr=True, check=False, stdin=b""
        )
        if done.returncode == 0:
            return done.stdout.decode(errors="replace")
        raise InfraError(f"{what}: {done.stderr.decode(errors='replace').strip()[-BUILD_LOG:]}")
    raise InfraError(f"{what}: {program} {words[0]} took longer than {timeout_s:g} s")


def _local_network(folder: TaskFolder) -> dict[str, Any]:
    """A public network would be this machine's own: a Task Config must say that."""
    environment = folder.config.environment
    if environment.network_mode != "allowlist":
        return {}
    for host in environment.allowed_hosts:
        if "/" in host:
            raise UserError(f"{folder.path / 'task.toml'}: environment.allowed_hosts: {host!r}: hosts by name alone")
    return {"network": "allowlist", "allow": list(environment.allowed_hosts)}


def _may_be_bound(place: PurePosixPath, image_folder: str) -> bool:
    """Whether a working directory can be the sandbox's own: it would hide what the image has there."""
    there = Path(image_folder, *place.parts[1:])
    return len(place.parts) > 1 and place.parts[1] not in TAKEN and not (there.is_dir() and any(there.iterdir()))


def _workdir_of(dockerfile: Path) -> str | None:
    """The last WORKDIR, joined; None where none is given or it hangs on a variable."""
    place: PurePosixPath | None = None
    for line in dockerfile.read_text(encoding="utf-8", errors="replace").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "WORKDIR":
            place = (place or PurePosixPath("/")) / rest.strip().strip("\"'")
        elif word.upper() == "FROM":
            place = None
    return None if place is None or "$" in str(place) else str(place)


def _digest(context: Path) -> str:
    """Of every file of a build context."""
    digest = hashlib.sha256()
    for path in sorted(context.rglob("*")):
        digest.update(str(path.relative_to(context)).encode() + b"\0")
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
