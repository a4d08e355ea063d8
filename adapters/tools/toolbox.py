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
from typing import Protocol, cast

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


class ToolServer(Protocol):
    """Where tools come from that are known only once it runs."""

    async def __aenter__(self) -> Sequence[Tool]: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class SandboxToolbox:
    """``engine.ports.Toolbox``; an async context manager. A part with ``__aenter__`` is entered and left with it; one
    without a schema is a server, whose ``__aenter__`` gives its tools."""

    def __init__(self, parts: Sequence[Tool | ToolServer]) -> None:
        """Raises UserError when two tools show the model the same name."""
        self.parts = parts
        self.tools: dict[str, Tool] = {}
        self._stack = AsyncExitStack()
        for part in parts:
            if hasattr(part, "schema"):
                self._add(cast(Tool, part))

    def _add(self, tool: Tool) -> None:
        name = tool.schema.name
        if name in self.tools:
            raise UserError(f"agent.tools: two tools are shown as {name!r}; set `as` on one of them")
        self.tools[name] = tool

    async def __aenter__(self) -> SandboxToolbox:
        async with AsyncExitStack() as opening:
            for part in self.parts:
                if hasattr(part, "__aenter__"):
                    given = await opening.enter_async_context(cast(ToolServer, part))
                    for tool in () if hasattr(part, "schema") else given:
                        self._add(tool)
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
