"""The tools of one session: built from config, called by name, their mistakes told as observations.

Invariants: a call always gives an observation unless the sandbox itself failed (InfraError) or it was cancelled; what
a tool opened is closed with the toolbox. ``Observation.problem`` names what was wrong: ``unknown_tool``,
``malformed_call`` (arguments that are no JSON object or do not fit the schema), ``timeout``, ``tool_error``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Protocol

from uniagent.adapters.tools.schema import problems
from uniagent.engine.errors import UserError, nearest
from uniagent.engine.ports import Json, Observation, Sandbox, Tool, ToolSchema
from uniagent.engine.registry import load


class ToolSettings(Protocol):
    """An entry of ``agent.tools``: the tool's registry name, and its own keys."""

    @property
    def name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Json]: ...


class SandboxToolbox:
    """``engine.ports.Toolbox``; an async context manager. A tool with ``__aenter__`` is entered and left with it."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        """Raises UserError when two tools show the model the same name."""
        self.tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.schema.name in self.tools:
                raise UserError(f"agent.tools: two tools are shown as {tool.schema.name!r}; set `as` on one of them")
            self.tools[tool.schema.name] = tool
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> SandboxToolbox:
        async with AsyncExitStack() as opening:
            for tool in self.tools.values():
                if hasattr(tool, "__aenter__"):
                    await opening.enter_async_context(tool)  # type: ignore[arg-type]
            self._stack = opening.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, problem, trace)

    def schemas(self) -> Sequence[ToolSchema]:
        return [tool.schema for tool in self.tools.values()]

    async def call(self, name: str, arguments: str | Mapping[str, Json]) -> Observation:
        """Run one call. ``arguments`` is JSON text as sampled, or the object it stands for."""
        tool = self.tools.get(name)
        if tool is None:
            return Observation(f"there is no tool {name!r}; {nearest(name, self.tools)}", problem="unknown_tool")
        try:
            value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except ValueError as problem:
            return Observation(f"the arguments of {name} are not valid JSON: {problem}", problem="malformed_call")
        if wrong := "; ".join(problems(value, tool.schema.parameters)):
            return Observation(f"the arguments of {name} are wrong: {wrong}", problem="malformed_call")
        try:
            return await tool(value)
        except OSError as problem:  # what tools do to files may fail; the model is told
            return Observation(f"{name} failed: {problem}", problem="tool_error")


def build_toolbox(settings: Iterable[ToolSettings], sandbox: Sandbox) -> SandboxToolbox:
    """The configured tools on a sandbox. Raises UserError for an unknown tool or key."""
    return SandboxToolbox([load("tools", s.name)(sandbox, s.options) for s in settings])
