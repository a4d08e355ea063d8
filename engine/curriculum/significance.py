"""What counts can say: intervals of a pass rate, a test for a trend, and many tests at once. Pure; knows no sample.

Plain formulas, so that nothing here needs a statistics package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054  # of a two-sided 95 % interval


def wilson(passes: float, trials: float, z: float = Z95) -> tuple[float, float]:
    """The score interval of a binomial proportion (Wilson 1927, JASA 22:209). No trials give (0, 1)."""
    if trials <= 0:
        return 0.0, 1.0
    rate, z2 = passes / trials, z * z
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials * trials))
    low = 0.0 if passes == 0 else max(0.0, centre - half)
    high = 1.0 if passes == trials else min(1.0, centre + half)
    return low, high


def trend(scores: Sequence[float], passes: Sequence[int], trials: Sequence[int]) -> tuple[float, float]:
    """Cochran-Armitage test for a linear trend in proportions (Cochran 1954, Biometrics 10:417; Armitage 1955,
    Biometrics 11:375), with the variance of sampling without replacement, which holds for few trials too.

    Group i has score ``scores[i]`` (a policy version) and ``passes[i]`` of ``trials[i]``. Gives (z, two-sided p):
    z > 0 where the pass rate rises with the score. All passes equal, or one score alone: (0, 1).
    """
    total, passed = sum(trials), sum(passes)
    if total < 2 or passed in (0, total):
        return 0.0, 1.0
    share = passed / total
    mean = sum(t * n for t, n in zip(scores, trials, strict=True)) / total
    spread = sum(n * (t - mean) ** 2 for t, n in zip(scores, trials, strict=True))
    if spread == 0:
        return 0.0, 1.0
    statistic = sum((t - mean) * k for t, k in zip(scores, passes, strict=True))
    z = statistic / math.sqrt(share * (1 - share) * spread * total / (total - 1))
    return z, math.erfc(abs(z) / math.sqrt(2))


def false_discovery(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of many tests (Benjamini and Hochberg 1995, JRSS B 57:289): of those at most q, a share of at
    most q is expected to be false."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__, reverse=True)
    adjusted, least = [1.0] * len(p_values), 1.0
    for rank, i in zip(range(len(order), 0, -1), order, strict=True):
        least = min(least, p_values[i] * len(order) / rank)
        adjusted[i] = least
    return adjusted
