"""What a curriculum is worth: steps of training to a target, by strategy, against uniform sampling.

    python bench/curriculum.py [--quick] [--out PATH] [--real SEEDS] [--keep FOLDER]

A simulated learner with a known ability curve (item response: a sample of difficulty b is solved with probability
1 / (1 + exp(b - ability))) has one ability a family. A family's ability grows with the learnable samples seen: by the
variance of the outcomes of each of its groups, which is what a comparison within a group can teach. Half of the
families are impossible or trivial. The curriculum is the one that training uses. The target is a mean pass rate of
0.8 on the samples of the families that can be learned; ``speedup_vs_uniform`` is the ratio of the steps taken, by the
geometric mean over seeds, with a 95 % interval.

Without --quick also for real: shell_quest, four of its seven families made impossible or trivial (a verifier that
never or always passes), the shipped tiny model; steps until 80 % of held-out jobs of the other families succeed
(between evaluations by interpolation), uniform against the default strategy. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import tomli_w
from attrs import evolve
from rich.console import Console

from uniagent.engine import config_file, run_folder
from uniagent.engine.config import Curriculum as Table
from uniagent.engine.curriculum.curriculum import Curriculum
from uniagent.engine.curriculum.pool import Rows
from uniagent.engine.observe.progress import Lines
from uniagent.engine.registry import BUILTIN
from uniagent.tasks.shell_quest.data import samples

ROOT = Path(__file__).parents[1]
FAMILIES = 8  # half of them dead: two impossible, two trivial
SAMPLES = 50  # a family
GROUPS, SIZE = 16, 8  # of a batch
RATE = 0.6  # ability a step, were all of the batch of one family and at its most learnable
TARGET = 0.8
MOST = 2000  # steps
UNIFORM = Table(strategy="uniform", exclude_trials=0)
DEAD = {"largest": "operator:truth", "smallest": "operator:truth", "copy": "operator:not_", "delword": "operator:not_"}
STEPS, EVERY = 30, 3  # of the real part: at most, and between evaluations
ALIVE = ("count", "find", "rename")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the simulated learner alone, few seeds")
    parser.add_argument("--out", type=Path, help="write the JSON line there too")
    parser.add_argument("--real", type=int, default=3, metavar="SEEDS", help="seeds of the real part")
    parser.add_argument("--keep", type=Path, help="folder for the real part's runs")
    args = parser.parse_args()
    found = simulate(seeds=5 if args.quick else 20)
    found["real"] = None
    if not args.quick and args.real:
        with tempfile.TemporaryDirectory() as scratch:
            found["real"] = for_real(args.keep or Path(scratch), args.real)
    line = json.dumps(found)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)


# ---------------------------------------------------------------- the simulated learner


def simulate(seeds: int) -> dict[str, Any]:
    steps = {name: [learn(Table(strategy=name), seed) for seed in range(seeds)] for name in BUILTIN["strategies"]}
    plain = [learn(UNIFORM, seed) for seed in range(seeds)]
    print(f"steps to a pass rate of {TARGET} (simulated, {seeds} seeds); uniform: {mean(plain):.0f}")
    print(f"{'strategy':<14}{'steps':>8}{'speedup':>9}   95 %")
    speedups: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for name, taken in steps.items():
        speedups[name], intervals[name] = ratio(plain, taken)
        low, high = intervals[name]
        print(f"{name:<14}{mean(taken):>8.0f}{speedups[name]:>9.2f}   {low:.2f} - {high:.2f}")
    return {
        "speedup_vs_uniform": {name: round(value, 3) for name, value in speedups.items()},
        "interval": {name: [round(v, 3) for v in pair] for name, pair in intervals.items()},
        "default": Table().strategy,
        "default_speedup": round(speedups[Table().strategy], 3),
        "steps": {"uniform, nothing left out": mean(plain), **{name: mean(taken) for name, taken in steps.items()}},
        "seeds": seeds,
    }


def learn(table: Table, seed: int) -> int:
    """Steps that a learner takes to the target under a curriculum; MOST if it does not get there."""
    draw = np.random.default_rng(seed)
    alive = FAMILIES // 2
    centre = np.array([*np.linspace(1.5, 3.0, alive), 40.0, 40.0, -40.0, -40.0])
    family = np.repeat(np.arange(FAMILIES), SAMPLES)
    difficulty = centre[family] + draw.normal(0, 1.5, len(family))
    rows = [{"name": "item", "metadata": {"family": f"f{f}"}, "n": i} for i, f in enumerate(family)]
    curriculum = Curriculum(Rows(rows, table.family), table, seed=seed)
    ability = np.zeros(FAMILIES)
    for step in range(MOST):
        solved = 1 / (1 + np.exp(difficulty - ability[family]))
        if solved[family < alive].mean() >= TARGET:
            return step
        batch = [(number, row["n"]) for number, row in islice(curriculum, GROUPS)]
        for number, item in batch:
            outcomes = (draw.random(SIZE) < solved[item]).tolist()
            share = sum(outcomes) / SIZE
            ability[family[item]] += RATE / GROUPS * 4 * share * (1 - share)
            curriculum.done(number, outcomes)
        curriculum.advance(step + 1)
    return MOST


def ratio(base: Sequence[float], taken: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Geometric mean of base / taken, and its 95 % interval (normal, of the logarithm; pairs by seed)."""
    logs = [math.log(b / t) for b, t in zip(base, taken, strict=True)]
    centre = mean(logs)
    half = 1.96 * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(centre), (math.exp(centre - half), math.exp(centre + half))


# ---------------------------------------------------------------- for real


def for_real(place: Path, seeds: int) -> dict[str, Any]:
    place.mkdir(parents=True, exist_ok=True)
    write_data(place)
    taken: dict[str, list[float | None]] = {"uniform": [], Table().strategy: []}
    curves: dict[str, list[list[float]]] = {name: [] for name in taken}
    for seed in range(seeds):
        for name, steps in taken.items():
            curve = train(place, name, seed)
            curves[name].append(curve)
            steps.append(reached(curve))
            when = "not reached" if steps[-1] is None else f"{steps[-1]:.1f} steps"
            print(f"real, seed {seed}, {name}: {when}; success {[round(s, 2) for s in curve]}", flush=True)
    pairs = [(b, t) for b, t in zip(*taken.values(), strict=True) if b is not None and t is not None]
    speedup, interval = ratio([b for b, _ in pairs], [t for _, t in pairs]) if pairs else (None, None)
    return {"steps": taken, "speedup_vs_uniform": speedup, "interval": interval, "curves": curves}


def reached(curve: Sequence[float]) -> float | None:
    """Steps to the target, by interpolation between evaluations."""
    for i, (before, after) in enumerate(pairwise(curve)):
        if after >= TARGET:
            return EVERY * (i + max(0.0, TARGET - before) / (after - before)) if after > before else EVERY * i
    return None


def train(place: Path, strategy: str, seed: int) -> list[float]:
    """Success on held-out jobs before, and after every EVERY steps until the target is met."""
    config = config_file.load(place / "run.toml", [f"run.seed={seed}", f"curriculum.strategy={strategy}"])
    if strategy == "uniform":
        config = evolve(config, curriculum=evolve(config.curriculum, exclude_trials=0))
    folder = run_folder.create(place / f"{strategy}-{seed}", config, stem="curriculum", now=datetime.now(UTC))
    with Lines(config.run.steps, Console(stderr=True, quiet=True)) as progress:
        from uniagent.engine import run

        summary = run.train(config, folder, progress)
    evals = summary["eval"]
    names = ["before", *(f"step-{n}" for n in range(EVERY, config.run.steps, EVERY)), "after"]
    return [evals[name]["success"] for name in names if name in evals]


def write_data(place: Path) -> None:
    """Jobs of seven families in equal parts; the verifier of the dead ones always or never passes."""
    tasks = (ROOT / "examples" / "quickstart_tasks.toml").read_text()
    (place / "tasks.toml").write_text(tasks)
    for split, count, families in (("train", 1400, (*ALIVE, *DEAD)), ("heldout", 120, ALIVE)):
        rows = [
            row for family in families for row in islice(samples(split, 1, families=(family,)), count // len(families))
        ]
        lines = [json.dumps(dead(row) if split == "train" else row) + "\n" for row in rows]
        (place / f"{split}.jsonl").write_text("".join(lines))
    document = {
        "run": {"steps": STEPS},
        "model": {"path": "builtin:tiny-shell"},
        "engine": {"context": 512, "gather_ms": 4.0},
        "tasks": {"file": "tasks.toml", "data": "train.jsonl"},
        "rollout": {"groups_per_step": 8, "group_size": 8, "max_sessions": 64},
        "sandbox": {"options": {"local": {"storage": "memory", "warm": 16}}},
        "learner": {"loss": "grpo", "aggregation": "token_mean", "lr": 3e-4, "warmup_steps": 5},
        "eval": {"data": "heldout.jsonl", "n": 120, "every": EVERY, "greedy": False},
    }
    (place / "run.toml").write_text(tomli_w.dumps(document))


def dead(row: dict[str, Any]) -> dict[str, Any]:
    verifier = DEAD.get(row["metadata"]["family"])
    return row if verifier is None else {**row, "task": "function", "verifier": {"function": verifier}}


if __name__ == "__main__":
    main()
