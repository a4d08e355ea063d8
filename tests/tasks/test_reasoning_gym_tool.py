"""The task ``reasoning_gym`` over several turns: the react agent with the python tool in a local sandbox."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.messages import Call, ModelCall, Reply, Usage
from uniagent.engine.ports import ModelEndpoint, TaskResult
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.config import ENDPOINT

pytest.importorskip("reasoning_gym")

from uniagent.tasks.reasoning_gym import samples

EXAMPLE = Path(__file__).parents[2] / "examples" / "reasoning_tasks.toml"
ROW = next(samples("train", 5, datasets={"chain_sum": {"min_terms": 6, "max_terms": 6}}))


class Calculator:
    """Calls python with the sum in the question; then answers with what the tool showed, or with ``guess``."""

    def __init__(self, guess: str | None = None) -> None:
        self.guess, self.requests = guess, list[ModelCall]()

    async def complete(self, call: ModelCall) -> Reply:
        self.requests.append(call)
        last = call.messages[-1]
        if last.role == "tool":
            text = f"It is <answer>{self.guess or last.text}</answer>"
            return Reply("reply", text, "", (), "stop", Usage(10, 5))
        (terms,) = re.findall(r"\d[\d +-]*\d", last.text.partition("\n\n")[0])
        code = Call("call_0", "python", json.dumps({"code": f"total = {terms}\ntotal"}))
        return Reply("reply", "I count.", "", (code,), "tool_calls", Usage(10, 5))


class Providers:
    def __init__(self, provider: LocalProvider) -> None:
        self.provider = provider

    def sandbox(self, name: str) -> Any:
        assert name == "local"
        return self.provider

    def sandbox_options(self, name: str) -> dict[str, Any]:
        return {}


async def played(model: Calculator, **changes: Any) -> TaskResult:
    async with LocalProvider({"warm": 0}) as provider:
        config = TaskConfigResolver.from_file(EXAMPLE).resolve({**ROW, **changes}, dict.fromkeys(ENDPOINT, "x"))
        endpoint = ModelEndpoint("", "", "policy", complete=model.complete)
        return await config.build(Providers(provider)).run(endpoint)


@pytest.mark.usefixtures("confined")
async def test_what_the_tool_found_earns_the_reward() -> None:
    model = Calculator()
    result = await played(model)
    assert (result.reward, result.outcome, result.failure) == (1.0, True, None)
    assert result.details["answer"] == ROW["metadata"]["answer"]
    assert [tool["function"]["name"] for tool in model.requests[0].tools] == ["python"]
    assert len(model.requests) == 2
    assert model.requests[1].messages[-1].text == ROW["metadata"]["answer"], "the observation is the value alone"
    assert result.details["agent"]["tool_calls"] == 1


@pytest.mark.usefixtures("confined")
async def test_a_guess_beside_the_tool_earns_what_it_is_worth() -> None:
    result = await played(Calculator("12345678"))
    assert (result.reward < 0.1, result.outcome) == (True, False)


@pytest.mark.usefixtures("confined")
async def test_one_step_is_too_few_for_a_call_and_an_answer() -> None:
    result = await played(Calculator(), agent={"max_steps": 1})
    assert (result.reward, result.flags, result.details["agent"]["stop"]) == (0.0, ("no_answer",), "max_steps")
