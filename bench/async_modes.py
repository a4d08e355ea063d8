"""Asynchronous modes against synchronous training, on a simulated machine: the real scheduler, admission, router and
session code on a virtual clock.

    python bench/async_modes.py [--quick] [--out PATH] [--seed N] [--costs JSON]

Workload ``agentic``: lognormal turns (5 to 100) and tool times, growing fourfold in tokens over the run; ``reasoning``:
one long answer a session. Modes: ``sync``, ``one_step_off`` and ``fully_async`` (two pools, no change of roles: the
baselines), ``colocated``, ``separate``. Each mode gets its best static split (with two pools) and its best number of
groups under way (``staleness_threshold``), by trained tokens a second in shorter runs of the same workload. All have
one staleness bound, batch, engine, router, limit by memory and the same sessions. The machine is
64 accelerators, simulated as a share of them with that share of the sessions (``weight``). ``bench/async_real.py`` is
the real part: the quickstart with a slow tool, and whether the cost model predicts it. ``--part`` leaves one out
(null). The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import async_real  # type: ignore[import-not-found]
from attrs import evolve

from uniagent.engine.simulate import costs as cost_model
from uniagent.engine.simulate.costs import Costs
from uniagent.engine.simulate.report import Report, table
from uniagent.engine.simulate.scenario import Mode, Scenario
from uniagent.engine.simulate.workload import Workload
from uniagent.engine.simulate.world import simulate

ACCELERATORS = 64
THRESHOLDS = (2.0, 3.0, 4.0)  # tried for every mode that has one
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
    share, steps, groups = (8, 16, 4) if quick else (16, 200, 8)
    return Scenario(
        mode=mode,
        accelerators=share,
        train_accelerators=costs.accelerators,
        steps=steps,
        seed=seed,
        groups_per_step=groups,
        group_size=8,
        staleness_threshold=3.0,
        memory_share=0.5,
        max_staleness=8,
        costs=costs,
        workload=evolve(workload, samples=steps * groups),
    )


def best(given: Scenario, *, quick: bool) -> Scenario:
    """The split (up to half of the machine for training), and then the threshold, with most trained tokens a second."""
    each = given.costs.accelerators
    steps = given.steps // 4 if quick else given.steps // 10
    thresholds = THRESHOLDS[-1:] if quick else THRESHOLDS
    short = evolve(given, steps=steps, workload=evolve(given.workload, samples=steps * given.groups_per_step))
    chosen: dict[str, Any] = {}
    if given.mode.pools:
        splits = range(each, given.accelerators // 2 + each, each)
        chosen["train_accelerators"] = max(splits, key=lambda n: rate(evolve(short, train_accelerators=n)))
    if given.mode.stale:
        chosen["staleness_threshold"] = max(
            thresholds, key=lambda t: rate(evolve(short, **chosen, staleness_threshold=t))
        )
    return evolve(given, **chosen)


def rate(scenario: Scenario) -> float:
    return simulate(scenario).tokens_per_s


def measure(workload: Workload, *, quick: bool, seed: int, costs: Costs) -> list[tuple[Report, Scenario]]:
    one = functools.partial(run_mode, workload, quick=quick, seed=seed, costs=costs)
    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(one, Mode))


def run_mode(workload: Workload, mode: Mode, *, quick: bool, seed: int, costs: Costs) -> tuple[Report, Scenario]:
    """The mode's run, at its best split and threshold."""
    given = best(scenario(workload, mode, quick=quick, seed=seed, costs=costs), quick=quick)
    result = simulate(given)
    if result.problems:
        raise AssertionError(f"{mode}: {result.problems}")
    return result, given


def figures(runs: list[tuple[Report, Scenario]]) -> dict[str, Any]:
    reports = [r for r, _ in runs]
    wall = {r.mode: r.wall_s for r in reports}
    ceiling = {r.mode: 1 / r.eta for r in reports}
    return {
        r.mode: {
            "wall_s": r.wall_s,
            "eta": r.eta,
            "eta_admitted": r.eta_admitted,
            "speedup_vs_sync": wall["sync"] / r.wall_s,
            "speedup_vs_fully_async": wall["fully_async"] / r.wall_s,
            "fully_async_ceiling": ceiling["fully_async"],
            "tokens_lost": r.tokens_lost,
            "update_stall": r.update_stall,
            "stale_share": r.stale_tokens / max(1, r.stale_tokens + r.tokens_trained),
            "gaps": r.gaps,
            "places": r.places,
            "train_accelerators": given.train_accelerators if given.mode.pools else None,
            "staleness_threshold": given.threshold,
            "trace": r.trace,
        }
        for r, given in runs
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="well under a minute: fewer steps, an eighth of the machine"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    parser.add_argument("--seed", type=int, default=0, help="of the simulated runs")
    parser.add_argument("--costs", type=Path, help="a cost model, as uniagent simulate --calibrate prints it")
    parser.add_argument("--part", choices=("both", "sim", "real"), default="both")
    args = parser.parse_args()
    costs = cost_model.read(args.costs) if args.costs else COSTS
    started = time.perf_counter()
    sim: dict[str, Any] = {}
    for name, workload in WORKLOADS.items() if args.part != "real" else ():
        runs = measure(workload, quick=args.quick, seed=args.seed, costs=costs)
        sim[name] = figures(runs)
        print(f"{name}\n{table([r for r, _ in runs])}")
        for mode, f in sim[name].items():
            gaps = ", ".join(f"{k} {v:.1%}" for k, v in f["gaps"].items())
            print(
                f"  {mode:<12} {f['speedup_vs_sync']:.2f} x sync, {f['speedup_vs_fully_async']:.2f} x fully_async "
                f"(ceiling {f['fully_async_ceiling']:.2f}); train on {f['train_accelerators']}, threshold "
                f"{f['staleness_threshold']:g}, stale {f['stale_share']:.2%}; 1 - eta: {gaps}"
            )
        print()
    real = None
    if args.part != "sim":
        with tempfile.TemporaryDirectory() as folder:
            size = async_real.QUICK if args.quick else async_real.FULL
            modes = ("sync", "colocated") if args.quick else tuple(async_real.MODES)
            real = async_real.measure(Path(folder), size, modes, held_out=not args.quick)
    shown = scenario(WORKLOADS["agentic"], Mode.SYNC, quick=args.quick, seed=args.seed, costs=costs)
    line = json.dumps(
        {
            "sim": sim,
            "real": real,
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
