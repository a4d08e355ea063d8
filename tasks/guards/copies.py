"""Copies of a task's own distribution: installed packages, wheels, archives, caches.

A copy that was there before the agent acted may hold the fix, so it is taken away and replaced by a decoy that carries
a token; the token in the agent's work tells that it looked. A copy that came later is a leak unless it is one that the
egress proxy let through. Knows no registry.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath

from uniagent.engine.errors import InfraError
from uniagent.engine.ports import Sandbox
from uniagent.tasks.guards.origin import Origin, normal
from uniagent.tasks.guards.scan import Entry, run

SUFFIXES = r"\.(whl|tar\.gz|tgz|zip|tar\.bz2|tar\.xz|conda|egg|gem|crate)"
ARCHIVE = re.compile(r"^(?P<name>.+?)-v?(?P<version>\d[^-]*?)(-.*)?" + SUFFIXES + "$")
INFO = re.compile(r"^(?P<name>.+?)-(?P<version>[^-]+?)(-py[\d.]+)?\.(dist-info|egg-info)$")
PLACES = ("site-packages", "dist-packages", "node_modules")
CACHES = ("http", "http-v2", "_cacache", "wheels", "selfcheck")
SEARCH = r"""
for root in "$@"; do
  [ -d "$root" ] && find "$root" -xdev \( {names} \) -not -path {work}/'*' -print 2>/dev/null
done
:
"""


def version_of(path: str, origin: Origin) -> str | None:
    """The version of a copy of the origin's distribution, judged by a path's last part: an archive, an installed
    package's metadata, or the package itself (version ""); None: it is none."""
    place = PurePosixPath(path)
    for pattern in (ARCHIVE, INFO):
        if (match := pattern.match(place.name)) and normal(match["name"]) in origin.names:
            return match["version"]
    installed = place.parent.name in PLACES
    if installed and (place.name.removesuffix(".py") in origin.packages or normal(place.name) in origin.names):
        return ""
    return None


def copies(files: Mapping[str, Entry], origin: Origin, root: PurePosixPath) -> Iterator[tuple[str, str]]:
    """(path, version) of every copy among the files, the repository's own metadata (egg-info at its root) apart."""
    for path in sorted(files):
        version = version_of(path, origin)
        own = path.endswith((".egg-info", ".dist-info")) and PurePosixPath(path).parent in (root, root / "src")
        if version is not None and not own:
            yield path, version


async def find(sandbox: Sandbox, origin: Origin, root: PurePosixPath, places: Collection[str]) -> list[str]:
    """Copies in the places (directories, with all below) that lie outside the repository."""
    names = {n.replace("-", "[-_.]") for n in origin.names}
    patterns = [f"-iname {shlex.quote(n + '-[0-9v]*')}" for n in sorted(names)]
    patterns += [f"-path {shlex.quote(f'*/{place}/{package}')} -o -path {shlex.quote(f'*/{place}/{package}.py')}"
                 for place in PLACES for package in sorted({*origin.packages, *names})]  # fmt: skip
    if not patterns:
        return []
    script = SEARCH.format(names=" -o ".join(patterns), work=shlex.quote(str(root)))
    done = await sandbox.exec(["sh", "-c", script, "find", *places], timeout_s=300)
    found = done.output.decode(errors="replace").splitlines()
    return [path for path in found if version_of(path, origin) is not None]


async def take_away(sandbox: Sandbox, paths: Collection[str], token: str) -> tuple[list[str], list[str]]:
    """Replace copies by decoys that carry the token; gives the decoys, and the copies that cannot be removed."""
    decoys, left = [], []
    for path in paths:
        metadata = bool(INFO.match(PurePosixPath(path).name))  # leaves no decoy: installers would stumble over it
        plain = path.endswith(".py") or version_like(path)
        decoy = path if plain else f"{path}/__init__.py"
        script = 'rm -rf -- "$1" || exit 1; [ "$3" = 0 ] || { mkdir -p -- "$(dirname -- "$2")" && cat > "$2"; }'
        text = f'raise ImportError("this copy was taken away before the task began")  # {token}\n'.encode()
        argv = ["sh", "-c", script, "sh", path, decoy, "0" if metadata else "1"]
        if (await sandbox.exec(argv, stdin=text, timeout_s=60)).code != 0:
            left.append(path)
        elif not metadata:
            decoys.append(decoy)
    return decoys, left


async def arm(sandbox: Sandbox, decoys: Collection[str]) -> None:
    """Date the decoys' last reading long ago, so that the next one shows (where the file system keeps such dates)."""
    if decoys:
        await sandbox.exec(["touch", "-a", "-d", "@0", "--", *decoys], timeout_s=60)


async def disturbed(sandbox: Sandbox, decoys: Collection[str]) -> list[str]:
    """Decoys that were read or are gone since they were armed. To be asked before anything of ours reads them."""
    if not decoys:
        return []
    done = await run(sandbox, ["stat", "-c", "%X %n", "--", *decoys])
    untouched = {line[2:] for line in done.output.decode(errors="replace").splitlines() if line.startswith("0 ")}
    return [decoy for decoy in decoys if decoy not in untouched]


def version_like(path: str) -> bool:
    """Whether it is an archive."""
    return bool(ARCHIVE.match(PurePosixPath(path).name))


async def empty_caches(sandbox: Sandbox) -> None:
    """Forget what installers downloaded before the agent acted: files there do not say what they are. Raises
    InfraError."""
    script = "cd && rm -rf -- .cache/pip .cache/uv .cache/pypoetry .cache/yarn .npm"
    if (await sandbox.exec(["sh", "-c", script], timeout_s=120)).code != 0:
        raise InfraError("the installers' caches in the home directory could not be emptied")
