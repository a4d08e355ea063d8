"""The task ``function``: any callable as its verifier."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from uniagent.adapters.sandboxes.none import NoneProvider
from uniagent.engine import registry
from uniagent.engine.errors import UserError
from uniagent.engine.ports import AgentResult, Failure, ModelEndpoint, TaskResult
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.config import ENDPOINT
from uniagent.tasks.function import Attempt


class Says:
    """An agent that says what the sample's metadata tells it to."""

    def __init__(self, config: Any) -> None:
        self.text = config.options["text"]

    async def run(self, prompt: Any, sandbox: Any, model: ModelEndpoint) -> AgentResult:
        return AgentResult(True, [*prompt, {"role": "assistant", "content": self.text}])


class Providers:
    def sandbox(self, name: str) -> Any:
        return NoneProvider()

    def sandbox_options(self, name: str) -> dict[str, Any]:
        return {}


def equals(attempt: Attempt, *, bonus: float = 0.0) -> float:
    assert threading.current_thread() is not threading.main_thread()
    return float(attempt.answer == attempt.metadata["answer"]) + bonus


async def wholly(attempt: Attempt) -> TaskResult:
    return TaskResult(0.5, outcome=True, components={"length": float(len(attempt.transcript))})


def broken(attempt: Attempt) -> float:
    raise RuntimeError("no network")


def uses_the_sandbox(attempt: Attempt) -> Any:
    return attempt.sandbox.read("/x")


@pytest.fixture(autouse=True)
def _agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN["agents"], "says", f"{__name__}:Says")


async def play(text: str, **verifier: Any) -> TaskResult:
    task = {
        "name": "sums",
        "task": "function",
        "sandbox": {"provider": "none"},
        "agent": {"name": "says"},
        "verifier": verifier,
    }
    sample = {
        "name": "sums",
        "prompt": [{"role": "user", "content": "1 + 1"}],
        "metadata": {"answer": "2"},
        "agent": {"options": {"text": text}},
    }
    config = TaskConfigResolver([task]).resolve(sample, dict.fromkeys(ENDPOINT, "x"))
    return await config.build(Providers()).run(ModelEndpoint("", "", ""))


async def test_a_plain_function_scores_the_last_words_in_a_thread() -> None:
    assert (await play("2", function=f"{__name__}:equals")).reward == 1.0
    assert (await play("3", function=f"{__name__}:equals")).reward == 0.0
    assert (await play("2", function=f"{__name__}:equals", bonus=0.25)).reward == 1.25


async def test_an_async_function_may_give_a_whole_result() -> None:
    result = await play("2", function=f"{__name__}:wholly")
    assert (result.reward, result.outcome, result.components) == (0.5, True, {"length": 2.0})


async def test_a_function_that_raises_is_infrastructure() -> None:
    result = await play("2", function=f"{__name__}:broken")
    assert result.failure is Failure.INFRA
    assert "no network" in result.details["error"]


@pytest.mark.parametrize(
    ("verifier", "says"),
    [
        ({}, r"verifier\.function = None"),
        ({"function": "equals"}, r"module:attribute"),
        ({"function": f"{__name__}:equal"}, r"cannot load"),
        ({"function": f"{__name__}:equals", "bonsu": 1}, r"verifier\.bonsu.*did you mean 'bonus'"),
    ],
)
async def test_a_bad_verifier_section_is_the_users_to_mend(verifier: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        await play("2", **verifier)


async def test_the_sandbox_of_a_task_without_one_says_so() -> None:
    async with NoneProvider() as provider, provider.open({}) as sandbox:
        with pytest.raises(UserError, match=r"sandbox.provider = 'none'"):
            await sandbox.shell()
    with pytest.raises(UserError, match="image"):
        async with NoneProvider() as provider, provider.open({"image": "x"}):
            pass
