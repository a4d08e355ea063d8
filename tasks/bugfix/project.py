"""A Python project whose code gets bugs: where it comes from, and what is in it.

A source is a folder, a git repository (a URL or a bare path ending in .git, ``#ref`` for a commit) or a requirement
such as ``boltons==26.2.0``, whose source distribution pip fetches. Fetched projects and what runs their tests lie in a
cache, ``UNIAGENT_CACHE`` or ``~/.cache/uniagent``; they are fetched once. Compiled files and version control never
come along: both would hold the fix. Blocking; knows no sandbox.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from attrs import field, frozen

from uniagent.engine.errors import UserError

COMPLETE = ".complete"  # stands in a cached folder once all of it is there
LEFT_OUT = (".git", ".hg", ".svn", "__pycache__", ".tox", ".nox", ".venv", "venv", "build", "dist", ".eggs")
COMPILED = (".pyc", ".pyo", ".so", ".pyd")
REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[^]]*\])?==[A-Za-z0-9.!+_-]+$")
TEST_FILE = re.compile(r"(^|/)(tests?/|testing/|test_[^/]*\.py$|[^/]*_test\.py$|conftest\.py$)")
BESIDE = re.compile(r"(setup\.py|docs?/|examples?/|scripts?/|tools/|bench|tasks\.py)")  # no part of what is shipped
FETCH_S = 600.0


@frozen
class Project:
    """``source`` as above; ``requires`` are packages that its tests need beside pytest."""

    source: str
    requires: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For ids: letters, digits and dashes."""
        stem = re.split(r"[\[=]", self.source)[0] if REQUIREMENT.match(self.source) else _stem(self.source)
        return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")


@frozen
class Files:
    """The project's files by path relative to its root, and the folder they are in."""

    root: Path
    texts: Mapping[str, bytes] = field(repr=False)

    @property
    def sources(self) -> list[str]:
        """Python files that are no tests, in packages or beside them."""
        own = (path for path in self.texts if path.endswith(".py") and not is_test(path))
        return sorted(path for path in own if not BESIDE.match(path))

    @property
    def tests(self) -> list[str]:
        """Files that pytest would collect by name."""
        named = re.compile(r"(^|/)(test_[^/]*|[^/]*_test)\.py$")
        return sorted(p for p in self.texts if named.search(p))

    @property
    def packages(self) -> tuple[str, ...]:
        """Top-level import names."""
        tops = {PurePosixPath(p.removeprefix("src/")).parts[0].removesuffix(".py") for p in self.sources}
        return tuple(sorted(tops))


def is_test(path: str) -> bool:
    return bool(TEST_FILE.search(path))


def cache() -> Path:
    return Path(os.environ.get("UNIAGENT_CACHE") or Path.home() / ".cache" / "uniagent")


def files_of(project: Project) -> Files:
    """The project, fetched if it is not in the cache yet. Raises UserError."""
    root = _fetched(project.source)
    texts = {}
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(d for d in inner if d not in LEFT_OUT and not d.endswith(".egg-info"))
        for name in sorted(set(names) - {COMPLETE}):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink() and not name.endswith(COMPILED):
                texts[path.relative_to(root).as_posix()] = path.read_bytes()
    found = Files(root, texts)
    if not found.sources:
        raise UserError(f"{project.source}: there is no Python file but tests in it")
    return found


def _fetched(source: str) -> Path:
    if REQUIREMENT.match(source):
        return _once(cache() / "bugfix" / "projects" / source, lambda target: _sdist(source, target))
    repository, _, ref = source.partition("#")
    if "://" in repository or repository.endswith(".git"):
        key = hashlib.sha256(source.encode()).hexdigest()[:16]
        return _once(cache() / "bugfix" / "projects" / key, lambda target: _clone(repository, ref, target))
    if Path(source).is_dir():
        return Path(source).resolve()
    raise UserError(
        f"{source!r} is no project: name a folder, a git repository (URL, or a path ending in .git), or a version of a "
        "package, such as boltons==26.2.0"
    )


def runtime(requires: Sequence[str]) -> Path:
    """Where pytest and ``requires`` lie, or will: a folder for the module path, without the project itself."""
    key = hashlib.sha256("\n".join([sys.version.split()[0], *sorted(requires)]).encode()).hexdigest()[:16]
    return cache() / "bugfix" / "runtimes" / key


def make_runtime(requires: Sequence[str]) -> Path:
    """The same, filled. Raises UserError when pip cannot."""

    def install(target: Path) -> None:
        _call([sys.executable, "-m", "pip", "install", "-q", "--target", str(target), "pytest>=8,<10", *requires])

    return _once(runtime(requires), install)


def _once(place: Path, make: Callable[[Path], None]) -> Path:
    """``place``, made by ``make(empty folder)`` if it is not there; many processes may ask at once."""
    if not (place / COMPLETE).exists():
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            fresh = Path(scratch, "made")
            fresh.mkdir()
            make(fresh)
            for one in fresh.iterdir():
                if not (place / one.name).exists():
                    shutil.move(str(one), place / one.name)
        (place / COMPLETE).touch()
    return place


def _sdist(requirement: str, target: Path) -> None:
    name = requirement.partition("==")[0].partition("[")[0]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", name, "-d", folder]
        _call([*command, requirement])
        archive = next(Path(folder).iterdir())
        if archive.suffix == ".zip":
            zipfile.ZipFile(archive).extractall(target)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(target, filter="data")
    _lift(target)


def _lift(target: Path) -> None:
    """The one folder inside becomes the target itself."""
    (inner,) = list(target.iterdir())
    inner = inner.rename(target / ".inner")
    for one in list(inner.iterdir()):
        one.rename(target / one.name)
    inner.rmdir()


def _clone(repository: str, ref: str, target: Path) -> None:
    _call(["git", "clone", "-q", repository, str(target)])
    if ref:
        _call(["git", "-C", str(target), "checkout", "-q", ref])
    shutil.rmtree(target / ".git")


def _call(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise UserError(f"{command[0]}: {problem}") from None
    if done.returncode:
        raise UserError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()[-500:]}")


def _stem(source: str) -> str:
    return Path(source.partition("#")[0].rstrip("/")).name.removesuffix(".git")
