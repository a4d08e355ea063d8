"""One episode, from a sample to its result: the single entry of training, evaluation and data synthesis.

Invariants: a session ends exactly once, with an Episode, whatever the agent did; its gateway session is finished
exactly once and its ledger balances; an error of infrastructure is an Episode with ``failure = infra``, and so is an
agent that fails before it asks the model anything (the policy had no part in it); a mistake of the user (a UserError)
or a broken engine goes on up and ends the run. Knows nothing of groups, batches or learning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio
from attrs import evolve, field, frozen

from uniagent.engine.episode import Episode
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.ports import Failure, Json, Providers, TaskResult, TaskSource
from uniagent.engine.shaping import shaped


@frozen
class SessionParts:
    """What every session of a phase shares. ``sampling`` overrides the samples' fields of that name (evaluation);
    temperature 0 is greedy."""

    gateway: Gateway
    tasks: TaskSource
    providers: Providers
    timeout_s: float
    sampling: Mapping[str, Any] = field(factory=dict)
    training: bool = True


async def run_session(parts: SessionParts, row: Mapping[str, Json], *, name: str, sample: int, replica: int) -> Episode:
    """Run one sample once. ``name`` identifies the session in the record and keys its random draws."""
    started = trio.current_time()
    runtime = parts.gateway.runtime(name)
    resolved = parts.tasks.resolve(row, runtime)
    sampling = evolve(resolved.sampling, **parts.sampling)
    session = parts.gateway.open(name, sampling, training=parts.training)
    result, error = TaskResult(0.0, failure=Failure.AGENT), None
    try:
        with trio.move_on_after(parts.timeout_s) as limit:
            result = await resolved.build(parts.providers).run(session.endpoint())
        if limit.cancelled_caught:
            error = f"the session ran longer than rollout.session_timeout_s = {parts.timeout_s:g} s"
    finally:
        export = await parts.gateway.finish(session.id, result.reward)
    if result.failure is Failure.AGENT and not export.ledger.sampled:
        result = evolve(result, failure=Failure.INFRA)
        error = error or "the agent failed before it asked the model anything: " + str(result.details.get("error"))
    malformed = sum(turn.get("problem") is not None for turn in session.turns)
    tokens, turns = export.ledger.sampled, len(export.fates)
    result = shaped(result, resolved.shaping, tokens=tokens, turns=turns, malformed=malformed)
    return Episode(
        session=name,
        task=resolved.name,
        sample=sample,
        replica=replica,
        result=result,
        export=export,
        row=resolved.as_json(),
        turns=session.turns,
        timings={"total": trio.current_time() - started, "engine": session.engine_s, **_timings(result)},
        error=error or result.details.get("error"),
    )


def _timings(result: TaskResult) -> dict[str, float]:
    return {k.removesuffix("_s"): v for k, v in result.metrics.items() if k in ("sandbox_s", "agent_s", "verify_s")}
