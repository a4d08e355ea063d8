"""Corrections for tokens that another policy sampled: rollout/learner mismatch and staleness.

A correction is a weight a token, without gradient, made from d = log proximal - log behaviour; a weight of 0 masks the
token and leaves its place in every denominator. All arrays are flat [N] over trained tokens.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from uniagent.engine.learner.losses import LOG_LIMIT, session_mean, session_sum


@frozen
class Correction:
    """kind: none | tis | tis_sequence | icepop. geometric (low, high): sessions whose mean ratio is outside are
    masked; None masks none."""

    kind: str
    low: float
    high: float
    geometric: tuple[float, float] | None = None

    @property
    def by_session(self) -> bool:
        """Whether a token's weight depends on its whole session."""
        return self.kind == "tis_sequence" or self.geometric is not None


def weights(log_ratio: Tensor, session: Tensor, sessions: int, how: Correction) -> Tensor:
    """log_ratio [N], session [N] in [0, sessions) -> [N]:

    - ``tis``: min(exp d, high), truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly
      brings you off-policy RL training")
    - ``tis_sequence``: the same of the sum of d over the session; it has the variance of a product, so it is opt-in
    - ``icepop``: exp d where low <= exp d <= high, else 0 (Ling team 2025, "Small leak can sink a great ship")
    - ``geometric``: 0 for sessions with exp(mean d) outside [low, high] (Liu et al. 2025, "When speed kills stability")
    """
    d = log_ratio.detach()
    if how.kind == "tis":
        w = _exp(d).clamp(max=how.high)
    elif how.kind == "tis_sequence":
        w = _exp(session_sum(d, session, sessions)).clamp(max=how.high)
    elif how.kind == "icepop":
        ratio = _exp(d)
        w = torch.where((ratio >= how.low) & (ratio <= how.high), ratio, 0.0)
    else:
        w = torch.ones_like(d)
    if how.geometric is not None:
        low, high = how.geometric
        mean = _exp(session_mean(d, session, sessions))
        w = torch.where((mean >= low) & (mean <= high), w, 0.0)
    return w


def _exp(d: Tensor) -> Tensor:
    return d.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
