"""Keyed uniforms and the categorical draw: distribution, filters, edges, both sizes of vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.adapters.engines.categorical import Drawn, draw
from uniagent.adapters.engines.sampling import draw_key, uniforms
from uniagent.adapters.engines.spans import version_spans
from uniagent.engine.ports import VersionSpan


def drawn(logits: Any, u: Any, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Drawn:
    logits = torch.as_tensor(np.asarray(logits), dtype=torch.float32)
    rows = len(logits)
    return draw(
        logits,
        np.full(rows, temperature, np.float32),
        np.full(rows, top_p, np.float64),
        np.full(rows, top_k, np.int32),
        np.asarray(u, np.float64),
    )


def test_uniforms_are_uniform_independent_and_fixed() -> None:
    u = uniforms(np.full(20000, draw_key(7, "s", 0), np.uint64), np.arange(20000, dtype=np.uint64))
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(u.var() - 1 / 12) < 0.005
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.03
    assert ((u > 0) & (u < 1)).all()
    across = uniforms(np.array([draw_key(0, f"s{n}", 0) for n in range(5000)], np.uint64), np.zeros(5000, np.uint64))
    assert abs(across.mean() - 0.5) < 0.02
    # fixed for ever: a run can be drawn again years later
    assert u[:2].tolist() == [0.5548296790634653, 0.36807145680714654]


def test_keys_differ_by_every_part() -> None:
    parts = [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (0, "a\ud800", 0), (-1, "", 0)]
    assert len({draw_key(*each) for each in parts}) == len(parts)


@pytest.mark.parametrize("vocabulary", [7, 2048, 2049, 5000])
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = np.repeat(rng.normal(0, 3, (1, vocabulary)).astype(np.float32), 500, 0)
    u = (np.arange(500) + 0.5) / 500
    result = drawn(logits, u)
    p = np.exp(logits[0].astype(np.float64))
    cdf = np.cumsum(p / p.sum())
    expected = np.searchsorted(cdf, u, side="right")
    near = np.abs(cdf[np.minimum(expected, vocabulary - 1)] - u) < 1e-6
    near |= np.abs(cdf[np.maximum(expected - 1, 0)] - u) < 1e-6
    assert (near | (result.tokens == expected)).all()
    assert near.mean() < 0.02
    assert np.allclose(result.logprobs, np.log(p / p.sum())[result.tokens], atol=1e-5)


@pytest.mark.parametrize("vocabulary", [5, 3000])
def test_impossible_tokens_are_never_drawn(vocabulary: int) -> None:
    logits = np.full((3, vocabulary), -np.inf, np.float32)
    logits[:, [1, vocabulary - 2]] = 0.0
    result = drawn(logits, [2.0**-54, 0.5, 1 - 2.0**-53])
    assert result.tokens.tolist()[::2] == [1, vocabulary - 2]
    assert result.tokens[1] in (1, vocabulary - 2)
    assert np.allclose(result.logprobs, np.log(0.5))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocabulary=st.sampled_from([3, 40, 1500, 2500]),
    top_k=st.sampled_from([0, 1, 2, 30, 1200, 10_000]),
    top_p=st.sampled_from([1.0, 0.99, 0.7, 0.2, 1e-6]),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_filters_against_a_plain_one(seed: int, vocabulary: int, top_k: int, top_p: float, temperature: float) -> None:
    """Temperature, top-k, then the smallest set whose share of what is left reaches top-p; logprobs renormalised."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, rng.choice([0.01, 2.0]), (2, vocabulary)).astype(np.float32)
    result = drawn(logits, rng.uniform(size=2), temperature, top_p, top_k)
    for row in range(2):
        p = np.exp(logits[row].astype(np.float64) / temperature)
        order = np.argsort(-p, kind="stable")[: top_k or None]
        share = np.cumsum(p[order]) / p[order].sum()
        count = int(np.searchsorted(share, top_p)) + 1 if top_p < 1 else len(order)
        kept = result.kept.get(row, np.arange(vocabulary))
        near = bool(np.abs(share - top_p).min() < 1e-6)
        assert abs(len(kept) - count) <= (1 if near else 0)
        assert kept.tolist() == sorted(set(kept.tolist()))
        if not near:  # the same set, but for tokens as likely in float32
            assert np.allclose(np.sort(p[kept]), np.sort(p[order[:count]]), rtol=1e-5)
        assert result.tokens[row] in kept
        assert result.logprobs[row] == pytest.approx(np.log(p[result.tokens[row]] / p[kept].sum()), abs=2e-5)
        assert (row in result.kept) == (len(kept) < vocabulary)


def test_settings_differ_by_row_and_greedy_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]] * 3)
    result = draw(
        logits,
        np.array([0.0, 1.0, 0.5], np.float32),
        np.array([0.1, 1.0, 1.0]),
        np.array([1, 0, 2], np.int32),
        np.array([0.999, 0.999, 0.999]),
    )
    assert result.tokens.tolist() == [1, 3, 2]
    assert list(result.kept) == [2]
    assert result.kept[2].tolist() == [1, 2]
    logp = logits[0].log_softmax(0)
    assert result.logprobs[0] == pytest.approx(logp[1].item())
    assert result.logprobs[2] == pytest.approx(-np.log(1 + np.exp(2.0)), abs=1e-6)


def test_version_spans() -> None:
    assert version_spans([]) == ()
    assert version_spans([3, 3, 4]) == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
