"""Alarms ring when a number has been beyond its limit for long enough, and say what to do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.config import Alarms as Settings
from uniagent.engine.observe.alarms import Alarms, rules

LOW, HIGH = {"entropy": 0.0001}, {"entropy": 1.0}


def test_an_alarm_rings_once_after_its_patience_and_again_after_it_was_well() -> None:
    alarms = Alarms(Settings(patience=3))
    steps = [LOW, LOW, HIGH, LOW, LOW, LOW, LOW, HIGH, LOW, LOW, LOW]
    rang = [n for n, numbers in enumerate(steps) if alarms.look(numbers)]
    assert rang == [5, 10]


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("entropy", {"entropy": 0.0005}),
        ("length", {"answers/cut": 0.6}),
        ("malformed", {"answers/malformed": 0.51}),
        ("mismatch", {"mismatch_kl": 0.2}),
    ],
)
def test_each_alarm_names_its_number_its_limit_and_what_to_do(name: str, numbers: dict[str, float]) -> None:
    (alarm,) = Alarms(Settings(patience=1)).look(numbers)
    ((metric, value),) = numbers.items()
    assert alarm.name == name
    assert alarm.text.startswith(f"{metric} = {value:.3g} is ")
    assert not alarm.stops
    assert Alarms(Settings(patience=1, stop=(name,))).look(numbers)[0].stops


def test_a_limit_of_zero_switches_an_alarm_off() -> None:
    off = Settings(entropy_below=0, cut_above=0, malformed_above=0, mismatch_kl_above=0)
    assert rules(off) == ()


@given(st.lists(st.sampled_from([LOW, {}, {"entropy": math.nan}]), max_size=30))
def test_steps_without_the_number_neither_count_nor_reset(steps: list[dict[str, float]]) -> None:
    alarms = Alarms(Settings(patience=3))
    rang = sum(bool(alarms.look(numbers)) for numbers in steps)
    assert rang == (steps.count(LOW) >= 3)
