"""Asynchronous modes against synchronous training, on a simulated machine: the real scheduler, admission, router and
session code on a virtual clock.

    python bench/async_modes.py [--quick] [--out PATH] [--seed N] [--costs JSON]

Workload ``agentic``: lognormal turns (5 to 100) and tool times, growing fourfold in tokens over the run; ``reasoning``:
one long answer a session. Modes: ``sync``, ``one_step_off`` and ``fully_async`` (two pools, no change of roles: the
baselines), ``colocated``, ``separate``. Each mode with two pools gets its best static split, by a sweep over shorter
runs of the same workload. All have one staleness bound, batch, engine, router and the same sessions. The machine is
64 accelerators, simulated as a share of them with that share of the sessions (``weight``). The real part (two cores,
``real``) is not measured here: it is null. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from attrs import evolve

from uniagent.engine.simulate import costs as cost_model
from uniagent.engine.simulate.costs import Costs
from uniagent.engine.simulate.report import Report, table
from uniagent.engine.simulate.scenario import Mode, Scenario
from uniagent.engine.simulate.workload import Workload
from uniagent.engine.simulate.world import simulate

ACCELERATORS = 64
COSTS = Costs(  # a dense 14-billion model in bfloat16, two 80 GB accelerators a replica; docs/simulation.md
    accelerators=2,
    prefill_token_s=3.5e-5,
    decode_base_s=0.008,
    decode_request_s=4e-5,
    decode_kv_s=3.5e-8,
    kv_tokens=670_000,
    learner_token_s=4e-4,
    sync_s=0.5,
)
WORKLOADS = {
    "agentic": Workload(
        prompt_tokens=3000,
        turns=15,
        answer_tokens=200,
        tool_tokens=400,
        tool_s=2.0,
        tool_sigma=1.2,
        drift_turns=2.0,
        drift_tokens=2.0,
    ),
    "reasoning": Workload(
        prompt_tokens=500,
        turns=1,
        turns_min=1,
        turns_max=1,
        answer_tokens=6000,
        answer_sigma=0.8,
        drift_tokens=1.0,
        context=64_000,
    ),
}


def scenario(workload: Workload, mode: Mode, *, quick: bool, seed: int, costs: Costs) -> Scenario:
    share, steps, groups = (8, 24, 4) if quick else (16, 200, 8)
    return Scenario(
        mode=mode,
        accelerators=share,
        train_accelerators=costs.accelerators,
        steps=steps,
        seed=seed,
        groups_per_step=groups,
        group_size=8,
        staleness_threshold=2.0,
        max_staleness=8,
        costs=costs,
        workload=evolve(workload, samples=steps * groups),
    )


def best_split(given: Scenario, *, quick: bool) -> Scenario:
    """The split with the least wall-clock over a shorter run, up to half of the machine for training."""
    each = given.costs.accelerators
    steps = given.steps if quick else given.steps // 10
    short = evolve(given, steps=steps, workload=evolve(given.workload, samples=steps * given.groups_per_step))
    splits = range(each, given.accelerators // 2 + each, each)
    walls = {split: simulate(evolve(short, train_accelerators=split)).wall_s for split in splits}
    return evolve(given, train_accelerators=min(walls, key=lambda split: walls[split]))


def measure(workload: Workload, *, quick: bool, seed: int, costs: Costs) -> tuple[list[Report], dict[str, int]]:
    one = functools.partial(run_mode, workload, quick=quick, seed=seed, costs=costs)
    with ProcessPoolExecutor(2) as pool:
        done = list(pool.map(one, Mode))
    return [r for r, _ in done], {r.mode: split for r, split in done if split is not None}


def run_mode(workload: Workload, mode: Mode, *, quick: bool, seed: int, costs: Costs) -> tuple[Report, int | None]:
    """The mode's run, and its split where it has one."""
    given = scenario(workload, mode, quick=quick, seed=seed, costs=costs)
    if mode.pools:
        given = best_split(given, quick=quick)
    result = simulate(given)
    if result.problems:
        raise AssertionError(f"{mode}: {result.problems}")
    return result, given.train_accelerators if mode.pools else None


def figures(reports: list[Report], splits: dict[str, int]) -> dict[str, Any]:
    wall = {r.mode: r.wall_s for r in reports}
    ceiling = {r.mode: 1 / r.eta for r in reports}
    return {
        r.mode: {
            "wall_s": r.wall_s,
            "eta": r.eta,
            "speedup_vs_sync": wall["sync"] / r.wall_s,
            "speedup_vs_fully_async": wall["fully_async"] / r.wall_s,
            "fully_async_ceiling": ceiling["fully_async"],
            "tokens_lost": r.tokens_lost,
            "update_stall": r.update_stall,
            "stale_share": r.stale_tokens / max(1, r.stale_tokens + r.tokens_trained),
            "idle": r.idle,
            "train_accelerators": splits.get(r.mode),
            "trace": r.trace,
        }
        for r in reports
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="well under a minute: fewer steps, an eighth of the machine"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    parser.add_argument("--seed", type=int, default=0, help="of the simulated runs")
    parser.add_argument("--costs", type=Path, help="a cost model, as uniagent simulate --calibrate prints it")
    args = parser.parse_args()
    costs = cost_model.read(args.costs) if args.costs else COSTS
    started = time.perf_counter()
    sim: dict[str, Any] = {}
    for name, workload in WORKLOADS.items():
        reports, splits = measure(workload, quick=args.quick, seed=args.seed, costs=costs)
        sim[name] = figures(reports, splits)
        print(f"{name}\n{table(reports)}")
        for mode, f in sim[name].items():
            print(f"  {mode:<12} {f['speedup_vs_sync']:.2f} x sync, {f['speedup_vs_fully_async']:.2f} x fully_async")
        print()
    shown = scenario(WORKLOADS["agentic"], Mode.SYNC, quick=args.quick, seed=args.seed, costs=costs)
    line = json.dumps(
        {
            "sim": sim,
            "real": None,
            "accelerators": ACCELERATORS,
            "weight": ACCELERATORS / shown.accelerators,
            "steps": shown.steps,
            "seed": args.seed,
            "took_s": round(time.perf_counter() - started, 1),
            "quick": args.quick,
        }
    )
    if args.out:
        args.out.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
