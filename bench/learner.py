"""Speed and memory of one training step, against plain loops and TRL.

    python bench/learner.py [--quick] [--out PATH] [--trl-python PYTHON] [--variants packed,tree] [--rounds N]

bench/learner_variants.py says what the workloads and variants are. Each runs in a process of its own, ``--rounds``
times in turn, the first step of each left out. ``ratios`` are medians over the rounds, each of which compares what ran
next to each other: by wall and by CPU time. ``tokens_per_s`` are real tokens (as they were sampled, padding and sharing
aside) per second of wall time, ``tokens_per_cpu_s`` per second of CPU time, which other work on the machine disturbs
less; ``peak_mib`` is the peak above the memory before the first step; ``vs_trl`` how many times TRL's speed. ``agree``:
all variants of a batch have the same loss and gradient norm. TRL is measured where it is installed (the extra
``oracles``), in this Python or in ``--trl-python``. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

GROUPED, BRANCHED = ("padded", "sorted", "packed", "tree"), ("flat", "nested")
PROGRAM = Path(__file__).with_name("learner_variants.py")
GOALS = {
    "packed / sorted": (1.2, "packed", "sorted"),
    "tree / packed": (1.35, "tree", "packed"),
    "tree / trl": (5.0, "tree", "trl"),
    "nested / flat": (1.6, "nested", "flat"),
}


def run(variant: str, python: str, steps: int, threads: int, quick: bool) -> dict[str, Any]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # no spinning: CPU seconds keep their meaning on a shared machine
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [python, str(PROGRAM), variant, str(steps), str(threads), *(["--quick"] if quick else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"{variant} failed:\n{done.stderr[-2000:]}")
    return json.loads(line.removeprefix("RESULT "))  # type: ignore[no-any-return]


def figures(rounds: list[dict[str, Any]]) -> dict[str, float]:
    steps = [s for r in rounds for s in r["steps"][1:]]
    tokens, first = rounds[0]["tokens"], rounds[0]["steps"][0]
    return {
        "per_s": tokens / statistics.median(s[0] for s in steps),
        "per_cpu_s": tokens / statistics.median(s[1] for s in steps),
        "peak_mib": statistics.median(r["peak_mib"] for r in rounds),
        "loss": first[2],
        "grad_norm": first[3],
        "loss_share": rounds[0]["loss_share"],
    }


def ratio(over: list[dict[str, Any]], under: list[dict[str, Any]], clock: int) -> float:
    """How many times the speed of ``under`` that of ``over`` is, round by round: the median. clock 0: wall, 1: CPU."""
    rounds = [[r["tokens"] / statistics.median(s[clock] for s in r["steps"][1:]) for r in x] for x in (over, under)]
    return float(statistics.median(a / b for a, b in zip(*rounds, strict=True)))


def same(found: list[dict[str, float]], names: tuple[str, ...]) -> bool:
    """TRL rounds what it logs."""
    return all(abs(f[n] - found[0][n]) <= 1e-4 * max(1.0, abs(found[0][n])) for f in found for n in names)


def table(found: dict[str, dict[str, float]]) -> None:
    print(f"{'variant':9} {'tokens/s':>9} {'per CPU s':>10} {'peak MiB':>9} {'loss':>9} {'grad norm':>10}")
    for name, f in found.items():
        print(
            f"{name:9} {f['per_s']:9.0f} {f['per_cpu_s']:10.0f} {f['peak_mib']:9.0f} {f['loss']:9.5f} "
            f"{f['grad_norm']:10.5f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="well under a minute: an eighth of the batch, one step")
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    parser.add_argument("--trl-python", help="a Python that has trl, when this one has not")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variants", default="", help="only these, by commas (default: all)")
    parser.add_argument("--rounds", type=int, default=0, help="default: 3, quick 1")
    args = parser.parse_args()
    steps, rounds = (1, args.rounds or 1) if args.quick else (2, args.rounds or 3)
    pythons = dict.fromkeys((*GROUPED, *BRANCHED), sys.executable)
    if args.trl_python or importlib.util.find_spec("trl"):
        pythons["trl"] = args.trl_python or sys.executable
    if args.variants:
        if unknown := set(args.variants.split(",")) - pythons.keys():
            parser.error(f"--variants: {', '.join(sorted(unknown))}: there are {', '.join(pythons)}")
        pythons = {name: pythons[name] for name in args.variants.split(",")}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    for _ in range(rounds):
        for name, python in pythons.items():
            runs[name].append(run(name, python, steps, args.threads, args.quick))
            taken = [f"{s[0]:.2f} ({s[1]:.2f})" for s in runs[name][-1]["steps"]]
            print(f"{name}: {', '.join(taken)} s a step (CPU)", file=sys.stderr)
    found = {name: figures(r) for name, r in runs.items()}
    table(found)
    ratios = {}
    for name, (goal, over, under) in GOALS.items():
        if over in found and under in found:
            wall, cpu = (ratio(runs[over], runs[under], clock) for clock in (0, 1))
            ratios[name] = {"wall": wall, "cpu": cpu, "goal": goal}
            print(f"{name:16} {wall:5.2f} (CPU {cpu:.2f}), goal {goal}")
    grouped, branched = ([n for n in names if n in found] for names in ((*GROUPED, "trl"), BRANCHED))
    speeds = {name: found[name]["per_s"] for name in grouped if name != "trl"}
    result = {
        "tokens_per_s": speeds,
        "tokens_per_cpu_s": {name: f["per_cpu_s"] for name, f in found.items()},
        "nested_tokens_per_s": {name: found[name]["per_s"] for name in branched},
        "vs_trl": {n: s / found["trl"]["per_s"] for n, s in speeds.items()} if "trl" in found else None,
        "ratios": ratios,
        "peak_mib": {name: f["peak_mib"] for name, f in found.items()},
        "loss_share": found["packed"]["loss_share"] if "packed" in found else None,
        "agree": all(same([found[n] for n in names], ("loss", "grad_norm")) for names in (grouped, branched)),
        "threads": args.threads,
        "quick": args.quick,
    }
    line = json.dumps(result)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
