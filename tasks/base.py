"""The life of one episode, the same for every task: open the sandbox, set it up, run the agent, verify while the
sandbox is still there, close it.

Invariants: what the task, the sandbox or the verifier fail at is ``Failure.INFRA``, never reward 0; what the agent
fails at (a crash, a budget) is ``Failure.AGENT`` and has the reward the verifier gives; a mistake of the user goes on
up. Knows no particular task, and nothing of training.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import trio
from attrs import evolve

from uniagent.engine.accelerator import AcceleratorError
from uniagent.engine.egress.record import egress_of
from uniagent.engine.errors import InfraError, UserError, nearest
from uniagent.engine.messages import ModelCall, Problem, Reply
from uniagent.engine.ports import (
    Agent,
    AgentResult,
    Failure,
    ModelEndpoint,
    Providers,
    Sandbox,
    TaskResult,
)
from uniagent.engine.registry import load
from uniagent.tasks.config import TaskConfig, merge

Setup = Callable[[Sandbox], Awaitable[None]]
Verify = Callable[[Sandbox, AgentResult], Awaitable[TaskResult]]


async def run_episode(
    config: TaskConfig,
    providers: Providers,
    model: ModelEndpoint,
    *,
    setup: Setup,
    verify: Verify,
    wrap: Callable[[Agent], Agent] = lambda agent: agent,
) -> TaskResult:
    """One episode. ``wrap`` may put something around the agent. ``metrics`` get sandbox_s (opening, setting up and
    closing), agent_s and verify_s; ``details`` the agent's account of itself under ``agent`` and, where something
    failed, ``error``."""
    bare = load("agents", config.agent.name)(config.agent)
    agent = wrap(bare)
    result: TaskResult | None = None
    timings: dict[str, float] = {}
    started = trio.current_time()
    try:
        async with open_sandbox(config, providers, getattr(bare, "read_only", ())) as sandbox:
            egress = egress_of(sandbox)
            if egress is not None:
                egress.actor = model.acted
            await setup(sandbox)
            ready = trio.current_time()
            acted = await _act(agent, config, sandbox, model)
            ended = trio.current_time()
            result = await _judge(verify, config, sandbox, acted)
            if egress is not None:
                result = evolve(result, details={**result.details, "egress": egress.as_json()})
            verified = trio.current_time()
            timings = {"agent_s": ended - ready, "verify_s": verified - ended}
    except* (InfraError, OSError) as problems:
        result = result or infra_failure("infrastructure failed", problems)
    assert result is not None
    timings["sandbox_s"] = trio.current_time() - started - sum(timings.values())
    return evolve(result, metrics={**result.metrics, **timings})


def open_sandbox(
    config: TaskConfig, providers: Providers, read_only: Sequence[str] = ()
) -> AbstractAsyncContextManager[Sandbox]:
    """The task's sandbox, from the run's options for its provider with the task's section on top; ``read_only`` are
    paths of this machine that the agent needs to see inside."""
    name = config.sandbox.provider
    section = merge(providers.sandbox_options(name), config.sandbox.as_json())
    if read_only:
        section["read_only"] = list(dict.fromkeys([*section.get("read_only", ()), *read_only]))
    return providers.sandbox(name).open(section)


def infra_failure(what: str, problem: BaseException) -> TaskResult:
    """An episode that cannot be scored, through no fault of the agent."""
    account = "".join(traceback.format_exception(problem))
    details = {"error": f"{what}: {cause(problem)}", "traceback": account}
    return TaskResult(0.0, failure=Failure.INFRA, details=details)


def cause(problem: BaseException) -> str:
    """The first leaf of an exception group, or the exception itself, on one line."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return traceback.format_exception_only(problem)[-1].strip()


def weighted(result: TaskResult, config: TaskConfig) -> TaskResult:
    """The result whose reward is the weighted sum of its components, where the config weighs them; the outcome stays.
    Raises UserError for a component that the verifier did not give."""
    weights = config.reward.weights
    if not weights or result.failure is Failure.INFRA:
        return result
    for name in weights:
        if name not in result.components:
            raise UserError(
                f"task {config.name!r}: reward.weights.{name}: its verifier gives no such component: "
                f"{nearest(name, result.components)}"
            )
    reward = sum(weight * result.components[name] for name, weight in weights.items())
    return evolve(result, reward=reward, outcome=result.solved)


async def _act(agent: Agent, config: TaskConfig, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
    """The agent's run; a crash or the time limit ends it and is told in ``info``."""
    limit_s = config.agent.timeout_s
    try:
        with trio.move_on_after(math.inf if limit_s is None else limit_s):
            return await agent.run(config.messages, sandbox, _guarded(model))
    except Exception as problem:  # an agent is other people's code: its crash is its own failure, and is recorded
        if _not_the_agents(problem):
            raise
        account = "".join(traceback.format_exception(problem))
        return AgentResult(False, info={"error": f"the agent crashed: {cause(problem)}", "traceback": account})
    return AgentResult(False, info={"error": f"the agent was stopped at agent.timeout_s = {limit_s:g} s"})


def _guarded(model: ModelEndpoint) -> ModelEndpoint:
    """The endpoint, where a request that breaks (and is not refused, by a Problem) is infrastructure."""
    if (complete := model.complete) is None:
        return model

    async def guarded(call: ModelCall) -> Reply:
        try:
            reply: Reply = await complete(call)
        except Exception as problem:
            if isinstance(problem, Problem) or _not_the_agents(problem):
                raise
            raise InfraError(f"a model request failed: {cause(problem)}") from problem
        return reply

    return evolve(model, complete=guarded)


async def _judge(verify: Verify, config: TaskConfig, sandbox: Sandbox, acted: AgentResult) -> TaskResult:
    """The verifier's result, with the agent's account; a verifier that fails or hangs is infrastructure."""
    try:
        with trio.fail_after(config.verifier.timeout_s):
            result = weighted(await verify(sandbox, acted), config)
    except trio.TooSlowError:
        problem = InfraError(f"it ran longer than verifier.timeout_s = {config.verifier.timeout_s:g} s")
        result = infra_failure("the verifier failed", problem)
    except Exception as problem:  # never reward 0 for a fault of ours; recorded
        if isinstance(problem, UserError):
            raise
        result = infra_failure("the verifier failed", problem)
    error = result.details.get("error") or acted.info.get("error")
    details = {**result.details, "agent": dict(acted.info), **({"error": error} if error else {})}
    return evolve(result, details=details, failure=result.failure or (None if acted.finished else Failure.AGENT))


def _not_the_agents(problem: BaseException) -> bool:
    if isinstance(problem, BaseExceptionGroup):
        return any(_not_the_agents(p) for p in problem.exceptions)
    return isinstance(problem, (UserError, InfraError, AcceleratorError))
