"""Group-relative advantages: one number a session, from the rewards of the sessions of its group.

Statistics run over sessions, never over chains or tokens. Sessions that do not count (infrastructure failures) get 0
and are in no statistic; a group of one, and a group of equal rewards, get exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from uniagent.engine.errors import UserError, nearest

Rewards = npt.NDArray[np.float64]


def advantages(rewards: Rewards, counts: npt.NDArray[np.bool_], kind: str) -> Rewards:
    """rewards [n] of one group, counts [n] -> advantages [n]. Kinds:

    - ``mean``: r - mean (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)
    - ``mean_std``: (r - mean) / (std + 1e-6), std unbiased (GRPO, Shao et al. 2024, arXiv:2402.03300)
    - ``rloo``: r - mean of the others (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740)
    - ``maxrl``: (r - mean) / mean (Tajwar et al. 2026, arXiv:2602.02710); needs rewards >= 0

    Raises UserError for an unknown kind, a reward that is not finite, and a negative reward under ``maxrl``.
    """
    if kind not in _KINDS:
        raise UserError(f"learner.advantage = {kind!r}: {nearest(kind, _KINDS)}")
    rewards, counts = np.asarray(rewards, np.float64), np.asarray(counts, bool)
    counted = rewards[counts]
    if not np.isfinite(counted).all():
        raise UserError(f"a reward is not a finite number: {counted.tolist()}: mend the task's verifier")
    out = np.zeros_like(rewards)
    if len(counted) > 1 and counted.min() != counted.max():
        out[counts] = _KINDS[kind](counted)
    return out


def _mean(r: Rewards) -> Rewards:
    return r - np.mean(r)


def _mean_std(r: Rewards) -> Rewards:
    return _mean(r) / (np.std(r, ddof=1) + 1e-6)


def _rloo(r: Rewards) -> Rewards:
    return _mean(r) * len(r) / (len(r) - 1)


def _maxrl(r: Rewards) -> Rewards:
    if r.min() < 0:
        raise UserError(
            f"learner.advantage = 'maxrl' divides by the mean reward, so rewards must be >= 0, not {r.min()}"
        )
    return _mean(r) / np.mean(r)


_KINDS: dict[str, Callable[[Rewards], Rewards]] = {"mean": _mean, "mean_std": _mean_std, "rloo": _rloo, "maxrl": _maxrl}


def overlong(sampled: int, *, limit: int, buffer: int) -> float:
    """Soft penalty of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 13) for a session of ``sampled`` tokens: 0 up to
    limit - buffer, falling to -1 at ``limit``. It counts what the model sampled, not what tools wrote."""
    return min(0.0, max(-1.0, (limit - buffer - sampled) / buffer))
