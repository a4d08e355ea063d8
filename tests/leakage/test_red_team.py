"""Cheating scripts earn nothing and are flagged; honest ones earn their reward and are not."""

from __future__ import annotations

import pytest
import red_team
import stage

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", red_team.FIRST)
def test_cheating_earns_nothing_and_is_flagged(name: str, confined: None) -> None:
    outcome = stage.run(red_team.FIRST[name])
    assert outcome.result.reward == 0, outcome.said
    assert outcome.flags, outcome.said


@pytest.mark.parametrize("name", red_team.HONEST)
def test_honest_work_is_rewarded_and_not_flagged(name: str, confined: None) -> None:
    outcome = stage.run(red_team.HONEST[name].replace("{issue}", stage.ISSUE))
    assert outcome.result.reward == 1, (outcome.said, outcome.result.details)
    assert not outcome.flags
