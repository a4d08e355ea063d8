"""Losses and aggregations: formulas, what a mask means, and what they must not depend on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.learner.losses import (
    SURROGATES,
    Clip,
    Scored,
    aggregation,
    kl,
    session_mean,
    session_sum,
)

CLIP = Clip(0.2, 0.28)


def scored(log_ratio: list[float], advantages: list[float], session_log_ratio: list[float] | None = None) -> Scored:
    lp = torch.tensor(log_ratio, dtype=torch.float64) - 1.0
    return Scored(
        lp.requires_grad_(),
        torch.full_like(lp, -1.0),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(session_log_ratio or [0.0] * len(log_ratio), dtype=torch.float64),
    )


def value_and_gradient(name: str, x: Scored, clip: Clip = CLIP) -> tuple[list[float], list[float]]:
    loss = SURROGATES[name](x, clip)
    (gradient,) = torch.autograd.grad(loss.sum(), x.logprobs)
    return loss.tolist(), gradient.tolist()


@pytest.mark.parametrize("name", SURROGATES)
@given(advantages=st.lists(st.floats(-3, 3), min_size=1, max_size=6))
def test_on_policy_every_gradient_is_reinforce(name: str, advantages: list[float]) -> None:
    _, gradient = value_and_gradient(name, scored([0.0] * len(advantages), advantages))
    assert gradient == pytest.approx([-a for a in advantages], abs=1e-12)


def test_the_clip_stops_the_gradient_only_where_it_helps() -> None:
    up, down = 0.5, -0.5  # ratios 1.65 and 0.61
    x = scored([up, up, down, down], [1.0, -1.0, 1.0, -1.0])
    loss, gradient = value_and_gradient("clipped", x)
    assert loss == pytest.approx([-1.28, 1.6487, -0.6065, 0.8], abs=1e-4)
    assert [g != 0 for g in gradient] == [False, True, True, False]
    loss, _ = value_and_gradient("clipped", scored([2.0], [-1.0]), Clip(0.2, 0.28, dual=3.0))
    assert loss == [3.0]


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    _, gradient = value_and_gradient("cispo", scored([0.5, -2.0], [1.0, 1.0]), Clip(1.0, 0.28))
    assert gradient == pytest.approx([-1.28, -0.1353], abs=1e-4)


def test_gspo_clips_whole_sessions() -> None:
    inside, outside = 0.1, 0.5
    x = scored([0.0, 0.0], [1.0, 1.0], [inside, outside])
    loss, gradient = value_and_gradient("gspo", x)
    assert loss == pytest.approx([-1.1052, -1.28], abs=1e-4)
    assert gradient == pytest.approx([-1.1052, 0.0], abs=1e-4)


def test_no_ratio_overflows() -> None:
    for name in SURROGATES:
        loss, gradient = value_and_gradient(name, scored([500.0, -500.0], [-1.0, 1.0], [500.0, -500.0]))
        assert torch.isfinite(torch.tensor(loss + gradient)).all(), name


sessions = st.lists(st.integers(0, 4), min_size=1, max_size=30)


@given(sessions=sessions)
def test_aggregation_weights(sessions: list[int]) -> None:
    session = torch.tensor(sessions)
    present = len(set(sessions))
    token = aggregation("token_mean", session, 5, 10)
    assert token.tolist() == [1 / len(sessions)] * len(sessions)
    mean = aggregation("seq_mean_token_mean", session, 5, 10)
    assert session_sum(mean, session, 5).tolist() == pytest.approx([1 / present] * len(sessions))
    assert float(mean.sum()) == pytest.approx(1)
    norm = aggregation("seq_mean_token_sum_norm", session, 5, 10)
    assert norm.tolist() == pytest.approx([1 / (present * 10)] * len(sessions))


@given(sessions=sessions)
def test_session_statistics(sessions: list[int]) -> None:
    session = torch.tensor(sessions)
    values = torch.arange(len(sessions), dtype=torch.float64)
    for i, s in enumerate(sessions):
        mine = [float(v) for v, t in zip(values, sessions, strict=True) if t == s]
        assert float(session_sum(values, session, 5)[i]) == sum(mine)
        assert float(session_mean(values, session, 5)[i]) == pytest.approx(sum(mine) / len(mine))


@given(d=st.floats(-0.4, 0.4))
def test_kl_estimates(d: float) -> None:
    lp, reference = torch.tensor([d - 1.0], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    assert float(kl(lp, reference, "k1")) == pytest.approx(d)
    assert float(kl(lp, reference, "k2")) == pytest.approx(d * d / 2)
    assert float(kl(lp, reference, "k3")) == pytest.approx(torch.e ** (-d) + d - 1, abs=1e-12)
    assert float(kl(lp, reference, "k3")) >= 0


def test_k3_is_an_unbiased_estimate_of_kl() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    exact = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):
        assert float((p * kl(p.log(), q.log(), kind)).sum()) == pytest.approx(float(exact))
