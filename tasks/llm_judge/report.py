"""``uniagent judge RUN``: what the judge of a run cost and how far its answers agree with each other."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from uniagent.engine.commands import Parser
from uniagent.engine.episode import Episode
from uniagent.engine.errors import UserError
from uniagent.engine.journal import read
from uniagent.engine.storage import plain
from uniagent.tasks.check_judge import fleiss_kappa


def main(argv: Sequence[str]) -> int:
    """A table, or with --json one line of JSON."""
    parser: argparse.ArgumentParser = Parser("judge", "Cost and agreement of the judge of a run (task llm_judge).")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, or its episodes.jsonl")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    args = parser.parse_args(argv)
    path = args.run / "episodes.jsonl" if args.run.is_dir() else args.run
    found = summary(record.episode for record in read(path))
    if not found["sessions"]:
        raise UserError(f"{path}: no session was scored by a judge")
    if args.json:
        print(json.dumps(plain(found)))
    else:
        for name, value in found.items():
            print(f"{name:<14}{'-' if value is None else f'{value:.4g}'}")
    return 0


def summary(episodes: Iterable[Episode]) -> dict[str, Any]:
    """``sessions`` that were judged, ``cost`` and ``tokens`` in total, ``unreadable`` answers, mean ``agreeing`` and
    ``spread``; ``fleiss_kappa`` of pass or fail over the sessions with the most answers, None where it is not defined
    (one answer each, or one verdict for all)."""
    judged = [e for e in episodes if "judge_passes" in e.result.details]
    most = max((len(e.result.details["judge_passes"]) for e in judged), default=0)
    table = [
        Counter(str(bool(p)) for p in e.result.details["judge_passes"])
        for e in judged
        if len(e.result.details["judge_passes"]) == most
    ]
    metric = {name: [e.result.metrics[f"judge_{name}"] for e in judged] for name in _TOTALS + _MEANS}
    return {
        "sessions": len(judged),
        **{name: sum(metric[name]) for name in _TOTALS},
        **{name: fmean(metric[name]) if judged else None for name in _MEANS},
        "answers_each": most,
        "fleiss_kappa": fleiss_kappa(table) if most > 1 else None,
    }


_TOTALS, _MEANS = ("cost", "tokens", "unreadable"), ("agreeing", "spread")
