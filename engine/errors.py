"""Errors a user can act on. ``UserError`` ends a command with one line and exit status 2, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend. The message says what is wrong, where, and what to do."""


class InfraError(Exception):
    """Something outside the model and the agent failed: a sandbox did not start or was lost, a service is down. The
    session is left out of training (``Failure.INFRA``); it never counts as reward 0."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause naming what is allowed, the nearest first: ``did you mean 'x'? allowed: x, y``."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(names) or 'nothing'}"
