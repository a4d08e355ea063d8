"""Advantages: statistics over the sessions that count, exact zeros, and the formulas of the papers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.errors import UserError
from uniagent.engine.learner.advantages import advantages, overlong

KINDS = ("mean", "mean_std", "rloo", "maxrl")
rewards = st.lists(st.integers(0, 8).map(lambda n: n / 4), min_size=1, max_size=9).map(np.array)


def of(values: list[float], kind: str, counts: list[bool] | None = None) -> list[float]:
    found = advantages(np.array(values), np.array(counts or [True] * len(values)), kind)
    return [float(a) for a in found]


def test_formulas() -> None:
    assert of([1, 0, 0, 1], "mean") == [0.5, -0.5, -0.5, 0.5]
    assert of([1, 0, 0], "rloo") == pytest.approx([1.0, -0.5, -0.5])  # minus the mean of the others
    assert of([1, 0, 0, 0], "maxrl") == pytest.approx([3.0, -1.0, -1.0, -1.0])
    std = np.std([1, 0, 0, 1], ddof=1)
    assert of([1, 0, 0, 1], "mean_std") == pytest.approx(np.array([0.5, -0.5, -0.5, 0.5]) / (std + 1e-6))


@pytest.mark.parametrize("kind", KINDS)
def test_singletons_and_constant_groups_are_exactly_zero(kind: str) -> None:
    assert of([0.7], kind) == [0.0]
    assert of([0.3, 0.3, 0.3], kind) == [0.0, 0.0, 0.0]
    assert of([1.0, 0.0], kind, [True, False]) == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
@given(values=rewards, seed=st.integers(0, 99))
def test_sums_to_zero_and_follows_the_sessions(kind: str, values: np.ndarray, seed: int) -> None:
    every = np.ones(len(values), bool)
    found = advantages(values, every, kind)
    assert abs(found.sum()) < 1e-9
    order = np.random.default_rng(seed).permutation(len(values))
    np.testing.assert_allclose(advantages(values[order], every, kind), found[order], atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@given(values=rewards, broken=st.integers(1, 3))
def test_infrastructure_failures_are_in_no_statistic(kind: str, values: np.ndarray, broken: int) -> None:
    more = np.concatenate([values, np.full(broken, np.nan)])
    counts = np.arange(len(more)) < len(values)
    found = advantages(more, counts, kind)
    np.testing.assert_array_equal(found[: len(values)], advantages(values, counts[: len(values)], kind))
    assert not found[len(values) :].any()


def test_what_cannot_work_is_said() -> None:
    with pytest.raises(UserError, match="did you mean 'mean_std'"):
        of([1, 0], "mean_sdt")
    with pytest.raises(UserError, match="must be >= 0"):
        of([1, -1], "maxrl")
    with pytest.raises(UserError, match="not a finite number"):
        of([1, float("nan")], "mean")


def test_overlong_penalty_grows_over_the_buffer() -> None:
    assert [overlong(n, limit=100, buffer=20) for n in (0, 80, 90, 100, 500)] == [0, 0, -0.5, -1, -1]
