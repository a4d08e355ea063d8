"""What a simulated run says about itself, and the bound that no schedule can beat.

``T* = sum over steps of max(W / G + S_min, L_max / (max_staleness + 1))``: W are the batch's accelerator-seconds, its
sampled tokens at a batch that fills the KV and every prompt token prefilled once, plus training; S_min is the sync and
the optimizer's fixed time; L_max the batch's longest session alone on an idle machine. ``eta = T* / T``.

``T*`` knows no admission: its batches fill the KV though the staleness bound may not let so many sessions run.
``admitted_s`` is the bound that does, by Little's law: sessions spend their time in at most so many places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict, frozen

from uniagent.engine.simulate.costs import Costs
from uniagent.engine.simulate.workload import Plan


@frozen
class Report:
    """Durations in virtual seconds, tokens as counts, shares of all accelerators' time. ``update_stall`` is the share
    of the wall-clock that generation stood still for updates; ``tokens_lost`` were sampled and are gone though no fault
    is to blame; ``lost_to_faults`` with one. ``hit_ratio_of_ideal`` compares prompt tokens found in the prefix
    caches with those that one endless cache, never invalidated, would have had. ``places`` are shares of the places
    that admission gives sessions, by what the sessions of trained groups did with them: in the engine or its queue,
    outside (tools, sandboxes), ended but a sibling runs, group complete but not in a batch; the rest stood empty,
    trained, or belonged to groups that the run's end cut off. ``gaps`` are what 1 - eta is made of, as shares
    of all accelerators' time: idle; prompts prefilled again after updates; tokens sampled and not trained; and what
    engines took longer than at a batch that fills the KV (in sync, bound by its longest session, that is negative)."""

    mode: str
    steps: int
    wall_s: float
    t_star_s: float
    eta: float
    t_admitted_s: float
    eta_admitted: float
    tokens_per_s: float
    sessions: int
    engine_busy: float
    learner_busy: float
    idle: float
    places: dict[str, float]
    gaps: dict[str, float]
    staleness: dict[int, int]
    stale_tokens: int
    tokens_sampled: int
    tokens_trained: int
    tokens_lost: int
    lost_to_faults: int
    update_stall: float
    hit_ratio_of_ideal: float
    prefill_again: float
    sandboxes_leaked: int
    infra_failures: int
    agent_failures: int
    groups_given_back: int
    switches: int
    trace: str
    problems: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "staleness": {str(k): v for k, v in sorted(self.staleness.items())}}


def alone_s(plan: Plan, costs: Costs) -> float:
    """Wall-clock of a session on an idle machine."""
    total, length, cached = costs.sandbox_start_s, plan.prompt, 0
    for number, turn in enumerate(plan.turns):
        total += costs.generation_s(length, cached, turn.tokens)
        if number + 1 < len(plan.turns):
            total += turn.tool_s + costs.sandbox_exec_s
        cached = length + turn.tokens
        length = cached + turn.observed
    return total


def work(plan: Plan, costs: Costs, size: int) -> tuple[float, float]:
    """Accelerator-seconds of a session: (rollout, training). Its group's prompt is prefilled once for all."""
    length, decode = plan.prompt, 0.0
    for turn in plan.turns:
        decode += turn.tokens * costs.token_s(length + turn.tokens / 2)
        length += turn.tokens + turn.observed
    fresh = plan.length - plan.sampled - plan.prompt + plan.prompt / size
    return decode + fresh * costs.prefill_token_s * costs.accelerators, plan.length * costs.learner_token_s


def bound_s(batch: Sequence[Plan], costs: Costs, *, size: int, accelerators: int, max_staleness: int) -> float:
    """The step's share of T*."""
    if not batch:
        return 0.0
    busy = sum(sum(work(plan, costs, size)) for plan in batch) / accelerators
    longest = max(alone_s(plan, costs) for plan in batch)
    return max(busy + costs.sync_s + costs.learner_step_s, longest / (max_staleness + 1))


def admitted_s(
    batch: Sequence[Plan], costs: Costs, *, size: int, accelerators: int, sessions: int, max_staleness: int
) -> float:
    """The step's share of the bound where at most ``sessions`` are under way, never less than that of ``T*``.

    With T seconds a step there are N T of them in places. Outside the engine a session takes what it takes. In it, n
    tokens take ``n step_s(b)`` with b the requests a replica; training and prefill leave R (1 - W / G T) replicas to
    decode, which b is smallest on when all are used alike: ``step_s`` is a line, so that no other spread is better.
    Solves (N T - outside) (1 - slope / R (T - W / G)) = fixed for T.
    """
    floor = bound_s(batch, costs, size=size, accelerators=accelerators, max_staleness=max_staleness)
    outside = fixed = slope = busy = 0.0
    for plan in batch:
        length, tools = plan.prompt, costs.sandbox_start_s
        for turn in plan.turns:
            fixed += turn.tokens * costs.decode_base_s
            slope += turn.tokens * (costs.decode_request_s + costs.decode_kv_s * (length + turn.tokens / 2))
            length += turn.tokens + turn.observed
        tools += sum(t.tool_s + costs.sandbox_exec_s for t in plan.turns[:-1])
        outside += tools
        fresh = plan.length - plan.sampled - plan.prompt + plan.prompt / size
        busy += fresh * costs.prefill_token_s * costs.accelerators + plan.length * costs.learner_token_s
    replicas, busy = accelerators / costs.accelerators, busy / accelerators
    low = busy + slope / replicas
    high = low + 2 * (outside + fixed + slope + busy) + 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if (sessions * middle - outside) * (1 - slope / replicas / (middle - busy)) < fixed:
            low = middle
        else:
            high = middle
    return max(floor, low)


def table(reports: Sequence[Report]) -> str:
    """One line a run, for people."""
    lines = [
        f"{'mode':<12}{'wall s':>11}{'T* s':>11}{'eta':>7}{'adm.':>7}{'tok/s':>9}{'engine':>8}{'learner':>9}{'idle':>7}"
        f"{'stall':>8}{'hits':>7}{'lost':>6}{'switches':>10}"
    ]
    lines += [
        f"{r.mode:<12}{r.wall_s:>11.0f}{r.t_star_s:>11.0f}{r.eta:>7.3f}{r.eta_admitted:>7.3f}{r.tokens_per_s:>9.0f}{r.engine_busy:>8.1%}"
        f"{r.learner_busy:>9.1%}{r.idle:>7.1%}{r.update_stall:>8.2%}{r.hit_ratio_of_ideal:>7.3f}{r.tokens_lost:>6}"
        f"{r.switches:>10}"
        for r in reports
    ]
    return "\n".join(lines)
