"""``uniagent data check FILE``: every row of a sample file against a Task Config, problems by line number."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from uniagent.engine.errors import UserError
from uniagent.tasks.config import ENDPOINT, TaskConfigResolver
from uniagent.tasks.data import numbered_rows


def main(argv: Sequence[str]) -> int:
    """0 when all rows are good, 1 when some are not; UserError where nothing can be checked."""
    parser = argparse.ArgumentParser(prog="uniagent data check", description=__doc__)
    parser.add_argument("file", type=Path, help="samples, one JSON object a line")
    parser.add_argument("--tasks", type=Path, required=True, help="the Task Config they are laid on")
    args = parser.parse_args(argv)
    counts, problems = check(args.file, TaskConfigResolver.from_file(args.tasks))
    for problem in problems:
        print(problem)
    total = sum(counts.values())
    by_task = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{args.file}: {total} good samples" + (f" ({by_task})" if total else "") + f", {len(problems)} problems")
    return 1 if problems else 0


def check(path: Path, resolver: TaskConfigResolver) -> tuple[Counter[str], list[str]]:
    """How many good rows each task has, and one line for every problem."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for number, row in numbered_rows(path):
        where = f"{path}:{number}"
        if isinstance(row, str):
            problems.append(f"{where}: {row}")
            continue
        try:
            counts[resolver.resolve(row, dict.fromkeys(ENDPOINT, "unused"), where=where).name] += 1
        except UserError as problem:
            problems.extend(str(problem).splitlines())
    if not counts and not problems:
        problems.append(f"{path}: holds no sample")
    return counts, problems
