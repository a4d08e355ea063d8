"""The real part of ``bench/async_modes.py``: quickstart runs whose tool takes a while, in each mode, and whether the
cost model that is fitted to some of them predicts the others.

Every run is a process (``uniagent train``; ``torchrun`` with three ranks for separate), without evaluations; wall-clock
is that of ``metrics.jsonl``, from the start of the run to the end of a step. The cost model is fitted to the sync runs
at the latencies 0 and ``LATENCY_S`` and predicts all modes at ``HELD_OUT_S``.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from uniagent.engine.journal import read
from uniagent.engine.simulate import costs as cost_model
from uniagent.engine.simulate.costs import Costs
from uniagent.engine.simulate.scenario import Mode, Scenario
from uniagent.engine.simulate.workload import Workload
from uniagent.engine.simulate.world import simulate

ROOT = Path(__file__).parents[1]
LATENCY_S, HELD_OUT_S, SIGMA = 0.5, 1.0, 1.0
DRAWS = 8  # simulated runs of a prediction
GOAL = 0.7  # success, mean of the last three batches
ASYNC = ("rollout.staleness_threshold=1", "rollout.max_staleness=4")
MODES: dict[str, tuple[str, ...]] = {
    "sync": (),
    "colocated": ("rollout.mode=colocated", *ASYNC),
    "separate": ("rollout.mode=separate", "placement.train_ranks=1", *ASYNC),
}


@frozen
class Size:
    """``groups`` a step."""

    steps: int
    groups: int
    seeds: int


FULL, QUICK = Size(60, 16, 3), Size(3, 4, 1)


def train(folder: Path, mode: str, latency_s: float, seed: int, size: Size) -> Path:
    """One run; its folder."""
    run = folder / f"{mode}-{latency_s:g}-{seed}"
    tasks = (ROOT / "examples" / "quickstart_tasks.toml").read_text()
    slow = f'name = "slow_shell:SlowShell", latency_s = {latency_s}, sigma = {SIGMA}'
    changed = tasks.replace('name = "stateful_shell"', slow)
    assert changed != tasks
    file = folder / f"tasks-{latency_s:g}.toml"
    file.write_text(changed)
    sets = [
        f"run.steps={size.steps}",
        f"run.seed={seed}",
        f"rollout.groups_per_step={size.groups}",
        "rollout.max_sessions=256",
        f"tasks.file={file}",
        "eval.data=''",
        *MODES[mode],
    ]
    arguments = ["train", str(ROOT / "examples" / "quickstart.toml"), "--run-dir", str(run)]
    arguments += [part for s in sets for part in ("--set", s)]
    command = [sys.executable, "-m", "uniagent.engine", *arguments]
    if mode == "separate":
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
        command = [sys.executable, *launch, *command[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "bench")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return run


def steps(run: Path) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "success" in line]


def seen(run: Path) -> dict[str, Any]:
    lines = steps(run)
    recent = [statistics.fmean(x["success"] for x in lines[max(0, i - 2) : i + 1]) for i in range(len(lines))]
    clock = [x["wall_s"] for x in lines]
    return {
        "wall_s": clock[-1],
        "success": recent[-1],
        "goal_s": next((t for t, s in zip(clock, recent, strict=True) if s >= GOAL), None),
        "tool_share": tool_share(run),
    }


def tool_share(run: Path) -> float:
    """Of a session's time, what its agent does not spend in the engine."""
    times = [r.episode.timings for r in read(run / "episodes.jsonl")]
    return sum(max(0.0, t["agent"] - t["engine"]) for t in times if "agent" in t) / sum(t["total"] for t in times)


# ------------------------------------------------------------ the cost model


def fit(runs: Sequence[tuple[Path, float]]) -> tuple[Costs, Workload]:
    """From runs in sync mode, each with its latency."""
    each = [cost_model.calibrate(run)[0] for run, _ in runs]
    batches, seconds = zip(*(cost_model.concurrency(run) for run, _ in runs), strict=True)
    slope = max(0.0, (seconds[-1] - seconds[0]) / (batches[-1] - batches[0])) if batches[0] != batches[-1] else 0.0
    base = max(seconds[0] / 10, seconds[0] - slope * batches[0])
    mean = statistics.fmean
    fitted = evolve(
        each[0],
        decode_base_s=base,
        decode_request_s=slope or (mean(seconds) - base) / mean(batches),
        decode_kv_s=0.0,
        prefill_token_s=0.0,  # inside decode
        learner_step_s=mean(c.learner_step_s for c in each),
        learner_token_s=mean(c.learner_token_s for c in each),
        sandbox_start_s=mean(c.sandbox_start_s for c in each),
        sandbox_exec_s=each[0].sandbox_exec_s,  # of the run without latency
    )
    return fitted, workload([run for run, _ in runs])


def workload(runs: Sequence[Path]) -> Workload:
    episodes = [r.episode for run in runs for r in read(run / "episodes.jsonl") if r.episode.export.trajectories]
    turns = [len(e.export.fates) for e in episodes]
    answers = statistics.fmean(turns)
    sampled = statistics.fmean(e.export.ledger.sampled for e in episodes)
    length = statistics.fmean(sum(len(t.token_ids) for t in e.export.trajectories) for e in episodes)
    prompt = statistics.fmean(e.export.trajectories[0].actions[0].start for e in episodes)
    observed = max(1.0, (length - prompt - sampled) / max(1.0, answers - 1))
    return Workload(
        prompt_tokens=round(prompt),
        turns=answers,
        turns_sigma=statistics.pstdev(math.log(n) for n in turns),
        turns_min=min(turns),
        turns_max=max(turns),
        answer_tokens=sampled / answers,
        answer_sigma=0.3,
        tool_tokens=observed,
        tool_sigma=SIGMA,
        context=512,
    )


def predicted_s(costs: Costs, given: Workload, mode: str, latency_s: float, size: Size) -> float:
    """Mean of several draws: with few steps a real run is one of a wide distribution."""
    scenario = Scenario(
        mode=Mode(mode),
        accelerators=3 if mode == "separate" else 1,
        train_accelerators=1,
        steps=size.steps,
        groups_per_step=size.groups,
        max_sessions=256,
        staleness_threshold=1.0,
        max_staleness=4,
        costs=evolve(costs, accelerators=1, kv_tokens=64 * 512),
        workload=evolve(given, tool_s=latency_s, samples=size.steps * size.groups),
    )
    return statistics.fmean(simulate(evolve(scenario, seed=seed)).wall_s for seed in range(DRAWS))


def measure(folder: Path, size: Size, modes: Sequence[str] = tuple(MODES), *, held_out: bool = True) -> dict[str, Any]:
    """``modes``: latency -> mode -> means over the seeds; ``prediction``: mode -> seen, predicted, error."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for latency in (LATENCY_S, 0.0):
        for mode in modes:
            runs = [seen(train(folder, mode, latency, seed, size)) for seed in range(size.seeds)]
            found.setdefault(f"{latency:g}", {})[mode] = {
                name: statistics.fmean(r[name] for r in runs) if all(r[name] is not None for r in runs) else None
                for name in runs[0]
            }
            print(f"real, latency {latency:g} s, {mode}: {found[f'{latency:g}'][mode]}", flush=True)
    if not held_out:
        return {"modes": found, "prediction": None}
    costs, given = fit([(folder / f"sync-{t:g}-0", t) for t in (0.0, LATENCY_S)])
    prediction = {}
    for mode in modes:
        real = seen(train(folder, mode, HELD_OUT_S, 0, size))["wall_s"]
        guess = predicted_s(costs, given, mode, HELD_OUT_S, size)
        prediction[mode] = {"seen_s": real, "predicted_s": guess, "error": guess / real - 1}
        print(f"held out, latency {HELD_OUT_S:g} s, {mode}: {prediction[mode]}", flush=True)
    return {"modes": found, "prediction": prediction}
