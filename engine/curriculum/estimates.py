"""Pass rates that forget: what trials say about samples and families under the policy of now.

A trial made ``a`` policy versions ago counts ``2 ** (-a / half_life)``. A sample borrows ``PRIOR`` trials from its
family and a family from a fair coin, so that what was never tried has an estimate too. Whether the *recent* rate is
exactly 0 or 1 is a matter of whole counts and does not decay. Knows no rows and no strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from uniagent.engine.ports import Json

Numbers = npt.NDArray[np.float64]
PRIOR = 2.0  # trials that an estimate borrows
FAST = 4.0  # the rate of late forgets this much faster; its distance to the slow one is growth


@frozen(eq=False)
class Estimates:
    """Of N entries, each [N]: ``rate`` of passes, ``growth`` of it of late, ``trials`` that still count, ``share`` of
    the data (sums to 1), ``family`` as an index into ``families``."""

    rate: Numbers
    growth: Numbers
    trials: Numbers
    share: Numbers
    family: npt.NDArray[np.int64]
    families: tuple[str, ...]


class Tallies:
    """Decayed counts of N things, and how long each has had one outcome only."""

    def __init__(self, n: int, half_life: float) -> None:
        self.half_life = half_life
        self.version = np.zeros(n, np.int64)  # that the counts are as of
        self.slow, self.fast = np.zeros((n, 2)), np.zeros((n, 2))  # passes, trials
        self.streak = np.zeros(n, np.int64)  # trials in a row of one outcome, by whole groups
        self.solved = np.zeros(n, np.bool_)  # that outcome

    def __len__(self) -> int:
        return len(self.version)

    def grow(self, n: int) -> None:
        """Room for n things."""
        more = n - len(self)
        for name in ("version", "slow", "fast", "streak", "solved"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros((more, *old.shape[1:]), old.dtype)]))

    def add(self, i: int, outcomes: Sequence[bool], version: int, weight: float = 1.0) -> None:
        """One group's outcomes. A group with both outcomes ends the streak; one that counts less, because another
        policy made it, says nothing of the recent rate."""
        if not outcomes:
            return
        age = version - self.version[i]
        self.slow[i] *= 0.5 ** (age / self.half_life)
        self.fast[i] *= 0.5 ** (age * FAST / self.half_life)
        self.version[i] = version
        for counts in (self.slow, self.fast):
            counts[i] += weight * sum(outcomes), weight * len(outcomes)
        if weight < 1:
            return
        if len(set(outcomes)) > 1:
            self.streak[i] = 0
        else:
            same = self.streak[i] > 0 and bool(self.solved[i]) == outcomes[0]
            self.streak[i] = (self.streak[i] if same else 0) + len(outcomes)
            self.solved[i] = outcomes[0]

    def counts(self, version: int) -> tuple[Numbers, Numbers]:
        """Slow and fast (passes, trials), each [N, 2], as they count at a version."""
        age = (version - self.version)[:, None]
        return self.slow * 0.5 ** (age / self.half_life), self.fast * 0.5 ** (age * FAST / self.half_life)

    def state(self) -> list[list[Json]]:
        """Of what was tried, as plain JSON: [index, version, slow, fast, streak, solved]."""
        tried = np.flatnonzero(self.slow[:, 1])
        columns = (tried, *(a[tried] for a in (self.version, self.slow, self.fast, self.streak, self.solved)))
        return [list(row) for row in zip(*(c.tolist() for c in columns), strict=True)]

    def restore(self, state: Sequence[Sequence[Json]]) -> None:
        for i, version, slow, fast, streak, solved in state:
            self.version[i], self.slow[i], self.fast[i] = version, slow, fast
            self.streak[i], self.solved[i] = streak, solved


def estimates(
    samples: Tallies,
    families: Tallies,
    family: npt.NDArray[np.int64],
    names: Sequence[str],
    share: Numbers,
    version: int,
) -> Estimates:
    """What is known at a version. samples [N], families [F], family [N] -> Estimates of N entries."""
    slow, fast = families.counts(version)
    family_rate = (slow[:, 0] + PRIOR / 2) / (slow[:, 1] + PRIOR)
    family_growth = _growth(fast, family_rate, np.zeros(len(family_rate)))
    slow, fast = samples.counts(version)
    rate = (slow[:, 0] + PRIOR * family_rate[family]) / (slow[:, 1] + PRIOR)
    return Estimates(
        rate=rate,
        growth=_growth(fast, rate, family_growth[family]),
        trials=slow[:, 1],
        share=share,
        family=family,
        families=tuple(names),
    )


def _growth(fast: Numbers, rate: Numbers, prior: Numbers) -> Numbers:
    """How far the rate of late lies above the slow one; without late trials, the prior."""
    return (fast[:, 0] - fast[:, 1] * rate + PRIOR * prior) / (fast[:, 1] + PRIOR)


def summary(found: Estimates) -> Mapping[str, float]:
    """By family, for metrics: the mean estimate, weighted by the data."""
    size = len(found.families)
    share = np.bincount(found.family, found.share, size)
    rate = np.bincount(found.family, found.share * found.rate, size)
    return {
        f"curriculum/rate/{name}": float(r / s) for name, r, s in zip(found.families, rate, share, strict=True) if s > 0
    }
