"""When a training mesh serves: by predicted gain against the measured cost of a switch, with hysteresis."""

from __future__ import annotations

import pytest

from uniagent.engine.rollout.roles import MARGIN, Roles


def late(own: int, switch_s: float, group_s: float) -> Roles:
    roles = Roles(own, switch_s)
    roles.note(10 * group_s, 10)
    return roles


def test_it_serves_when_the_gain_exceeds_both_switches_with_a_margin() -> None:
    roles = late(own=2, switch_s=5.0, group_s=10.0)
    worth = MARGIN * 2 * 5.0 * (2 + 2) / 2 / 10.0  # missing groups at which gain and cost are equal
    assert not roles.wanted(missing=int(worth), others=2)
    assert roles.wanted(missing=int(worth) + 1, others=2)


def test_it_goes_back_when_one_switch_is_left_and_not_before() -> None:
    roles = late(own=1, switch_s=15.0, group_s=10.0)
    roles.switched(True)
    assert roles.wanted(missing=2, others=1)
    assert not roles.wanted(missing=1, others=1)


def test_between_the_two_thresholds_nothing_changes() -> None:
    roles = late(own=1, switch_s=10.0, group_s=10.0)
    assert not roles.wanted(missing=4, others=1)
    roles.switched(True)
    assert roles.wanted(missing=4, others=1)


def test_the_cost_is_the_mean_of_the_latest_three() -> None:
    roles = Roles(1, 99.0)
    assert roles.switch_s == 99.0
    for seconds in (1.0, 2.0, 3.0, 4.0):
        roles.measured(seconds)
    assert roles.switch_s == pytest.approx(3.0)


@pytest.mark.parametrize("serving", [False, True])
def test_alone_it_serves_until_its_batch_is_there(serving: bool) -> None:
    roles = Roles(1, 1e9, serving=serving)
    assert roles.wanted(missing=1, others=0)
    assert not roles.wanted(missing=0, others=0)
