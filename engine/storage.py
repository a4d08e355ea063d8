"""Files that stay usable when the disk fills up or the process dies.

Invariants: a line file holds whole lines only, save a torn last one after a kill, which reading passes over and the
next opening cuts off; ``write_atomic`` leaves the old content or the new, never a part; JSON is plain JSON (a number
that is not finite becomes null). What the operating system refuses becomes a UserError that names the file and what to
do. Blocking: call it from a worker thread for anything large.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from uniagent.engine.errors import UserError

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your disk quota is used up",
}
_REFUSED = {
    errno.EROFS: "the file system is read-only; choose another folder with --run-dir",
    errno.EACCES: "permission denied; choose another folder with --run-dir",
    errno.EPERM: "permission denied; choose another folder with --run-dir",
}


def refused(path: Path | str, number: int | None) -> UserError:
    """The sentence for a write that the system refused with this errno."""
    if number in FULL:
        return UserError(
            f"cannot write {path}: {FULL[number]}; free some space or choose another folder with --run-dir. "
            "What was written before is whole and can be read"
        )
    return UserError(f"cannot write {path}: {_REFUSED.get(number or 0, os.strerror(number or errno.EIO))}")


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn an OSError of the block into a UserError that names the path."""
    try:
        yield
    except OSError as problem:
        raise refused(path, problem.errno) from problem


def write_atomic(path: Path, text: str) -> None:
    """Replace a file as a whole, through a neighbour that is renamed over it."""
    part = path.with_name(path.name + ".part")
    with writing(path):
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def plain(value: Any) -> Any:
    """Any value as plain JSON: arrays and tuples are lists, a number that is not finite is null, what JSON cannot hold
    is its text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "tolist"):  # numpy, torch
        return plain(value.tolist())
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


class LineFile:
    """An append-only file of lines, open for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._fd, _whole(self._fd))

    def append(self, lines: Iterable[bytes]) -> None:
        """Write lines, each ending in a newline. When one does not fit, those before it stay and it leaves no trace."""
        with writing(self.path):
            for line in lines:
                end = os.fstat(self._fd).st_size
                try:
                    rest = memoryview(line)
                    while rest:
                        rest = rest[os.write(self._fd, rest) :]
                except OSError:
                    os.ftruncate(self._fd, end)
                    raise

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with writing(self.path):
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, without their newlines; a torn last line is passed over. Raises UserError without a file."""
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line[:-1]
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror}") from problem


def parse_line(path: Path, number: int, line: bytes) -> Any:
    """One line as JSON; raises UserError with the line's number (from 1)."""
    try:
        return json.loads(line)
    except ValueError as problem:
        raise UserError(f"{path}:{number}: not a JSON line ({problem}); the file was changed by hand?") from None


def _whole(fd: int) -> int:
    """Length of the file up to its last newline."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - 65536)
        last = os.pread(fd, end - start, start).rfind(b"\n")
        if last >= 0:
            return start + last + 1
        end = start
    return 0
