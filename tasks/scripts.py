"""A script in a sandbox with its whole log, and trees to and from any of its paths. For tasks whose verifier is a
program. Knows no task.

A sandbox keeps only the head and the tail of a command's output, and its file methods may reach only some of its
directories; test logs are long, and tests want to lie where their authors put them.
"""

from __future__ import annotations

import io
import secrets
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import trio
from attrs import frozen

from uniagent.engine.errors import InfraError
from uniagent.engine.ports import Sandbox

LOG_LIMIT = 64 << 20  # bytes of one script's log
TREE_LIMIT = 256 << 20  # bytes of one tree, packed
FILES_S = 300.0
RUN = 'cat > "$1" && exec bash "$1" > "$1.log" 2>&1 < /dev/null'


@frozen
class Ran:
    """A script that ended. ``code`` is its exit status, None when it was stopped at its limit; ``log`` is stdout and
    stderr as they came."""

    code: int | None
    log: str
    duration_s: float


async def run_script(
    sandbox: Sandbox,
    script: str,
    *,
    timeout_s: float,
    cwd: PurePosixPath | None = None,
    env: Mapping[str, str] | None = None,
) -> Ran:
    """A bash script, from a file of its own that is gone afterwards. Raises InfraError or OSError where the sandbox
    fails."""
    path = f"/tmp/.uniagent-{secrets.token_hex(8)}"
    argv = ["bash", "-c", RUN, "bash", path]
    done = await sandbox.exec(argv, stdin=script.encode(), timeout_s=timeout_s, cwd=cwd, env=env)
    try:
        log = await sandbox.read(PurePosixPath(f"{path}.log"), limit=LOG_LIMIT)
    except FileNotFoundError as problem:
        said = done.errors.decode(errors="replace").strip()
        raise InfraError(f"a script did not start in the sandbox: {said or problem}") from problem
    await sandbox.exec(["rm", "-f", path, f"{path}.log"], timeout_s=FILES_S)
    return Ran(done.code, log.decode(errors="replace"), done.duration_s)


async def checked(sandbox: Sandbox, argv: Sequence[str], what: str, *, stdin: bytes = b"", timeout_s: float) -> str:
    """What a command of ours prints; raises InfraError that begins with ``what`` when it does not succeed."""
    done = await sandbox.exec(argv, stdin=stdin, timeout_s=timeout_s)
    if done.code != 0:
        said = (done.errors or done.output).decode(errors="replace").strip()[-500:]
        state = "took too long" if done.timed_out else f"exit status {done.code}"
        raise InfraError(f"{what}: {state}{': ' if said else ''}{said}")
    return done.output.decode(errors="replace")


async def put_tree(sandbox: Sandbox, source: Path, target: PurePosixPath) -> None:
    """A folder's content into target, which is made; what is there already stays. Executable bits are kept, links
    inside the folder too."""
    await unpack(sandbox, await trio.to_thread.run_sync(packed, source), target)


async def unpack(sandbox: Sandbox, archive: bytes, target: PurePosixPath) -> None:
    """A tar archive, compressed or not, into a directory."""
    path = f"/tmp/.uniagent-{secrets.token_hex(8)}"
    script = 'cat > "$1" && mkdir -p -- "$2" && tar -xf "$1" --no-same-owner -C "$2"; code=$?; rm -f "$1"; exit $code'
    argv = ["bash", "-c", script, "bash", path, str(target)]
    await checked(sandbox, argv, f"cannot put files into {target}", stdin=archive, timeout_s=FILES_S)


async def pack(sandbox: Sandbox, root: PurePosixPath, names: Sequence[str]) -> bytes:
    """A tar archive of those names below root; raises InfraError when one is missing."""
    path = f"/tmp/.uniagent-{secrets.token_hex(8)}"
    argv = ["tar", "-czf", path, "-C", str(root), "--", *names]
    await checked(sandbox, argv, f"cannot read {', '.join(names)} in {root}", timeout_s=FILES_S)
    archive = await sandbox.read(PurePosixPath(path), limit=TREE_LIMIT)
    await sandbox.exec(["rm", "-f", path], timeout_s=FILES_S)
    return archive


def packed(source: Path) -> bytes:
    """A tar archive of a folder's content, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(source.rglob("*")):
            tar.add(path, str(path.relative_to(source)), recursive=False, filter=_by_root)
    return buffer.getvalue()


def _by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
