"""Strategies: what samples weigh, from what is known about them.

Pure functions ``(Estimates, options) -> weights [N]``. Weights are at least 0 and need not sum to anything; all 0 means
that the strategy has no wish, and the data's own shares decide. Every strategy starts from ``share``, an entry's part
of the data, so that entries that stand for whole families and entries that stand for one row are treated alike. Third
parties name theirs as ``module:attribute``, or by an entry point of the group ``uniagent.strategies``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
from attrs import field, frozen

from uniagent.engine.curriculum.estimates import Estimates, Numbers
from uniagent.engine.errors import UserError, nearest

EXPLORE = 0.02  # growth that is supposed where none was seen yet


@frozen
class Options:
    """Of the table ``[curriculum]``: ``band`` of pass rates, ``quotas`` by family."""

    band: tuple[float, float] = (0.1, 0.9)
    quotas: Mapping[str, float] = field(factory=dict)


Strategy: TypeAlias = Callable[[Estimates, Options], Numbers]


def uniform(known: Estimates, options: Options) -> Numbers:
    """As the data has them."""
    return known.share


def band(known: Estimates, options: Options) -> Numbers:
    """Those whose pass rate lies in ``band``, bounds included."""
    low, high = options.band
    return known.share * ((known.rate >= low) & (known.rate <= high))


def learnability(known: Estimates, options: Options) -> Numbers:
    """p (1 - p): the variance of the outcome, which bounds what a group's comparison can teach (SFL, Rutherford et al.
    2024, arXiv:2408.15099)."""
    return known.share * known.rate * (1 - known.rate)


def growth(known: Estimates, options: Options) -> Numbers:
    """Absolute learning progress: where the pass rate moves, up or down (Matiisen et al. 2017, arXiv:1707.00183;
    Portelas et al. 2019, arXiv:1910.07224)."""
    return known.share * (np.abs(known.growth) + EXPLORE)


def mixture(known: Estimates, options: Options) -> Numbers:
    """Every family has its part of ``quotas`` (families without one share what is left equally; with no quotas at
    all, the families are equal), and within a family learnability decides. Raises UserError for a quota of no family,
    and for quotas that sum to more than 1."""
    quotas = _quotas(known.families, options.quotas)
    within = learnability(known, options)
    total = np.bincount(known.family, within, len(known.families))
    return np.asarray(within / np.where(total > 0, total, 1.0)[known.family] * quotas[known.family])


def _quotas(families: tuple[str, ...], given: Mapping[str, float]) -> Numbers:
    for name, quota in given.items():
        if name not in families:
            raise UserError(f"curriculum.quotas.{name}: no sample is of this family: {nearest(name, families)}")
        if not isinstance(quota, int | float) or quota < 0:
            raise UserError(f"curriculum.quotas.{name} = {quota!r}: a share is a number from 0 to 1")
    left = 1 - sum(given.values())
    if left < -1e-9:
        raise UserError(f"curriculum.quotas sum to {1 - left:g}: they are shares, at most 1 together")
    others = [name for name in families if name not in given]
    return np.array([given[name] if name in given else max(left, 0.0) / len(others) for name in families])
