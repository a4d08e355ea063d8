"""``uniagent tasks check TASKS DATA``: are the samples solvable, and is only the right thing rewarded? See ``check``.

With ``--out`` a report (report.md, report.json), the samples that pass (good.jsonl) and the others with their reasons
(quarantined.jsonl) are written to a folder.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import trio
from attrs import asdict

from uniagent.engine.ports import Json
from uniagent.engine.providers import NodeProviders
from uniagent.tasks.check import Checked, check_samples
from uniagent.tasks.check_judge import agreement, endpoint, opinion
from uniagent.tasks.config import TaskConfigResolver
from uniagent.tasks.data import samples


def main(argv: Sequence[str]) -> int:
    """0 when every sample passes, 1 when some do not; UserError where nothing can be checked."""
    parser = argparse.ArgumentParser(prog="uniagent tasks", description="Task quality.")
    checking = parser.add_subparsers(required=True, metavar="check").add_parser("check", description=__doc__)
    checking.add_argument("tasks", type=Path, help="the Task Config")
    checking.add_argument("data", help="samples: a JSONL file, or NAME/SPLIT of a registered dataset")
    checking.add_argument("--n", type=int, default=100, help="samples checked, the first n")
    checking.add_argument("--seed", type=int, default=0, help="of a registered dataset")
    checking.add_argument("--runs", type=int, default=3, help="of the verifier on each final state")
    checking.add_argument("--jobs", type=int, default=8, help="samples at once (default 8)")
    checking.add_argument("--judge", metavar="URL", help="a chat-completions endpoint that reads the statements")
    checking.add_argument("--judge-model", default="", metavar="NAME", help="its model")
    checking.add_argument("--judge-key", metavar="VARIABLE", help="the environment variable that holds its key")
    checking.add_argument("--judge-runs", type=int, default=3, help="answers taken for each sample (default 3)")
    checking.add_argument("--out", type=Path, help="folder for the report and the sorted samples")
    checking.add_argument("--json", action="store_true", help="print the summary as one JSON line, last")
    args = parser.parse_args(argv)
    rows = list(islice(samples(args.data, seed=args.seed), args.n))
    judge = endpoint("judge", args.judge, args.judge_model, args.judge_key)
    resolver = TaskConfigResolver.from_file(args.tasks)
    ask = partial(opinion, judge=judge, runs=max(args.judge_runs, 1)) if judge else None
    checked = trio.run(_check, rows, resolver, max(args.runs, 1), max(args.jobs, 1), ask)
    report = markdown(args.data, checked)
    print(report)
    if args.out:
        write(args.out, report, checked)
    if args.json:
        print(json.dumps(summary(checked)))
    return 1 if any(c.problems for c in checked) else 0


async def _check(
    rows: Sequence[Mapping[str, Json]], resolver: TaskConfigResolver, runs: int, jobs: int, ask: Any
) -> list[Checked]:
    async with trio.open_nursery() as nursery, httpx.AsyncClient() as client:
        providers = NodeProviders(nursery, {})
        asked = partial(ask, client) if ask else None
        checked = await check_samples(rows, resolver, providers, runs=runs, at_once=jobs, ask=asked)
        nursery.cancel_scope.cancel()
    return checked


def summary(checked: Sequence[Checked]) -> dict[str, Any]:
    """samples, good, quarantined, mean reward by attempt, the slowest verdict in seconds, problems by kind, and how far
    the judge's answers agree (None: it was not asked)."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for one in checked:
        for name, reward in one.rewards.items():
            rewards[name].append(reward)
    bad = sum(bool(one.problems) for one in checked)
    return {
        "samples": len(checked),
        "good": len(checked) - bad,
        "quarantined": bad,
        "mean_reward": {name: sum(some) / len(some) for name, some in rewards.items()},
        "problems": dict(Counter(problem.partition(":")[0] for one in checked for problem in one.problems)),
        "judge": agreement([one.opinion for one in checked if one.opinion])
        if any(c.opinion for c in checked)
        else None,
        "slowest_verify_s": max((one.slowest_verify_s for one in checked), default=0.0),
    }


def markdown(source: str, checked: Sequence[Checked]) -> str:
    totals = summary(checked)
    lines = [
        f"# Check of {source}",
        "",
        f"{totals['good']} of {totals['samples']} samples are good; the slowest verdict took "
        f"{totals['slowest_verify_s']:.3f} s.",
        "",
        "| attempt | mean reward |",
        "|---|---|",
        *(f"| {name} | {mean:.3f} |" for name, mean in totals["mean_reward"].items()),
    ]
    if totals["judge"]:
        lines += ["", "| the judge's answers | |", "|---|---|"]
        lines += [
            f"| {name} | {'–' if value is None else round(value, 3)} |" for name, value in totals["judge"].items()
        ]
    bad = [one for one in checked if one.problems]
    if bad:
        lines += ["", "| sample | problem |", "|---|---|"]
        lines += [f"| {one.number} | {problem} |" for one in bad for problem in one.problems]
    return "\n".join(lines)


def write(out: Path, report: str, checked: Sequence[Checked]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    found = [
        {
            "sample": c.number,
            "problems": c.problems,
            "rewards": c.rewards,
            "slowest_verify_s": c.slowest_verify_s,
            "judge": asdict(c.opinion) if c.opinion else None,
        }
        for c in checked
    ]
    (out / "report.md").write_text(report + "\n", encoding="utf-8")
    (out / "report.json").write_text(json.dumps({**summary(checked), "checked": found}, indent=1) + "\n")
    _write_rows(out / "good.jsonl", (c.row for c in checked if not c.problems))
    quarantined = ({"problems": c.problems, "sample": c.row} for c in checked if c.problems)
    _write_rows(out / "quarantined.jsonl", quarantined)


def _write_rows(path: Path, rows: Iterable[Mapping[str, Json]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
