"""A project's samples in compact form: bugs as edits, tests as numbers. Holds no source of the project but the lines
that the bugs change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

from uniagent.tasks.bugfix.mutate import Edit
from uniagent.tasks.bugfix.project import Project


@frozen
class Wrong:
    """An edit of the right file that looks like a fix and is none."""

    line: int
    old: str
    new: str


@frozen
class Repair:
    """One bug. ``fail_to_pass`` and ``covering`` (the others that call the function) are ids of pytest."""

    path: str
    function: str
    operator: str
    line: int
    old: str
    new: str
    fail_to_pass: tuple[str, ...] = field(repr=False)
    covering: tuple[str, ...] = field(repr=False)
    statement: str = field(repr=False)
    wrong: Wrong | None = field(default=None, repr=False)

    @property
    def edit(self) -> Edit:
        return Edit(self.line, self.old, self.new)


@frozen
class Recipe:
    """All of a project. ``tests`` pass without a bug, and but for ``fail_to_pass`` with it; ``rejected`` counts bugs by
    reason; ``cpu_s`` is what one run of all tests takes."""

    project: Project
    tests: tuple[str, ...] = field(repr=False)
    repairs: tuple[Repair, ...] = field(repr=False)
    rejected: Mapping[str, int] = field(factory=dict)
    cpu_s: float = 0.0


def write(recipe: Recipe, path: Path) -> None:
    numbers = {test: number for number, test in enumerate(recipe.tests)}
    rows = []
    for repair in recipe.repairs:
        row: dict[str, Any] = asdict(repair)
        row["fail_to_pass"] = _ranges(numbers[test] for test in repair.fail_to_pass)
        row["covering"] = _ranges(numbers[test] for test in repair.covering)
        rows.append(json.dumps(row, ensure_ascii=False))
    head = {
        "source": recipe.project.source,
        "requires": recipe.project.requires,
        "cpu_s": round(recipe.cpu_s, 2),
        "rejected": recipe.rejected,
        "tests": recipe.tests,
    }
    path.write_text("\n".join([json.dumps(head, ensure_ascii=False), *rows]) + "\n", encoding="utf-8")


def read(path: Path) -> Recipe:
    """A file of ``write``."""
    first, *rest = path.read_text(encoding="utf-8").splitlines()
    head = json.loads(first)
    tests = tuple(head["tests"])
    repairs = []
    for line in rest:
        row = json.loads(line)
        row |= {key: tuple(tests[n] for n in _numbers(row[key])) for key in ("fail_to_pass", "covering")}
        row["wrong"] = Wrong(**row["wrong"]) if row["wrong"] else None
        repairs.append(Repair(**row))
    project = Project(head["source"], tuple(head["requires"]))
    return Recipe(project, tests, tuple(repairs), head["rejected"], head["cpu_s"])


def _ranges(numbers: Iterable[int]) -> str:
    """``0-3,7``"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _numbers(text: str) -> Sequence[int]:
    found: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
