"""The keys that repair tasks have in the section ``verifier``, and the leak guard made from a row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from attrs import field, frozen
from attrs.validators import gt, optional

from uniagent.engine.ports import Json
from uniagent.tasks.config import TaskConfig
from uniagent.tasks.leakage import Consequence, Guard, origin
from uniagent.tasks.structure import structure

SHARE = 0.9  # of the verifier's time, for the tests
ORIGIN_KEYS = ("distribution", "distributions", "package", "packages", "fix_commit", "fix_commits", "mirrors", "docs")


@frozen
class RepairOptions:
    """``tests_timeout_s``: tests that take longer are failed ones (left out: nine tenths of timeout_s). ``guard``: the
    leak guard, which needs python3 in the sandbox; ``leakage``: what its findings do."""

    tests_timeout_s: float | None = field(default=None, validator=optional(gt(0)))
    guard: bool = True
    leakage: Consequence = field(factory=Consequence)


def repair_options(config: TaskConfig) -> RepairOptions:
    """Checked; raises UserError."""
    return structure(RepairOptions, config.verifier.options, f"task {config.name!r}: verifier")


def tests_timeout_s(config: TaskConfig, options: RepairOptions) -> float:
    return options.tests_timeout_s or SHARE * config.verifier.timeout_s


def guard(
    row: Mapping[str, Json],
    *,
    repo: str,
    head: str,
    date: str,
    problem: str,
    tests: tuple[str, ...],
    root: PurePosixPath,
    consequence: Consequence,
) -> Guard:
    """The guard of one row. The distribution's name is the row's to give: images hold the repository itself installed,
    and taking copies of a distribution away would take that."""
    known = {key: row[key] for key in ORIGIN_KEYS if key in row}
    where = origin({"repo": repo, "base_commit": head, "base_date": date, **known}, where="the row")
    return Guard(where, tests=tests, problem=problem, root=root, consequence=consequence)
