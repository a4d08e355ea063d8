"""What is always logged of a training step, from its per-token arrays.

The ratio here is raw: policy over behaviour, before any truncation, clip or mask, so that mismatch and staleness show
even when a correction hides them.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from attrs import frozen
from torch import Tensor

from uniagent.engine.learner.losses import kl

TURNS = (1, 2, 3, 4, 8, 16, 32)  # upper bounds (exclusive) of the buckets of turns; the last is open


@frozen(eq=False)
class Tokens:
    """All [N]: log-probabilities of the trained tokens as the optimizer saw them (``current``), under the policy at the
    batch's start, under the ratio's base, and of the policy that sampled them (``behaviour``); the correction; entropy;
    age in versions; turn."""

    current: Tensor
    start: Tensor
    base: Tensor
    behaviour: Tensor
    correction: Tensor
    entropy: Tensor
    age: Tensor
    turn: Tensor


def diagnostics(x: Tokens, *, clip_low: float, clip_high: float, cap: float) -> dict[str, float]:
    """Metrics of one step:

    - ``ratio_mean``, ``ratio_min``, ``ratio_max``: policy at the batch's start over behaviour; ``logprob_gap``, the
      largest difference of the two in nats
    - ``mismatch_kl``: estimate (k3) of KL(behaviour || that policy); ``mismatch_kl/turn_A-B`` the same by turn
    - ``clip_share``: tokens whose ratio to the base is outside the clip; ``correction_capped``, ``correction_masked``
    - ``age_mean``, ``age_max`` in policy versions; ``entropy`` in nats
    """
    gap = x.start - x.behaviour
    ratio = gap.exp()
    mismatch = kl(x.behaviour, x.start, "k3")
    moved = (x.current - x.base).exp()
    age = x.age.double()
    out = {
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "logprob_gap": gap.abs().max(),
        "mismatch_kl": mismatch.mean(),
        "clip_share": ((moved < 1 - clip_low) | (moved > 1 + clip_high)).double().mean(),
        "correction_capped": (x.correction >= cap).double().mean(),
        "correction_masked": (x.correction == 0).double().mean(),
        "age_mean": age.mean(),
        "age_max": age.max(),
        "entropy": x.entropy.mean(),
    }
    for name, chosen in _buckets(x.turn):
        out[f"mismatch_kl/turn_{name}"] = mismatch[chosen].mean()
    return {name: float(value) for name, value in out.items()}


def _buckets(turn: Tensor) -> list[tuple[str, Tensor]]:
    edges = [0, *TURNS]
    spans = [(a, b - 1) for a, b in pairwise(edges)]
    named = [(str(a) if a == b else f"{a}-{b}", (turn >= a) & (turn <= b)) for a, b in spans]
    named.append((f"{edges[-1]}-", turn >= edges[-1]))
    return [(name, chosen) for name, chosen in named if bool(torch.any(chosen))]
