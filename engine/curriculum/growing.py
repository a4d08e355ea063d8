"""Capability growth: samples and families whose pass rate moved with the policy, told by a test and not by eye.

Each is tested for a trend of its outcomes over the policy versions of one run (``significance.trend``), and the
p-values are adjusted for their number, so that of those said to move a share of at most ``level`` is expected not to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve, frozen

from uniagent.engine.curriculum.history import Cell
from uniagent.engine.curriculum.significance import false_discovery, trend, wilson


@frozen
class Growth:
    """``first`` and ``last`` are pass rates in the earlier and the later half of the versions; ``q`` is p adjusted."""

    name: str
    family: str
    passes: int
    trials: int
    versions: tuple[int, int]
    low: float
    high: float
    first: float
    last: float
    z: float
    p: float
    q: float
    moved: bool


def growths(groups: Mapping[str, Sequence[Cell]], *, level: float = 0.05) -> list[Growth]:
    """By name, the cells of one run each; the surest change first."""
    found = [_growth(name, cells) for name, cells in groups.items() if cells]
    adjusted = false_discovery([g.p for g in found])
    tested = [evolve(g, q=q, moved=q <= level) for g, q in zip(found, adjusted, strict=True)]
    return sorted(tested, key=lambda g: (g.p, g.name))


def _growth(name: str, cells: Sequence[Cell]) -> Growth:
    passes, trials = sum(c.passes for c in cells), sum(c.trials for c in cells)
    versions = sorted(c.version for c in cells)
    middle = (versions[0] + versions[-1]) / 2
    z, p = trend([c.version for c in cells], [c.passes for c in cells], [c.trials for c in cells])
    low, high = wilson(passes, trials)
    return Growth(
        name=name,
        family=cells[0].family,
        passes=passes,
        trials=trials,
        versions=(versions[0], versions[-1]),
        low=low,
        high=high,
        first=_rate(c for c in cells if c.version <= middle),
        last=_rate(c for c in cells if c.version >= middle),
        z=z,
        p=p,
        q=p,
        moved=False,
    )


def _rate(cells: Iterable[Cell]) -> float:
    some = list(cells)
    return sum(c.passes for c in some) / max(1, sum(c.trials for c in some))
