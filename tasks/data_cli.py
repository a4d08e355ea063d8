"""``uniagent data check FILE``: every row of a sample file, alone or on top of a Task Config; problems by line."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from uniagent.engine.errors import UserError
from uniagent.tasks.config import ENDPOINT, TaskConfigResolver, checked
from uniagent.tasks.data_files import numbered_rows


def main(argv: Sequence[str]) -> int:
    """0 when all rows are good, 1 when some are not; UserError where nothing can be checked."""
    parser = argparse.ArgumentParser(prog="uniagent data", description="Sample files.")
    checking = parser.add_subparsers(required=True, metavar="check").add_parser("check", help="check every row")
    checking.add_argument("file", type=Path, help="samples: JSONL, Parquet, or a saved Hugging Face dataset")
    checking.add_argument("--tasks", type=Path, help="the Task Config they are laid on; left out: shape only")
    args = parser.parse_args(argv)
    counts, problems = check(args.file, TaskConfigResolver.from_file(args.tasks) if args.tasks else None)
    for problem in problems:
        print(problem)
    total = sum(counts.values())
    by_task = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{args.file}: {total} good samples" + (f" ({by_task})" if total else "") + f", {len(problems)} problems")
    return 1 if problems else 0


def check(path: Path, resolver: TaskConfigResolver | None) -> tuple[Counter[str], list[str]]:
    """How many good rows each task has, and one line for every problem."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for number, row in numbered_rows(path):
        where = f"{path}:{number}"
        if isinstance(row, str):
            problems.append(f"{where}: {row}")
            continue
        try:
            unused = dict.fromkeys(ENDPOINT, "unused")
            config = resolver.resolve(row, unused, where=where) if resolver else checked(row, where)
            counts[config.name] += 1
        except UserError as problem:
            problems.extend(str(problem).splitlines())
    if not counts and not problems:
        problems.append(f"{path}: holds no sample")
    return counts, problems
