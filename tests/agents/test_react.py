"""The react loop against a scripted model: how it ends, and what each policy does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

import pytest
from attrs import field, frozen

from uniagent.adapters.agents.react import React
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.messages import Call, Message, ModelCall, Problem, Reply, Usage
from uniagent.engine.ports import AgentResult, Completed, Json, ModelEndpoint

PROMPT = [{"role": "user", "content": "Do it."}]
SHELL = {"as": "shell"}


@frozen
class Tool:
    name: str
    options: Mapping[str, Json] = field(factory=dict)


@frozen
class Settings:
    tools: Sequence[Tool] = (Tool("stateful_shell", SHELL), Tool("submit"))
    max_steps: int | None = None
    options: Mapping[str, Json] = field(factory=dict)


class EchoShell:
    """A sandbox whose shell says what it was asked to run; ``hang`` hits the time limit."""

    workdir = PurePosixPath("/work")

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def shell(self) -> EchoShell:
        return self

    async def run(self, command: str, *, timeout_s: float) -> Completed:
        self.ran.append(command)
        if command == "lost":
            raise InfraError("the sandbox is gone")
        return Completed(None if command == "hang" else 0, f"ran {command}".encode())


class Model:
    """Answers in order; an answer is a Reply, or the Problem it raises. Keeps the requests."""

    def __init__(self, *answers: Reply | Problem) -> None:
        self.answers, self.requests = list(answers), list[ModelCall]()

    async def complete(self, call: ModelCall) -> Reply:
        self.requests.append(call)
        answer = self.answers.pop(0)
        if isinstance(answer, Problem):
            raise answer
        return answer


def says(text: str = "", *calls: tuple[str, Any], **changes: Any) -> Reply:
    made = tuple(
        Call(f"call_{i}", name, a if isinstance(a, str) else json.dumps(a)) for i, (name, a) in enumerate(calls)
    )
    given = {"finish": "tool_calls" if made else "stop", "usage": Usage(10, 5), **changes}
    return Reply("reply", text, "", made, **given)


def shell(command: str) -> tuple[str, Any]:
    return "shell", {"command": command}


async def run(model: Model, settings: Settings | None = None, sandbox: EchoShell | None = None) -> AgentResult:
    endpoint = ModelEndpoint("", "", "policy", complete=model.complete)
    return await React(settings or Settings()).run(PROMPT, sandbox or EchoShell(), endpoint)  # type: ignore[arg-type]


def policies(**chosen: str) -> Settings:
    return Settings(options={"policies": chosen})


async def test_runs_calls_until_an_answer_without_one() -> None:
    model = Model(says("", shell("ls")), says("", shell("rm x"), shell("ls")), says("Done."))
    sandbox = EchoShell()
    result = await run(model, sandbox=sandbox)
    assert result.finished
    assert result.info == {"stop": "no_tool_call", "turns": 3, "tool_calls": 3, "problems": {"no_tool_call": 1}}
    assert sandbox.ran == ["ls", "rm x", "ls"]
    assert model.requests[2].messages == (
        Message("user", "Do it."),
        Message("assistant", calls=(Call("call_0", "shell", '{"command": "ls"}'),)),
        Message("tool", "ran ls", answers="call_0"),
        model.requests[2].messages[3],
        Message("tool", "ran rm x", answers="call_0"),
        Message("tool", "ran ls", answers="call_1"),
    )
    assert [tool["function"]["name"] for tool in model.requests[0].tools] == ["shell", "submit"]
    assert result.transcript[-1] == {"role": "assistant", "content": "Done."}
    assert result.transcript[2] == {"role": "tool", "content": "ran ls", "tool_call_id": "call_0"}


async def test_requests_only_grow() -> None:
    model = Model(*(says("", shell(str(i))) for i in range(5)), says("Done."))
    await run(model)
    for before, after in pairwise(model.requests):
        assert after.messages[: len(before.messages)] == before.messages


async def test_submit_ends_and_what_follows_it_is_not_run() -> None:
    sandbox = EchoShell()
    result = await run(Model(says("", ("submit", {}), shell("late"))), sandbox=sandbox)
    assert (result.finished, result.info["stop"], sandbox.ran) == (True, "submit", [])


async def test_max_steps() -> None:
    result = await run(Model(*(says("", shell(str(i))) for i in range(3))), Settings(max_steps=3))
    assert (result.finished, result.info["stop"], result.info["turns"]) == (False, "max_steps", 3)


@pytest.mark.parametrize("kind", ["generation_budget_spent", "context_length_exceeded"])
async def test_a_spent_budget_is_an_end(kind: str) -> None:
    result = await run(Model(says("", shell("ls")), Problem(403, kind, "spent")))
    assert (result.finished, result.info["stop"], result.info["turns"]) == (False, kind, 1)


async def test_other_problems_and_a_lost_sandbox_go_up() -> None:
    with pytest.raises(Problem, match="broken"):
        await run(Model(Problem(500, "engine", "broken")))
    with pytest.raises(InfraError):
        await run(Model(says("", shell("lost"))))


async def test_system_prompt() -> None:
    model = Model(says("Done."))
    await run(model, Settings(options={"system": "Be brief."}))
    assert model.requests[0].messages[0] == Message("system", "Be brief.")


# ---------------------------------------------------------------- policies


async def test_no_tool_call_nudge() -> None:
    model = Model(says("Thinking."), says("", ("submit", {})))
    result = await run(model, policies(no_tool_call="nudge"))
    assert (result.finished, result.info["stop"]) == (True, "submit")
    assert model.requests[1].messages[-1].role == "user"
    assert "call a tool" in model.requests[1].messages[-1].text


TROUBLE = {
    "unknown_tool": (says("", ("shel", {"command": "ls"})), "there is no tool 'shel'"),
    "malformed_call": (says("", ("shell", {"cmd": "ls"})), "command is missing"),
    "timeout": (says("", shell("hang")), "it ran longer than"),
}


@pytest.mark.parametrize("kind", TROUBLE)
async def test_trouble_is_observed(kind: str) -> None:
    reply, told = TROUBLE[kind]
    model = Model(reply, says("Done."))
    result = await run(model)
    assert result.finished
    assert result.info["problems"] == {kind: 1, "no_tool_call": 1}
    assert told in model.requests[1].messages[-1].text


@pytest.mark.parametrize("kind", TROUBLE)
async def test_trouble_can_end_it(kind: str) -> None:
    result = await run(Model(TROUBLE[kind][0]), policies(**{kind: "end"}))
    assert (result.finished, result.info["stop"], result.info["problems"]) == (False, kind, {kind: 1})


@pytest.mark.parametrize(
    ("policy", "finished", "stop"), [("observe", True, "no_tool_call"), ("end", False, "malformed_call")]
)
async def test_a_call_that_cannot_be_read(policy: str, finished: bool, stop: str) -> None:
    model = Model(says("<tool_call>{oops", problem="not JSON"), says("Done."))
    result = await run(model, policies(malformed_call=policy))
    assert (result.finished, result.info["stop"], result.info["problems"]["malformed_call"]) == (finished, stop, 1)
    if policy == "observe":
        assert "could not be read: not JSON" in model.requests[1].messages[-1].text


async def test_length_limit_ends_by_default() -> None:
    sandbox = EchoShell()
    result = await run(Model(says("", shell("ls"), finish="length")), sandbox=sandbox)
    assert (result.finished, result.info["stop"], sandbox.ran) == (False, "length_limit", [])


async def test_length_limit_continue() -> None:
    model = Model(says("Half of", finish="length"), says("", shell("ls"), finish="length"), says("Done."))
    sandbox = EchoShell()
    result = await run(model, policies(length_limit="continue"), sandbox)
    assert (result.finished, sandbox.ran) == (True, ["ls"])
    assert "cut off" in model.requests[1].messages[-1].text
    assert result.info["problems"]["length_limit"] == 2


@pytest.mark.parametrize(
    ("policy", "ran", "stop"),
    [("allow", ["ls", "ls", "pwd", "ls"], "no_tool_call"), ("observe", ["ls", "pwd", "ls"], "no_tool_call"),
     ("end", ["ls"], "repeated_call")],
)  # fmt: skip
async def test_repeated_call(policy: str, ran: list[str], stop: str) -> None:
    again = '{"command":   "ls"}'  # the same arguments, written differently
    model = Model(says("", shell("ls")), says("", ("shell", again)), says("", shell("pwd"), shell("ls")), says("Done."))
    sandbox = EchoShell()
    result = await run(model, policies(repeated_call=policy), sandbox)
    assert (sandbox.ran, result.info["stop"]) == (ran, stop)
    assert result.info["problems"]["repeated_call"] == 1


# ---------------------------------------------------------------- context


async def test_trim_leaves_the_newest_results_and_changes_seldom() -> None:
    model = Model(*(says("", shell(str(i))) for i in range(9)), says("Done."))
    result = await run(model, Settings(options={"context": {"kind": "trim", "keep": 2}}))
    shown = [[m.text for m in request.messages if m.role == "tool"] for request in model.requests]
    gone = "(old result left out)"
    assert shown[3] == ["ran 0", "ran 1", "ran 2"]
    assert shown[4] == shown[5][:4] == [gone, gone, "ran 2", "ran 3"]
    assert shown[6] == [gone] * 4 + ["ran 4", "ran 5"]
    changes = sum(b[: len(a)] != a for a, b in pairwise(shown))
    assert changes == 3
    assert [m["content"] for m in result.transcript if m["role"] == "tool"] == [f"ran {i}" for i in range(9)]


async def test_summarise_starts_over_from_task_and_summary() -> None:
    long = Usage(900, 200)
    model = Model(says("", shell("one"), usage=long), says("It was one."), says("", shell("two")), says("Done."))
    settings = Settings(options={"context": {"kind": "summarise", "tokens": 1000}, "system": "S"})
    result = await run(model, settings)
    asked, after, last = model.requests[1:]
    assert "Write a summary" in asked.messages[-1].text
    assert [m.role for m in after.messages] == ["system", "user", "user"]
    assert "It was one." in after.messages[2].text
    assert [m.role for m in last.messages] == ["system", "user", "user", "assistant", "tool"]
    assert result.info["turns"] == 3, "the summary is not a turn"


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sytem": "x"}, "agent react: options: there is no key 'sytem'; did you mean 'system'"),
        ({"policies": {"timeout": "stop"}}, 'options.policies: timeout = "stop".*allowed: end, observe'),
        ({"policies": {"time_out": "end"}}, "did you mean 'timeout'"),
        ({"context": {"kind": "summarise"}}, "needs context.tokens"),
    ],
)
def test_mistakes_are_named_when_it_is_built(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        React(Settings(options=options))


async def test_needs_a_model_in_this_process() -> None:
    with pytest.raises(UserError, match="in this process"):
        await React(Settings()).run(PROMPT, EchoShell(), ModelEndpoint("http://x", "k", "m"))  # type: ignore[arg-type]
