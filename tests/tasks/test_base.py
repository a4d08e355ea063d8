"""The life of an episode: whose fault a failure is, and what is closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from uniagent.engine import registry
from uniagent.engine.accelerator import AcceleratorError
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.messages import ModelCall, Problem
from uniagent.engine.ports import AgentResult, Failure, ModelEndpoint, TaskResult
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.base import run_episode
from uniagent.tasks.config import ENDPOINT

MODEL = ModelEndpoint("http://127.0.0.1:1", "key", "policy")


class World:
    """Providers, sandbox and agent in one: does what a test asks, and keeps what happened in order."""

    def __init__(self, **does: Any) -> None:
        self.does = does
        self.log: list[str] = []
        self.opened: Mapping[str, Any] = {}

    def sandbox(self, name: str) -> Any:
        return self

    def sandbox_options(self, name: str) -> Mapping[str, Any]:
        return {"memory_mib": 64, "env": {"A": "run", "B": "run"}}

    @asynccontextmanager
    async def open(self, config: Mapping[str, Any]) -> AsyncIterator[World]:
        self.opened = config
        await self.act("open")
        try:
            yield self
        finally:
            self.log.append("close")

    async def act(self, name: str) -> Any:
        self.log.append(name)
        what = self.does.get(name)
        if isinstance(what, BaseException):
            raise what
        if isinstance(what, float):
            await trio.sleep(what)
            return None
        return what

    async def setup(self, sandbox: Any) -> None:
        await self.act("setup")

    async def verify(self, sandbox: Any, acted: AgentResult) -> TaskResult:
        return await self.act("verify") or TaskResult(1.0, metrics={"mine": 1.0})


class FakeAgent:
    world: World

    def __init__(self, config: Any) -> None:
        pass

    async def run(self, prompt: Any, sandbox: World, model: ModelEndpoint) -> AgentResult:
        return await self.world.act("agent") or AgentResult(finished=True, info={"steps": 2})


async def play(world: World, **overrides: Any) -> TaskResult:
    FakeAgent.world = world
    task = {"name": "t", "agent": {"name": "fake"}, "sandbox": {"env": {"B": "task"}}}
    config = TaskConfigResolver([task]).resolve({"name": "t", **overrides}, dict.fromkeys(ENDPOINT, "x"))
    return await run_episode(config, world, MODEL, setup=world.setup, verify=world.verify)


@pytest.fixture(autouse=True)
def _fake_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN["agents"], "fake", f"{__name__}:FakeAgent")


async def test_the_sandbox_is_there_until_the_verdict_and_closed_after_it() -> None:
    world = World()
    result = await play(world)
    assert world.log == ["open", "setup", "agent", "verify", "close"]
    assert (result.reward, result.failure) == (1.0, None)
    assert result.details["agent"] == {"steps": 2}


async def test_run_options_of_the_provider_lie_under_the_tasks_section() -> None:
    world = World()
    await play(world)
    assert world.opened == {"memory_mib": 64, "env": {"A": "run", "B": "task"}}


async def test_times_are_told_apart(autojump_clock: trio.testing.MockClock) -> None:
    result = await play(World(open=1.0, setup=2.0, agent=4.0, verify=8.0))
    assert {k: round(v, 6) for k, v in result.metrics.items()} == {
        "mine": 1.0,
        "sandbox_s": 3.0,
        "agent_s": 4.0,
        "verify_s": 8.0,
    }


@pytest.mark.parametrize("stage", ["open", "setup", "agent"])
async def test_a_lost_sandbox_is_infrastructure(stage: str) -> None:
    world = World(**{stage: InfraError("no space left")})
    result = await play(world)
    assert result.failure is Failure.INFRA
    assert result.details["error"] == "infrastructure failed: uniagent.engine.errors.InfraError: no space left"
    assert "verify" not in world.log
    assert ("close" in world.log) == (stage != "open")


async def test_a_failing_verifier_is_infrastructure_and_never_reward_zero() -> None:
    result = await play(World(verify=ZeroDivisionError("oops")))
    assert result.failure is Failure.INFRA
    assert "the verifier failed: ZeroDivisionError: oops" in result.details["error"]


async def test_a_verifier_that_hangs_is_infrastructure(autojump_clock: trio.testing.MockClock) -> None:
    result = await play(World(verify=1e6), verifier={"timeout_s": 5})
    assert result.failure is Failure.INFRA
    assert "verifier.timeout_s = 5" in result.details["error"]


async def test_a_crashed_agent_is_judged_by_what_it_left() -> None:
    world = World(agent=ValueError("bad plan"))
    result = await play(world)
    assert (result.reward, result.failure) == (1.0, Failure.AGENT)
    assert result.details["error"] == "the agent crashed: ValueError: bad plan"
    assert "bad plan" in result.details["agent"]["traceback"]
    assert world.log[-2:] == ["verify", "close"]


async def test_an_agent_out_of_time_is_judged_by_what_it_left(autojump_clock: trio.testing.MockClock) -> None:
    result = await play(World(agent=1e6), agent={"timeout_s": 7})
    assert (result.reward, result.failure) == (1.0, Failure.AGENT)
    assert "agent.timeout_s = 7" in result.details["error"]


async def test_an_agent_out_of_steps_is_judged_by_what_it_left() -> None:
    result = await play(World(agent=AgentResult(finished=False, info={"exit": "max_steps"})))
    assert (result.reward, result.failure) == (1.0, Failure.AGENT)


@pytest.mark.parametrize("stage", ["setup", "agent", "verify"])
@pytest.mark.parametrize("error", [UserError("fix it")])
async def test_a_mistake_of_the_user_goes_on_up_and_the_sandbox_is_closed(stage: str, error: Exception) -> None:
    world = World(**{stage: error})
    with pytest.raises(UserError, match="fix it"):
        await play(world)
    assert world.log[-1] == "close"


async def test_a_dead_engine_goes_on_up() -> None:
    with pytest.raises(AcceleratorError):
        await play(World(agent=AcceleratorError("crashed")))


async def test_a_broken_gateway_is_not_the_agents_fault_but_a_refused_request_is() -> None:
    class Asks(FakeAgent):
        async def run(self, prompt: Any, sandbox: World, model: ModelEndpoint) -> AgentResult:
            assert model.complete is not None
            return await model.complete(ModelCall(()))  # type: ignore[no-any-return]

    async def ask(error: Exception) -> TaskResult:
        async def complete(call: ModelCall) -> None:
            raise error

        FakeAgent.world = world = World()
        config = TaskConfigResolver([{"name": "t"}]).resolve({"name": "t"}, dict.fromkeys(ENDPOINT, "x"))
        endpoint = ModelEndpoint("", "", "", complete=complete)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("uniagent.tasks.base.load", lambda kind, name: Asks)
            return await run_episode(config, world, endpoint, setup=world.setup, verify=world.verify)

    broken = await ask(KeyError("bug"))
    assert broken.failure is Failure.INFRA
    assert "a model request failed: KeyError: 'bug'" in broken.details["error"]
    refused = await ask(Problem(400, "bad_request", "no"))
    assert (refused.failure, refused.reward) == (Failure.AGENT, 1.0)


async def test_cancelling_the_session_closes_the_sandbox(autojump_clock: trio.testing.MockClock) -> None:
    world = World(agent=1e6)
    with trio.move_on_after(3) as scope:
        await play(world)
    assert scope.cancelled_caught
    assert world.log[-1] == "close"
