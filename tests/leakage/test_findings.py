"""What findings do to a result, and which commands and edits give some."""

from __future__ import annotations

import json

import pytest

from uniagent.engine.errors import UserError
from uniagent.engine.ports import AgentResult, Failure, TaskResult
from uniagent.tasks.guards.commands import audit, audit_code, commands_of
from uniagent.tasks.guards.findings import Consequence, Finding
from uniagent.tasks.guards.origin import Origin, origin
from uniagent.tasks.leakage import settle

GOOD = TaskResult(1.0, step_rewards=(0.5,), outcome=True, flags=("slow",))
LEAK, NOTE = Finding("egress", "https://x"), Finding("tests_changed", "t.py", leak=False)


def test_zero_is_what_happens_by_default() -> None:
    result = settle(GOOD, [LEAK, NOTE, LEAK], Consequence())
    assert (result.reward, result.outcome, result.step_rewards, result.failure) == (0.0, False, (), None)
    assert result.flags == ("slow", "egress", "tests_changed")
    assert result.details["leakage"][0]["where"] == "https://x"


def test_the_other_consequences() -> None:
    penalised = settle(GOOD, [LEAK], Consequence("penalise", 0.25))
    assert (penalised.reward, penalised.outcome) == (0.75, False)
    excluded = settle(GOOD, [LEAK], Consequence("exclude"))
    assert excluded.failure is Failure.INFRA
    assert "egress" in excluded.details["error"]
    flagged = settle(GOOD, [LEAK], Consequence("flag"))
    assert (flagged.reward, flagged.outcome, flagged.flags) == (1.0, True, ("slow", "egress"))


def test_notes_and_nothing_change_no_reward() -> None:
    assert settle(GOOD, [NOTE], Consequence()).reward == 1.0
    assert settle(GOOD, [], Consequence()) is GOOD


def test_a_consequence_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="on_leak"):
        Consequence("shout")


@pytest.mark.parametrize(
    "message",
    [
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "sh", "arguments": json.dumps({"command": "git fsck"})}}],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "name": "sh", "input": {"command": "git fsck"}}]},
        {"role": "assistant", "content": [{"type": "function_call", "arguments": '{"command": ["bash", "git fsck"]}'}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "sh", "arguments": "git fsck"}}]},
    ],
)
def test_commands_are_found_in_every_dialect(message: dict[str, object]) -> None:
    (command,) = commands_of(AgentResult(True, [message, {"role": "tool", "content": "git fsck"}]))
    assert [f.kind for f in audit([command], Origin())] == ["git_objects"]


@pytest.mark.parametrize(
    "command",
    [
        "git log --all --stat",
        "git stash list",
        "git diff HEAD~1",
        "pytest tests",
        "cat setup.cfg",
        "pip install splitter",
        "pip install 'splitter<=1.0'",
        "kill %1",
        "git show HEAD:a.py",
        "echo $?",
    ],
)
def test_ordinary_commands_are_no_findings(command: str) -> None:
    assert audit([command], Origin(version="1.0", distributions=("splitter",), fix_commits=("deadbeefcafe",))) == []


def test_asking_for_a_younger_release() -> None:
    source = Origin(version="1.0", distributions=("splitter",))
    assert audit(["pip install 'splitter[all]>=1.1'"], source)
    assert not audit(["pip install other==9"], source)


def test_steering_code_is_found_in_added_lines_only() -> None:
    before = b"import sys\nsys.exit(0)\n"
    assert audit_code("a.py", before, before + b"x = 1\n") == []
    assert audit_code("a.py", before, before + b"os._exit(0)\n")
    assert audit_code("a.txt", b"", b"os._exit(0)\n") == []


def test_a_bad_date_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="base_date"):
        origin({"base_date": "last spring"})
