"""Async tests run under trio; one that asks for ``autojump_clock`` runs on the virtual clock."""

from __future__ import annotations

import functools
import inspect
import subprocess

import hypothesis
import pytest
import trio
import trio.testing

# a busy machine is no failure
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    wanted = inspect.signature(test).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted}
    clock = next((a for a in arguments.values() if isinstance(a, trio.testing.MockClock)), None)
    trio.run(functools.partial(test, **arguments), clock=clock)
    return True


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    import sys

    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@functools.cache
def _bwrap_problem() -> str | None:
    """Why bubblewrap does not work on this machine; asked once."""
    from uniagent.adapters.sandboxes.bwrap import find_bwrap
    from uniagent.engine.errors import UserError

    try:
        argv = [find_bwrap(), "--ro-bind", "/", "/", "--unshare-all", "true"]
    except UserError as problem:
        return str(problem)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    return done.stderr.strip() if done.returncode else None


@pytest.fixture
def confined() -> None:
    """The test needs bubblewrap."""
    if problem := _bwrap_problem():
        pytest.skip(f"bubblewrap does not work here: {problem}")


@pytest.fixture(params=["bwrap", "none"])
def isolation(request: pytest.FixtureRequest) -> str:
    """Both isolations of the local sandbox."""
    if request.param == "bwrap":
        request.getfixturevalue("confined")
    return str(request.param)
