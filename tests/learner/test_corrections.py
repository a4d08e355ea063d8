"""Corrections: bounded weights without gradient; masked sessions are 0 and nothing else changes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.learner.corrections import Correction, weights

tokens = st.lists(st.tuples(st.floats(-30, 30), st.integers(0, 3)), min_size=1, max_size=20)
KINDS = ("none", "tis", "tis_sequence", "icepop")


def of(ratios: list[float], sessions: list[int], how: Correction) -> list[float]:
    log_ratio = torch.tensor([math.log(r) for r in ratios], dtype=torch.float64, requires_grad=True)
    found = weights(log_ratio, torch.tensor(sessions), 4, how)
    assert not found.requires_grad
    return found.tolist()


def test_formulas() -> None:
    ratios, sessions = [0.25, 1.5, 1.5, 4.0], [0, 0, 1, 1]
    assert of(ratios, sessions, Correction("none", 0, 0)) == [1, 1, 1, 1]
    assert of(ratios, sessions, Correction("tis", 0, 2.0)) == pytest.approx([0.25, 1.5, 1.5, 2.0])
    assert of(ratios, sessions, Correction("tis_sequence", 0, 5.0)) == pytest.approx([0.375, 0.375, 5.0, 5.0])
    assert of(ratios, sessions, Correction("icepop", 0.5, 2.0)) == pytest.approx([0, 1.5, 1.5, 0])
    geometric = Correction("tis", 0, 2.0, (0.5, 2.0))  # means 0.61 and 2.45
    assert of(ratios, sessions, geometric) == pytest.approx([0.25, 1.5, 0, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("geometric", [None, (0.9, 1.1)])
@given(tokens=tokens)
def test_weights_are_bounded_and_finite(
    kind: str, geometric: tuple[float, float] | None, tokens: list[tuple[float, int]]
) -> None:
    d, session = torch.tensor([t[0] for t in tokens]), torch.tensor([t[1] for t in tokens])
    found = weights(d, session, 4, Correction(kind, 0.5, 2.0, geometric))
    assert torch.isfinite(found).all()
    assert found.min() >= 0
    assert found.max() <= (1 if kind == "none" else 2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_every_weight_is_one(kind: str) -> None:
    assert of([1.0] * 4, [0, 1, 1, 2], Correction(kind, 0.5, 2.0, (0.99, 1.01))) == [1, 1, 1, 1]


def test_only_session_corrections_look_at_sessions() -> None:
    assert not Correction("tis", 0, 2.0).by_session
    assert Correction("tis_sequence", 0, 2.0).by_session
    assert Correction("none", 0, 2.0, (0.9, 1.1)).by_session
