"""What stands where in a sandbox, before the agent and after it.

Runs ``scan_program`` inside with the interpreter found before the agent acted, isolated from its environment, user
packages and start-up files. Knows no rule. Needs python3 inside.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from attrs import frozen

from uniagent.engine.errors import InfraError
from uniagent.engine.ports import Completed, Sandbox

PROGRAM = Path(__file__).with_name("scan_program.py")
CLEAN = ("/usr/bin/env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8")
TIMEOUT_S = 300.0
LARGEST = 256 << 20  # bytes of one scan


@frozen
class Entry:
    """``digest`` is the sha256 of a file (empty where it was not read) or the target of a link; times in ns."""

    kind: str
    mode: int
    size: int
    mtime: int
    ctime: int
    digest: str


@frozen
class Snapshot:
    """``taken`` is the sandbox's clock at the scan, in ns: files changed later have a later ``ctime``."""

    files: Mapping[str, Entry]
    site: tuple[str, ...]
    path: tuple[str, ...]
    processes: tuple[str, ...]
    bytecode: Mapping[str, str]
    taken: int

    def below(self, root: PurePosixPath | str) -> dict[str, Entry]:
        """By path relative to ``root``."""
        start = f"{str(root).rstrip('/')}/"
        return {path[len(start) :]: entry for path, entry in self.files.items() if path.startswith(start)}


async def run(sandbox: Sandbox, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Completed:
    """A program of the system's own, whatever stands in the PATH of the sandbox or in its environment."""
    return await sandbox.exec([*CLEAN, *argv], stdin=stdin, timeout_s=timeout_s)


async def interpreter(sandbox: Sandbox) -> str:
    """Absolute path of the sandbox's python3. Raises InfraError where there is none."""
    done = await sandbox.exec(["python3", "-I", "-c", "import sys; print(sys.executable)"], timeout_s=60)
    if done.code != 0:
        raise InfraError("the leak guard needs python3 in the sandbox, and there is none that runs")
    return done.output.decode().strip()


async def scan(
    sandbox: Sandbox,
    python: str,
    deep: Iterable[str],
    *,
    site: Sequence[str] = (),
    path: Sequence[str] = (),
    keep: Iterable[str] = (),
) -> Snapshot:
    """Everything below ``deep`` but ``keep``, and one level of the package directories and of PATH. ``site``, ``path``:
    what an earlier scan said; the interpreter then loads no package directory itself. Raises InfraError."""
    out = sandbox.workdir / f".scan-{secrets.token_hex(8)}"
    asked = {"deep": list(deep), "flat": [*site, *path], "keep": [*keep, str(out)], "out": str(out)}
    argv = [python, "-I", *(["-S"] if site else []), "-c", PROGRAM.read_text()]
    # the first scan wants to know the PATH and the HOME that an agent has
    words = [*CLEAN, *argv] if site else argv
    done = await sandbox.exec(words, stdin=json.dumps(asked).encode(), timeout_s=TIMEOUT_S)
    if done.code != 0:
        said = done.errors.decode(errors="replace").strip()
        raise InfraError(f"the sandbox could not be scanned: {said[-500:] or done.code}")
    answer = json.loads(await sandbox.read(out, limit=LARGEST))
    await run(sandbox, ["rm", "-f", "--", str(out)])
    return Snapshot(
        files={path: Entry(*row) for path, row in answer["files"].items()},
        site=tuple(answer["site"]),
        path=tuple(path or answer["path"]),
        processes=tuple(answer["processes"]),
        bytecode=answer["bytecode"],
        taken=answer["taken"],
    )
