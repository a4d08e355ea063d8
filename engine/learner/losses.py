"""Policy losses, one value a token: pure functions of log-probabilities and advantages.

All arrays are flat [N] over trained tokens; "session" means the whole session of a token, wherever its chains lie.
What a loss needs of a session (a mean log-ratio) is given to it per token, so that a loss never depends on which
tokens share a micro-batch. Aggregation is a weight a token (``aggregation``), corrections another (``corrections``);
the loss of a step is the sum of weight x correction x value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

LOG_LIMIT = 20.0  # log-ratios are clamped to +-20 before exp, so that no ratio overflows


@frozen
class Clip:
    """The ratio stays in [1 - low, 1 + high]; ``dual`` > 1 bounds the loss of negative advantages at dual x |A| (Ye et
    al. 2019, arXiv:1912.09729), 0 does not."""

    low: float
    high: float
    dual: float = 0.0


@frozen(eq=False)
class Scored:
    """What a loss may look at, all [N]: log-probabilities under the current weights (with gradient) and under the
    proximal policy, the advantages, and the mean log-ratio of each token's session (without gradient)."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    session_log_ratio: Tensor


def clipped(x: Scored, clip: Clip) -> Tensor:
    """PPO's pessimistic clipped surrogate (Schulman et al. 2017, arXiv:1707.06347): max(-A r, -A clip(r)). GRPO
    (arXiv:2402.03300), DAPO (clip-higher; arXiv:2503.14476), Dr. GRPO (arXiv:2503.20783) and decoupled PPO (Hilton et
    al. 2021, arXiv:2110.00641) are this with other advantages, aggregations and corrections. [N]."""
    return _clip(_ratio(x.logprobs - x.old), x.advantages, clip)


def gspo(x: Scored, clip: Clip) -> Tensor:
    """GSPO in its token form (Zheng et al. 2025, arXiv:2507.18071, eq. 14): the ratio is the geometric mean over the
    session, its gradient flows through the token's own log-probability. [N]."""
    log_ratio = x.session_log_ratio + x.logprobs - x.logprobs.detach()
    return _clip(log_ratio.clamp(max=10.0).exp(), x.advantages, clip)


def cispo(x: Scored, clip: Clip) -> Tensor:
    """CISPO (MiniMax 2025, arXiv:2506.13585, eq. 4): -sg(clip(r)) A log p; a clipped token keeps its gradient. [N]."""
    ratio = _ratio(x.logprobs.detach() - x.old).clamp(1 - clip.low, 1 + clip.high)
    return -ratio * x.advantages * x.logprobs


def reinforce(x: Scored, clip: Clip) -> Tensor:
    """-A r without a clip: at r = 1 its gradient is REINFORCE's (RLOO, arXiv:2402.14740). [N]."""
    return -x.advantages * _ratio(x.logprobs - x.old)


SURROGATES: dict[str, Callable[[Scored, Clip], Tensor]] = {
    "clipped": clipped,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def _clip(ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip.low, 1 + clip.high))
    if clip.dual:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * clip.dual), loss)
    return loss


def kl(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Estimates of KL(policy || reference) at each token (Schulman 2020, http://joschu.net/blog/kl-approx.html), [N]:
    ``k1`` d, ``k2`` d^2 / 2, ``k3`` exp(-d) + d - 1, with d = log p - log p_ref. ``k1`` as a loss term has no gradient
    in expectation: it is for reading, ``k2`` and ``k3`` are for training."""
    d = logprobs - reference
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    d = d.clamp(-LOG_LIMIT, LOG_LIMIT)
    return ((-d).exp() + d - 1).clamp(-10.0, 10.0)


def aggregation(kind: str, session: Tensor, sessions: int, norm_tokens: int) -> Tensor:
    """The weight of each trained token in the loss of an optimizer step: session [N] in [0, sessions) -> [N], fp64.

    - ``token_mean``: 1 / N (DAPO)
    - ``seq_mean_token_mean``: 1 / (S n_s), n_s the trained tokens of the session (GRPO)
    - ``seq_mean_token_sum_norm``: 1 / (S norm_tokens), a constant divisor (Dr. GRPO)

    S counts sessions with a trained token. The weights are made from the whole step, so that the gradient does not
    depend on micro-batches; masked sessions keep their place in N and S.
    """
    counts = torch.bincount(session, minlength=sessions).double()
    present = (counts > 0).sum()
    if kind == "token_mean":
        return torch.full_like(session, 1, dtype=torch.float64) / len(session)
    if kind == "seq_mean_token_mean":
        return 1.0 / (present * counts[session])
    if kind == "seq_mean_token_sum_norm":
        return torch.full_like(session, 1, dtype=torch.float64) / (present * norm_tokens)
    raise ValueError(f"unknown aggregation {kind!r}")


def session_sum(values: Tensor, session: Tensor, sessions: int) -> Tensor:
    """values [N], session [N] -> the sum over each token's session, [N]."""
    return values.new_zeros(sessions).index_add(0, session, values)[session]


def session_mean(values: Tensor, session: Tensor, sessions: int) -> Tensor:
    """values [N], session [N] -> the mean over each token's session, [N]."""
    counts = torch.bincount(session, minlength=sessions)[session]
    return session_sum(values, session, sessions) / counts
