"""The record of requests reaches the verifier and the session's record, with the action that made each."""

from __future__ import annotations

from attrs import evolve

from uniagent.engine.egress.record import Egress, egress_of
from uniagent.engine.egress.rules import Verdict
from uniagent.engine.ports import AgentResult, ModelEndpoint, Sandbox, TaskResult
from uniagent.tasks.base import run_episode
from uniagent.tasks.config import TaskConfigResolver
from uniagent.tasks.leakage import network_findings


class Watched:
    """A sandbox that has nothing but a way out."""

    def __init__(self) -> None:
        self.egress = Egress("guarded")


class Providers:
    def __init__(self) -> None:
        self.box = Watched()

    def sandbox(self, name: str) -> Providers:
        return self

    def sandbox_options(self, name: str) -> dict[str, object]:
        return {}

    def open(self, config: object) -> Providers:
        return self

    async def __aenter__(self) -> Watched:
        return self.box

    async def __aexit__(self, *error: object) -> None:
        pass


class Curious:
    """An agent that asks for the upstream repository after its third action."""

    turn = -1

    def __init__(self, config: object) -> None:
        pass

    async def run(self, prompt: object, sandbox: Watched, model: ModelEndpoint) -> AgentResult:
        Curious.turn = 2
        sandbox.egress.note(
            1.0, "GET", "https://forge/x", "forge", Verdict(False, "the upstream repository", leak=True)
        )
        return AgentResult(True)


async def test_requests_reach_the_verifier_and_the_record() -> None:
    seen: list[str] = []

    async def setup(sandbox: Sandbox) -> None:
        pass

    async def verify(sandbox: Sandbox, acted: AgentResult) -> TaskResult:
        egress = egress_of(sandbox)
        assert egress is not None
        seen.extend(f.detail for f in network_findings(egress.accesses))
        return TaskResult(1.0)

    layer = {"name": "t", "agent": {"name": f"{__name__}:Curious"}}
    endpoint = {"base_url": "", "api_key": "", "model_name": ""}
    config = TaskConfigResolver([layer]).resolve({"name": "t"}, endpoint)
    model = evolve(ModelEndpoint("", "", ""), acted=lambda: ("s-1", Curious.turn))
    result = await run_episode(config, Providers(), model, setup=setup, verify=verify)  # type: ignore[arg-type]
    assert seen == ["the upstream repository (turn 2)"]
    (request,) = result.details["egress"]["requests"]
    assert (request["session"], request["turn"], request["leak"]) == ("s-1", 2, True)
