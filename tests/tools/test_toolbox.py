"""A call always gives an observation, and what was wrong with it has a name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from attrs import field, frozen

from uniagent.adapters.tools.toolbox import SandboxToolbox, build_toolbox
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import Completed, Json, Observation, ToolSchema


@frozen
class Setting:
    name: str
    options: Mapping[str, Json] = field(factory=dict)


class Recorder:
    """A tool with state of its own."""

    def __init__(self, name: str, log: list[str], problem: Exception | None = None) -> None:
        parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        self.schema = ToolSchema(name, "", parameters)
        self.log, self.problem = log, problem

    async def __aenter__(self) -> None:
        self.log.append(f"open {self.schema.name}")

    async def __aexit__(self, *_: object) -> None:
        self.log.append(f"close {self.schema.name}")

    async def __call__(self, arguments: Mapping[str, Json]) -> Observation:
        if self.problem:
            raise self.problem
        return Observation(f"ran {arguments['n']}")


@pytest.mark.parametrize(
    ("name", "arguments", "problem", "text"),
    [
        ("count", '{"n": 3}', None, "ran 3"),
        ("count", {"n": 3}, None, "ran 3"),
        ("cuont", '{"n": 3}', "unknown_tool", "there is no tool 'cuont'; did you mean 'count'? allowed: count"),
        ("count", '{"n": ', "malformed_call", "the arguments of count are not valid JSON: "),
        ("count", "[1]", "malformed_call", "the arguments of count are wrong: arguments must be object, not array"),
        ("count", "{}", "malformed_call", "the arguments of count are wrong: n is missing"),
        ("count", "", "malformed_call", "the arguments of count are wrong: n is missing"),
        ("count", '{"n": "3"}', "malformed_call", "the arguments of count are wrong: n must be integer, not string"),
    ],
)
async def test_calls(name: str, arguments: Any, problem: str | None, text: str) -> None:
    async with SandboxToolbox([Recorder("count", [])]) as toolbox:
        seen = await toolbox.call(name, arguments)
    assert seen.problem == problem
    assert seen.text.startswith(text)


async def test_a_tools_own_trouble_is_told_to_the_model() -> None:
    toolbox = SandboxToolbox([Recorder("count", [], FileNotFoundError(2, "No such file", "x"))])
    seen = await toolbox.call("count", {"n": 1})
    assert seen.problem == "tool_error"
    assert "No such file" in seen.text


async def test_a_lost_sandbox_is_not_the_models_fault() -> None:
    toolbox = SandboxToolbox([Recorder("count", [], InfraError("gone"))])
    with pytest.raises(InfraError):
        await toolbox.call("count", {"n": 1})


async def test_tools_are_opened_and_closed_with_the_box() -> None:
    log: list[str] = []
    with pytest.raises(RuntimeError):
        async with SandboxToolbox([Recorder("a", log), Recorder("b", log)]):
            raise RuntimeError
    assert log == ["open a", "open b", "close b", "close a"]


async def test_built_from_config(scripted: Callable[..., Any]) -> None:
    settings = [Setting("stateful_shell", {"as": "shell"}), Setting("submit")]
    async with build_toolbox(settings, scripted(Completed(0, b"out"))) as toolbox:
        assert [schema.name for schema in toolbox.schemas()] == ["shell", "submit"]
        assert (await toolbox.call("shell", json.dumps({"command": "ls"}))).text == "out"
        assert (await toolbox.call("submit", "{}")).done


def test_mistakes_are_named(scripted: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"no tool named 'stateful_shel'.*did you mean 'stateful_shell'"):
        build_toolbox([Setting("stateful_shel")], scripted())
    with pytest.raises(UserError, match="two tools are shown as 'shell'"):
        build_toolbox([Setting("stateful_shell"), Setting("stateful_shell")], scripted())
