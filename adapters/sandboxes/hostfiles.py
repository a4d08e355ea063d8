"""Reading and writing below a host directory that an agent also writes to.

Every step of a path is opened relative to the one before and never through a symbolic link, so nothing an agent
plants can lead out of the directory. Blocking calls on local files: callers bound how much they do at a time.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
LARGEST = 8 << 20  # bytes of one file that ``tree`` gives; a larger one is described

KINDS = {
    stat.S_IFLNK: b"<symlink>",
    stat.S_IFIFO: b"<fifo>",
    stat.S_IFSOCK: b"<socket>",
    stat.S_IFCHR: b"<device>",
    stat.S_IFBLK: b"<device>",
}


@contextmanager
def directory(root: str, parts: tuple[str, ...], *, create: bool = False) -> Iterator[int]:
    """A descriptor of root/parts; raises OSError (ELOOP or ENOTDIR at a link)."""
    here = os.open(root, DIRECTORY)
    try:
        for part in parts:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=here)
            below = os.open(part, DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


def _regular(fd: int, path: object) -> int:
    """Size of an open regular file; raises OSError for anything else."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status.st_size


def _read_all(fd: int, limit: int) -> bytes:
    pieces: list[bytes] = []
    while limit > 0 and (piece := os.read(fd, min(limit, 1 << 20))):
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)


def read(root: str, path: PurePosixPath, limit: int) -> bytes:
    """At most ``limit`` bytes of a regular file."""
    with directory(root, path.parts[:-1]) as parent:
        fd = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        try:
            _regular(fd, path)
            return _read_all(fd, limit)
        finally:
            os.close(fd)


def write(root: str, path: PurePosixPath, data: bytes, mode: int = 0o644) -> None:
    """Make the file, and the directories above it."""
    with directory(root, path.parts[:-1], create=True) as parent:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path.name, flags, mode, dir_fd=parent)
        try:
            _regular(fd, path)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)


def make_directory(root: str, path: PurePosixPath) -> None:
    with directory(root, path.parts, create=True):
        pass


def tree(root: str, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, bytes]]:
    """(path relative to root/path, content) of everything below that is not a directory; links and special files have
    their kind as content, files above ``LARGEST`` their size, what may not be read ``b"<unreadable>"``."""
    with directory(root, path.parts) as fd:
        yield from _walk(fd, PurePosixPath())


def _walk(here: int, prefix: PurePosixPath) -> Iterator[tuple[PurePosixPath, bytes]]:
    with os.scandir(here) as entries:
        found = sorted(entries, key=lambda e: e.name)
    for entry in found:
        name = prefix / entry.name
        mode = entry.stat(follow_symlinks=False).st_mode
        try:
            if stat.S_ISDIR(mode):
                below = os.open(entry.name, DIRECTORY, dir_fd=here)
                try:
                    yield from _walk(below, name)
                finally:
                    os.close(below)
            elif stat.S_ISREG(mode):
                yield name, _content(entry.name, here)
            else:
                yield name, KINDS.get(stat.S_IFMT(mode), b"<special>")
        except PermissionError:
            yield name, b"<unreadable>"


def _content(name: str, parent: int) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    try:
        size = _regular(fd, name)
        return _read_all(fd, LARGEST) if size <= LARGEST else b"<%d bytes>" % size
    finally:
        os.close(fd)


def copy_in(source: Path, root: str, target: PurePosixPath) -> None:
    """Copy a host file or tree below root; links inside the source are followed only when they are the source."""
    if source.is_dir():
        make_directory(root, target)
        for entry in sorted(source.iterdir()):
            if not entry.is_symlink():
                copy_in(entry, root, target / entry.name)
    else:
        write(root, target, source.read_bytes(), stat.S_IMODE(source.stat().st_mode))


def copy_out(root: str, source: PurePosixPath, target: Path) -> None:
    """Copy a regular file or a tree out to the host; links and special files are left behind."""
    with directory(root, source.parts[:-1]) as parent:
        mode = os.stat(source.name or ".", dir_fd=parent, follow_symlinks=False).st_mode
    if not stat.S_ISDIR(mode):
        target.write_bytes(read(root, source, limit=1 << 62))
        target.chmod(stat.S_IMODE(mode) & 0o755 | 0o600)
        return
    target.mkdir(parents=True, exist_ok=True)
    with directory(root, source.parts) as here, os.scandir(here) as entries:
        names = [e.name for e in entries if e.is_dir(follow_symlinks=False) or e.is_file(follow_symlinks=False)]
    for name in names:
        copy_out(root, source / name, target / name)


def remove(path: str) -> None:
    """Remove a tree, whatever permissions an agent left on it; missing is fine."""
    import shutil

    def unlock(function: object, name: str, _: object) -> None:
        # a directory without write permission: the owner may give it back
        os.chmod(os.path.dirname(name), 0o700)
        if not os.path.islink(name):
            with suppress(OSError):
                os.chmod(name, 0o700)
        if function in (os.open, os.scandir, os.lstat) or (os.path.isdir(name) and not os.path.islink(name)):
            shutil.rmtree(name, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(name)

    if os.path.lexists(path):
        shutil.rmtree(path, onerror=unlock)
