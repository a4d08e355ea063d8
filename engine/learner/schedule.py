"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math


def learning_rate(
    step: int, *, peak: float, warmup: int, total: int, kind: str = "constant", floor: float = 0.0
) -> float:
    """Of optimizer step ``step`` (0 is the first): a linear warm-up over ``warmup`` steps, then constant, or a linear
    or cosine fall to ``floor`` times the peak at step ``total``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if kind == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 1.0 - done if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (floor + (1.0 - floor) * left)
