"""Routing policies on a simulated cluster: one recorded trace of sessions, one queueing model, the real router code.

    python bench/router.py [--quick] [--out PATH] [--record]

Replays ``bench/router_trace.jsonl`` (multi-turn sessions in groups of 8, heavy-tailed turns, tokens and tool pauses;
made by ``--record`` from the simulation's workload) on 6 simulated replicas on a virtual clock, with a fixed number of
groups under way. ``policies``, under moderate pressure on the KV: ``hit_ratio_of_ideal`` (prompt tokens found resident,
as a share of what one endless cache would find), ``p50_s`` and ``p90_s`` of a group's time, ``prefill_waste`` (tokens
prefilled again, over those that had to be) and ``busy`` (share of the replicas' time). ``scarce`` is the same with less
KV than the running sessions need. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import trio
from attrs import evolve, frozen

from uniagent.engine.rollout.router import POLICIES, Router
from uniagent.engine.simulate import clock
from uniagent.engine.simulate.costs import Costs
from uniagent.engine.simulate.engine import SimulatedEngine
from uniagent.engine.simulate.sessions import SimulatedGateway, SimulatedSandboxes, SimulatedTask
from uniagent.engine.simulate.workload import Plan, Turn, Workload

TRACE = Path(__file__).with_name("router_trace.jsonl")
REPLICAS, GROUP, GROUPS_RECORDED = 6, 8, 96
UNDER_WAY = 48  # groups
COSTS = Costs(
    accelerators=1,
    prefill_token_s=7e-5,
    decode_base_s=0.012,
    decode_request_s=5e-5,
    decode_kv_s=4e-8,
    kv_tokens=600_000,
)
PRESSURE = {"moderate": 450_000, "scarce": 380_000}  # KV tokens of a replica


def record() -> None:
    """Write the trace: one session a line, [sample, replica, prompt, [[tokens, tool_s, observed], ...]]."""
    workload = Workload(prompt_tokens=3000, turns=14, turns_sigma=0.8, answer_tokens=180, tool_tokens=400, tool_s=2.5)
    with TRACE.open("w") as file:
        for sample in range(GROUPS_RECORDED):
            for replica in range(GROUP):
                plan = workload.plan(20, sample, replica)
                turns = [[t.tokens, round(t.tool_s, 1), t.observed] for t in plan.turns]
                file.write(json.dumps([sample, replica, plan.prompt, turns], separators=(",", ":")) + "\n")


def read(groups: int) -> list[list[Plan]]:
    """The first groups of the trace."""
    found: dict[int, list[Plan]] = {}
    for line in TRACE.read_text().splitlines():
        sample, _, prompt, turns = json.loads(line)
        found.setdefault(sample, []).append(Plan(prompt, tuple(Turn(*t) for t in turns)))
    return [found[sample] for sample in sorted(found)[:groups]]


@frozen
class Seen:
    hit_ratio_of_ideal: float
    p50_s: float
    p90_s: float
    prefill_waste: float
    busy: float
    wall_s: float


async def replay(groups: Sequence[Sequence[Plan]], policy: str, costs: Costs) -> Seen:
    timers = clock.Timers()
    engines = [SimulatedEngine(timers, costs) for _ in range(REPLICAS)]
    router = Router(engines, policy)
    gateway = SimulatedGateway(router, router.forget)
    sandboxes = SimulatedSandboxes(costs)
    took: list[float] = []
    places = trio.Semaphore(UNDER_WAY)

    async def session(number: int, replica: int, plan: Plan) -> None:
        task = SimulatedTask("trace", f"g{number}", plan, sandboxes, {})
        opened = gateway.open(f"s{number}-{replica}", task.sampling)
        await task.run(opened.endpoint())
        await gateway.finish(opened.id)

    async def group(number: int, plans: Sequence[Plan]) -> None:
        started = trio.current_time()
        async with trio.open_nursery() as members:
            for replica, plan in enumerate(plans):
                members.start_soon(session, number, replica, plan)
        took.append(trio.current_time() - started)
        places.release()

    async with trio.open_nursery() as background:
        background.start_soon(timers.run)
        async with trio.open_nursery() as nursery:
            for number, plans in enumerate(groups):
                await places.acquire()
                nursery.start_soon(group, number, plans)
        background.cancel_scope.cancel()
    wall = trio.current_time()
    needed = gateway.asked - gateway.ideal
    cached = sum(e.cached for e in engines)
    return Seen(
        hit_ratio_of_ideal=cached / gateway.ideal,
        p50_s=float(np.percentile(took, 50)),
        p90_s=float(np.percentile(took, 90)),
        prefill_waste=(gateway.ideal - cached) / needed,
        busy=sum(e.busy_s for e in engines) / (REPLICAS * wall),
        wall_s=wall,
    )


def compare(groups: Sequence[Sequence[Plan]], costs: Costs) -> dict[str, Seen]:
    return {policy: clock.run(lambda p=policy: replay(groups, p, costs), seed=0) for policy in POLICIES}  # type: ignore[misc]


def table(name: str, seen: Mapping[str, Seen]) -> None:
    print(f"{name:<22}{'hits/ideal':>11}{'waste':>8}{'p50 s':>9}{'p90 s':>9}{'busy':>8}{'wall s':>9}")
    for policy, s in seen.items():
        print(
            f"{policy:<22}{s.hit_ratio_of_ideal:>11.3f}{s.prefill_waste:>8.2f}{s.p50_s:>9.0f}{s.p90_s:>9.0f}"
            f"{s.busy:>8.1%}{s.wall_s:>9.0f}"
        )
    print()


def as_json(seen: Mapping[str, Seen]) -> dict[str, Any]:
    return {
        policy: {
            key: round(getattr(s, key), 4) for key in ("hit_ratio_of_ideal", "p50_s", "p90_s", "prefill_waste", "busy")
        }
        for policy, s in seen.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="well under a minute: the first half of the trace")
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    parser.add_argument("--record", action="store_true", help="make the trace again, and stop")
    args = parser.parse_args()
    if args.record:
        record()
        return 0
    groups = read(GROUPS_RECORDED // 2 if args.quick else GROUPS_RECORDED)
    seen = {name: compare(groups, evolve(COSTS, kv_tokens=kv)) for name, kv in PRESSURE.items()}
    for name, results in seen.items():
        table(name, results)
    own, hashed, sticky = (seen["moderate"][p].p90_s for p in ("cache_aware", "sticky_hash", "sticky_least_loaded"))
    print(
        f"cache_aware p90: {1 - own / hashed:.1%} below sticky_hash, {1 - own / sticky:.1%} below sticky_least_loaded"
    )
    line = json.dumps(
        {
            "policies": as_json(seen["moderate"]),
            "scarce": as_json(seen["scarce"]),
            "groups": len(groups),
            "quick": args.quick,
        }
    )
    if args.out:
        args.out.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
