"""Whether bubblewrap works on this machine, asked once."""

from __future__ import annotations

import functools
import subprocess

import pytest

from uniagent.adapters.sandboxes.bwrap import find_bwrap
from uniagent.engine.errors import UserError


@functools.cache
def _bwrap_problem() -> str | None:
    try:
        argv = [find_bwrap(), "--ro-bind", "/", "/", "--unshare-all", "true"]
    except UserError as problem:
        return str(problem)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    return done.stderr.strip() if done.returncode else None


@pytest.fixture(params=["bwrap", "none"])
def isolation(request: pytest.FixtureRequest) -> str:
    if request.param == "bwrap" and (problem := _bwrap_problem()):
        pytest.skip(f"bubblewrap does not work here: {problem}")
    return str(request.param)


@pytest.fixture
def confined() -> None:
    if problem := _bwrap_problem():
        pytest.skip(f"bubblewrap does not work here: {problem}")
