"""A sandbox whose shell answers from a script: what a tool makes of a result does not need a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath

import pytest

from uniagent.engine.ports import Completed


class ScriptedShell:
    """Gives the results in order and remembers what was asked."""

    def __init__(self, results: list[Completed]) -> None:
        self.results, self.asked = results, list[tuple[str, float]]()

    async def run(self, command: str, *, timeout_s: float) -> Completed:
        self.asked.append((command, timeout_s))
        return self.results.pop(0)


class ScriptedSandbox:
    workdir = PurePosixPath("/work")

    def __init__(self, *results: Completed) -> None:
        self.script = ScriptedShell(list(results))

    async def shell(self) -> ScriptedShell:
        return self.script


@pytest.fixture
def scripted() -> Callable[..., ScriptedSandbox]:
    return ScriptedSandbox
