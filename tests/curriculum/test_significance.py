"""Intervals and tests against known values, and what they promise against simulated counts."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.curriculum.growing import growths
from uniagent.engine.curriculum.history import Cell
from uniagent.engine.curriculum.significance import false_discovery, trend, wilson


@pytest.mark.parametrize(
    ("passes", "trials", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_intervals_are_the_published_ones(passes: int, trials: int, low: float, high: float) -> None:
    assert wilson(passes, trials) == pytest.approx((low, high), abs=5e-5)


def test_no_trials_say_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@given(trials=st.integers(1, 500), data=st.data())
def test_an_interval_holds_the_rate_and_mirrors(trials: int, data: st.DataObject) -> None:
    passes = data.draw(st.integers(0, trials))
    low, high = wilson(passes, trials)
    assert 0 <= low <= passes / trials <= high <= 1
    assert wilson(trials - passes, trials) == pytest.approx((1 - high, 1 - low))


def test_the_trend_test_is_that_of_the_literature() -> None:
    """Agresti 2002, Categorical Data Analysis, table 5.3 (malformation by alcohol): z^2 = 6.57 with scores 0, .5, 1.5,
    4, 7, by the variance with N; ours is with N - 1."""
    trials = [17114, 14502, 793, 127, 38]
    z, p = trend([0, 0.5, 1.5, 4, 7], [48, 38, 5, 1, 1], trials)
    assert z * z == pytest.approx(6.57, abs=0.01)
    assert p == pytest.approx(0.0104, abs=2e-4)


def test_one_version_or_one_outcome_shows_no_trend() -> None:
    assert trend([3, 3], [1, 7], [8, 8]) == (0.0, 1.0)
    assert trend([0, 5], [8, 8], [8, 8]) == (0.0, 1.0)
    assert trend([0], [4], [8]) == (0.0, 1.0)


def test_a_rise_is_told_from_a_fall() -> None:
    up, p = trend([0, 1, 2], [1, 4, 7], [8, 8, 8])
    down, _ = trend([0, 1, 2], [7, 4, 1], [8, 8, 8])
    assert up == -down > 0
    assert p < 0.01


def test_adjusted_p_values_are_those_of_the_paper() -> None:
    """Benjamini and Hochberg 1995, section 3.2: at q = 0.05 the four smallest of these 15 are rejected."""
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459]
    p += [0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0000]
    adjusted = false_discovery(p)
    assert [q <= 0.05 for q in adjusted] == [True] * 4 + [False] * 11
    assert adjusted[0] == pytest.approx(0.0015)


@given(p=st.lists(st.floats(0, 1), max_size=30))
def test_adjusting_keeps_the_order_and_lowers_nothing(p: list[float]) -> None:
    adjusted = false_discovery(p)
    assert all(one * (1 - 1e-12) <= q <= 1 for q, one in zip(adjusted, p, strict=True))
    by_p = sorted(range(len(p)), key=p.__getitem__)
    assert all(adjusted[a] <= adjusted[b] for a, b in pairwise(by_p))


def cells(name: str, rates: list[float], draw: random.Random, trials: int = 8) -> list[Cell]:
    return [
        Cell(name, "f", "run", version, sum(draw.random() < rate for _ in range(trials)), trials)
        for version, rate in enumerate(rates)
    ]


def test_samples_that_grew_are_found_among_many_that_did_not() -> None:
    draw = random.Random(0)
    still = {f"still-{i}": cells(f"still-{i}", [draw.random()] * 6, draw) for i in range(150)}
    grew = {f"grew-{i}": cells(f"grew-{i}", [0.1, 0.2, 0.4, 0.6, 0.8, 0.9], draw) for i in range(20)}
    moved = [g for g in growths({**still, **grew}) if g.moved]
    assert sum(g.name.startswith("grew") and g.z > 0 for g in moved) >= 18
    assert sum(g.name.startswith("still") for g in moved) <= 3


def test_growth_says_early_and_late_rates() -> None:
    found = growths({"a": [Cell("a", "f", "run", 0, 1, 8), Cell("a", "f", "run", 10, 7, 8)]})[0]
    assert (found.first, found.last, found.versions) == (0.125, 0.875, (0, 10))
    assert math.isclose(found.low, wilson(8, 16)[0])
