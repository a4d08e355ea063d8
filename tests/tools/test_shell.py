"""What the model reads after a command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from uniagent.adapters.tools.shell import StatefulShell
from uniagent.adapters.tools.submit import Submit
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Completed, Observation


@pytest.mark.parametrize(
    ("done", "text"),
    [
        (Completed(0, b"a\nb\n"), "a\nb"),
        (Completed(0, b""), "(no output)"),
        (Completed(0, b"\n\n"), "(no output)"),
        (Completed(2, b"ls: no\n"), "ls: no\nexit code 2"),
        (Completed(1, b""), "exit code 1"),
        (Completed(0, b"\xff ok"), "\ufffd ok"),
        (Completed(0, b"x" * 40), "xxxxxxxxxx\n[… 20 characters left out …]\nxxxxxxxxxx"),
        (
            Completed(3, b"bye", restarted=True),
            "bye\nexit code 3\nthe shell ended and was started again: its variables and working directory are lost",
        ),
    ],
)
async def test_observations(done: Completed, text: str, scripted: Callable[..., Any]) -> None:
    tool = StatefulShell(scripted(done), {"max_chars": 20})
    assert await tool({"command": "c"}) == Observation(text)


async def test_environment_is_exported_to_every_fresh_shell(scripted: Callable[..., Any]) -> None:
    done, lost = Completed(0, b"a\n"), Completed(1, b"", restarted=True)
    sandbox = scripted(Completed(0, b""), done, lost, Completed(0, b""), done)
    tool = StatefulShell(sandbox, {"env": {"A": "b c", "D": "1"}})
    for _ in range(3):
        await tool({"command": "echo"})
    export = "export 'A=b c' D=1"
    assert [command for command, _ in sandbox.script.asked] == [export, "echo", "echo", export, "echo"]


async def test_a_time_limit_is_a_problem_with_the_output_so_far(scripted: Callable[..., Any]) -> None:
    sandbox = scripted(Completed(None, b"so far"))
    seen = await StatefulShell(sandbox, {"timeout_s": 5})({"command": "sleep 9"})
    assert seen == Observation("so far\nthe command was stopped: it ran longer than 5 s", problem="timeout")
    assert sandbox.script.asked == [("sleep 9", 5.0)]


def test_the_model_sees_the_configured_name(scripted: Callable[..., Any]) -> None:
    tool = StatefulShell(scripted(), {"as": "bash", "description": "Do it."})
    shown = tool.schema.as_json()["function"]
    assert (shown["name"], shown["description"]) == ("bash", "Do it.")
    assert shown["parameters"]["required"] == ["command"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"timeout": 3}, "tool stateful_shell: there is no key 'timeout'; did you mean 'timeout_s'"),
        ({"timeout_s": "3"}, 'timeout_s = "3": expected a number'),
        ({"max_chars": 3}, "max_chars = 3: must be at least 16"),
        ({"as": 1}, "as = 1: expected text"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], complaint: str, scripted: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=complaint):
        StatefulShell(scripted(), given)


async def test_submit_ends_the_episode(scripted: Callable[..., Any]) -> None:
    assert await Submit(scripted(), {})({}) == Observation("submitted", done=True)
    tool = Submit(scripted(), {"as": "finish", "argument": "answer"})
    assert tool.schema.parameters["required"] == ["answer"]
    assert await tool({"answer": "42"}) == Observation("42", done=True)
