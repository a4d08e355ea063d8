"""Strategies as functions, and the estimates that they weigh."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.curriculum.estimates import PRIOR, Estimates, Tallies, estimates
from uniagent.engine.curriculum.strategies import Options, band, growth, learnability, mixture, uniform
from uniagent.engine.errors import UserError
from uniagent.engine.registry import load, names

rates = st.lists(st.floats(0, 1), min_size=1, max_size=20)


def known(rate: list[float], family: list[int] | None = None, grown: list[float] | None = None) -> Estimates:
    family = family or [0] * len(rate)
    return Estimates(
        rate=np.array(rate),
        growth=np.array(grown or [0.0] * len(rate)),
        trials=np.full(len(rate), 8.0),
        share=np.full(len(rate), 1 / len(rate)),
        family=np.array(family),
        families=tuple(f"f{i}" for i in range(max(family) + 1)),
    )


ALL = [load("strategies", name) for name in names("strategies")]


@given(rate=rates)
def test_weights_are_finite_and_at_least_0(rate: list[float]) -> None:
    for strategy in ALL:
        weights = strategy(known(rate), Options())
        assert weights.shape == (len(rate),)
        assert np.isfinite(weights).all()
        assert (weights >= 0).all()


def test_each_strategy_prefers_what_it_says() -> None:
    some = known([0.0, 0.1, 0.5, 0.9, 1.0], grown=[0.0, 0.0, 0.1, -0.3, 0.0])
    assert uniform(some, Options()).tolist() == [0.2] * 5
    assert band(some, Options(band=(0.1, 0.5))).tolist() == [0, 0.2, 0.2, 0, 0]
    assert np.argmax(learnability(some, Options())) == 2
    assert learnability(some, Options())[[0, 4]].tolist() == [0, 0]
    assert np.argmax(growth(some, Options())) == 3  # falling is moving too
    assert (growth(some, Options()) > 0).all()


def test_the_mixture_gives_every_family_its_quota_whatever_its_size() -> None:
    some = known([0.5, 0.2, 0.9, 0.5, 0.5, 0.1], family=[0, 0, 0, 0, 1, 2])
    weights = mixture(some, Options(quotas={"f1": 0.5}))
    by_family = np.bincount(some.family, weights)
    assert by_family == pytest.approx([0.25, 0.5, 0.25])
    assert weights[0] > weights[1]  # learnability within


def test_quotas_are_checked() -> None:
    some = known([0.5, 0.5], family=[0, 1])
    with pytest.raises(UserError, match=r"curriculum.quotas.g: no sample is of this family: .*f0, f1"):
        mixture(some, Options(quotas={"g": 0.5}))
    with pytest.raises(UserError, match=r"sum to 1\.2"):
        mixture(some, Options(quotas={"f0": 0.6, "f1": 0.6}))
    with pytest.raises(UserError, match="a share is a number"):
        mixture(some, Options(quotas={"f0": "half"}))  # type: ignore[dict-item]


# ---------------------------------------------------------------- estimates


def estimated(tallies: Tallies, families: Tallies, version: int) -> Estimates:
    n = len(tallies)
    return estimates(tallies, families, np.zeros(n, np.int64), ["f"], np.full(n, 1 / n), version)


def test_a_trial_counts_half_after_the_half_life() -> None:
    tallies = Tallies(1, half_life=10)
    tallies.add(0, [True] * 8, 0)
    assert tallies.counts(0)[0].tolist() == [[8, 8]]
    assert tallies.counts(10)[0].tolist() == [[4, 4]]
    tallies.add(0, [False] * 4, 10)
    assert tallies.counts(10)[0].tolist() == [[4, 8]]


def test_what_was_never_tried_is_as_its_family() -> None:
    tallies, families = Tallies(2, 10), Tallies(1, 10)
    for t in (tallies, families):
        t.add(0, [True] * 6 + [False] * 2, 0)
    rate = estimated(tallies, families, 0).rate
    assert rate[1] == (6 + PRIOR / 2) / (8 + PRIOR)
    assert rate[0] > rate[1]


def test_nothing_known_is_an_even_coin() -> None:
    assert estimated(Tallies(3, 10), Tallies(1, 10), 5).rate.tolist() == [0.5] * 3


def test_growth_is_seen_where_late_trials_differ() -> None:
    tallies, families = Tallies(2, 10), Tallies(1, 10)
    for version in range(10):
        tallies.add(0, [version > 5] * 8, version)  # learned
        tallies.add(1, [True, False] * 4, version)  # stands still
    grown = estimated(tallies, families, 9).growth
    assert grown[0] > 0.2
    assert abs(grown[1]) < 0.05


groups = st.lists(st.lists(st.booleans(), min_size=1, max_size=8), max_size=8)


@given(groups=groups)
def test_a_streak_counts_the_last_groups_of_one_outcome_exactly(groups: list[list[bool]]) -> None:
    tallies = Tallies(1, 10)
    for version, outcomes in enumerate(groups):
        tallies.add(0, outcomes, version)
    expected, last = 0, None
    for outcomes in reversed(groups):
        if len(set(outcomes)) > 1 or (last is not None and outcomes[0] != last):
            break
        expected, last = expected + len(outcomes), outcomes[0]
    assert tallies.streak[0] == expected


def test_what_counts_less_says_nothing_of_the_recent_rate() -> None:
    tallies = Tallies(1, 10)
    tallies.add(0, [False] * 32, 0, weight=0.5)
    assert tallies.streak[0] == 0
    assert tallies.counts(0)[0].tolist() == [[0, 16]]


@given(groups=groups)
def test_tallies_are_restored_exactly(groups: list[list[bool]]) -> None:
    one, other = Tallies(3, 7), Tallies(3, 7)
    for version, outcomes in enumerate(groups):
        one.add(version % 3, outcomes, version)
    other.restore(one.state())
    for version in (len(groups), 50):
        assert np.array_equal(one.counts(version)[0], other.counts(version)[0])
        assert np.array_equal(one.counts(version)[1], other.counts(version)[1])
    assert np.array_equal(one.streak, other.streak)
