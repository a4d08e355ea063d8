"""From an exception, however nested, to the sentence a command ends with.

A UserError anywhere among the causes wins; a full disk is one too. Anything else is a crash: its full traceback goes
to a file and the sentence names the innermost cause, its place in the code and that file.
"""

from __future__ import annotations

import contextlib
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from uniagent.engine.errors import UserError
from uniagent.engine.storage import FULL, refused

_FULL_TEXT = ("No space left on device", "os error 28", "Disk quota exceeded")  # as libraries without errno say it


class Crash(Exception):
    """A command died of something the user cannot be blamed for. The message is one readable line."""


@contextlib.contextmanager
def guard(file: Path | None = None) -> Iterator[None]:
    """Let UserError, Crash, KeyboardInterrupt and SystemExit through, each bare of exception groups, and turn any other
    exception into a Crash whose traceback is in ``file`` (None: in the temporary folder)."""
    try:
        yield
    except (UserError, Crash, SystemExit, KeyboardInterrupt, BrokenPipeError):
        raise
    except BaseException as problem:
        leaves = list(innermost(problem))
        for leaf in leaves:
            if isinstance(leaf, KeyboardInterrupt | SystemExit | Crash):
                raise leaf from problem
        mistakes = [str(leaf) for leaf in leaves if isinstance(leaf, UserError)] or list(
            filter(None, map(_full, leaves))
        )
        if mistakes:
            raise UserError("\n".join(dict.fromkeys(mistakes))) from problem
        raise Crash(_sentence(leaves[0], _write(problem, file))) from problem


def innermost(problem: BaseException) -> Iterator[BaseException]:
    """The exceptions inside nested groups, in order; the exception itself when it is no group."""
    if isinstance(problem, BaseExceptionGroup):
        for inner in problem.exceptions:
            yield from innermost(inner)
    else:
        yield problem


def _full(problem: BaseException) -> str | None:
    """The sentence for a full disk, whoever noticed it; None for anything else."""
    if isinstance(problem, OSError) and problem.errno in FULL:
        return str(refused(problem.filename or "the run folder", problem.errno))
    if any(text in str(problem) for text in _FULL_TEXT):
        return str(refused("the run folder", next(iter(FULL))))
    return None


def _sentence(problem: BaseException, file: Path | None) -> str:
    kind = type(problem).__name__
    message = str(problem).strip().split("\n")[0]
    frames = traceback.extract_tb(problem.__traceback__)
    ours = [f for f in frames if Path(f.filename).is_relative_to(Path(__file__).parent.parent)]
    place = ""
    if frames:
        at = (ours or frames)[-1]
        place = f", at {_short(Path(at.filename))}:{at.lineno} in {at.name}"
    where = f"; the full traceback is in {file}" if file else ""
    return f"crashed: {kind}{': ' + message if message else ''}{place}{where}"


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _write(problem: BaseException, file: Path | None) -> Path | None:
    """Keep the traceback; None when even that cannot be written."""
    text = "".join(traceback.format_exception(problem))
    for target in (file, Path(tempfile.gettempdir()) / "uniagent-crash.txt"):
        if target is not None:
            with contextlib.suppress(OSError):
                target.write_text(text)
                return target
    return None
