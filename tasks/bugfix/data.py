"""Samples of the task bugfix: the shipped recipes, or a recipe of one's own, as rows."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from uniagent.engine.errors import UserError, nearest
from uniagent.tasks.bugfix.recipe import Recipe, Repair, read

SPLITS = ("train", "heldout")
INSTRUCTIONS = (
    "The project in the directory `project` has a bug. Find it and repair it, in the project's own source; tests of "
    "your own are welcome, and those that are there can be run with `python3 -m pytest`. The repair is judged by tests "
    "that you do not see, and by those that pass now.\n\n"
)


def shipped() -> list[Path]:
    folder = Path(str(files("uniagent.tasks.bugfix") / "recipes"))
    return sorted(folder.glob("*.jsonl"))


def samples(split: str, seed: int, projects: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The shipped samples, in the order of projects and files; one in five functions is held out. ``projects``: names
    of recipes or paths of recipe files, left out: all that are shipped."""
    if split not in SPLITS:
        raise UserError(f"bugfix has no split {split!r}: {nearest(split, SPLITS)}")
    known = {path.stem: path for path in shipped()}
    for name in known if projects is None else projects:
        path = known.get(name) or Path(name)
        if not path.is_file():
            raise UserError(f"bugfix has no recipe {name!r}: {nearest(name, known)}")
        yield from (row for row in rows(read(path)) if _split(row) == split)


def rows(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Every repair of a recipe as a sample config."""
    for repair in recipe.repairs:
        failing = set(repair.fail_to_pass)
        yield {
            "name": "bugfix",
            "prompt": [{"role": "user", "content": INSTRUCTIONS + repair.statement}],
            "metadata": {
                "instance_id": instance_id(recipe, repair),
                "source": recipe.project.source,
                "requires": list(recipe.project.requires),
                "path": repair.path,
                "function": repair.function,
                "operator": repair.operator,
                "line": repair.line,
                "old": repair.old,
                "new": repair.new,
                "wrong": None if repair.wrong is None else vars_of(repair.wrong),
                "patch": patch(repair),
                "problem_statement": repair.statement,
                "FAIL_TO_PASS": list(repair.fail_to_pass),
                "PASS_TO_PASS": [test for test in recipe.tests if test not in failing],
                "covering": list(repair.covering),
            },
        }


def vars_of(wrong: Any) -> dict[str, Any]:
    return {"line": wrong.line, "old": wrong.old, "new": wrong.new}


def instance_id(recipe: Recipe, repair: Repair) -> str:
    """The same for the same bug, whatever else a recipe holds."""
    key = f"{repair.path}\n{repair.line}\n{repair.old}\n{repair.new}"
    return f"{recipe.project.name}-{repair.operator}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def patch(repair: Repair) -> str:
    """The reference fix as a unified diff without context."""
    fixed, broken = repair.old.splitlines(keepends=True), repair.new.splitlines(keepends=True)
    lines = list(difflib.unified_diff(broken, fixed, f"a/{repair.path}", f"b/{repair.path}", n=0))
    shift = repair.line - 1

    def moved(line: str) -> str:
        if not line.startswith("@@"):
            return line
        words = [word if word[0] not in "+-" else _moved(word, shift) for word in line.split(" ")]
        return " ".join(words)

    return "".join(moved(line) for line in lines)


def _moved(hunk: str, shift: int) -> str:
    start, comma, count = hunk[1:].partition(",")
    return f"{hunk[0]}{int(start) + shift}{comma}{count}"


def _split(row: dict[str, Any]) -> str:
    data = row["metadata"]
    digest = hashlib.sha256(f"{data['source']}\n{data['path']}\n{data['function']}".encode()).digest()
    return "heldout" if digest[0] % 5 == 0 else "train"
