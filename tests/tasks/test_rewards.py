"""Rewards: weighted components and shaping, kept apart from the outcome."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.errors import UserError
from uniagent.engine.ports import Failure, TaskResult
from uniagent.engine.shaping import Shaping, shaped
from uniagent.tasks.base import weighted
from uniagent.tasks.config import ENDPOINT, TaskConfig, TaskConfigResolver

RUNTIME = dict.fromkeys(ENDPOINT, "unused")
ALL = Shaping(length_weight=0.5, length_limit=200, length_buffer=100, format_weight=0.2, turn_weight=0.01, free_turns=5)


def config(**reward: object) -> TaskConfig:
    return TaskConfigResolver([{"name": "t", "reward": reward}]).resolve({"name": "t"}, RUNTIME)


def test_components_are_weighed_and_the_outcome_stays() -> None:
    result = weighted(
        TaskResult(0.0, components={"tests": 0.5, "style": 1.0}), config(weights={"tests": 2.0, "style": 0.5})
    )
    assert result.reward == 1.5
    assert result.outcome is False  # the verifier's own reward was 0: weights make no success


def test_without_weights_the_reward_is_the_verifiers() -> None:
    result = TaskResult(0.25, components={"tests": 1.0})
    assert weighted(result, config()) is result


def test_a_component_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match=r"reward.weights.test: .*did you mean 'tests'"):
        weighted(TaskResult(0.0, components={"tests": 1.0}), config(weights={"test": 1.0}))


def test_a_failing_verifier_is_not_weighed_and_not_shaped() -> None:
    broken = TaskResult(0.0, failure=Failure.INFRA)
    assert weighted(broken, config(weights={"tests": 1.0})) is broken
    assert shaped(broken, ALL, tokens=1000, turns=9, malformed=9) is broken


def test_every_term_is_in_the_record_by_name_and_in_the_reward() -> None:
    result = shaped(TaskResult(1.0), ALL, tokens=150, turns=8, malformed=2)
    assert result.shaping == pytest.approx({"length": -0.25, "format": -0.05, "turns": -0.03})
    assert result.reward == pytest.approx(1 - 0.33)
    assert result.outcome is True


@given(reward=st.floats(0, 1), tokens=st.integers(0, 10**6), turns=st.integers(0, 500), share=st.floats(0, 1))
def test_shaping_never_changes_what_was_achieved(reward: float, tokens: int, turns: int, share: float) -> None:
    before = TaskResult(reward)
    after = shaped(before, ALL, tokens=tokens, turns=turns, malformed=int(turns * share))
    assert after.solved == before.solved
    assert after.reward == pytest.approx(before.reward + sum(after.shaping.values()))
    assert all(term <= 0 for term in after.shaping.values())


def test_shaping_is_set_in_the_task_config_and_by_the_sample() -> None:
    resolver = TaskConfigResolver([{"name": "t", "reward": {"shaping": {"format_weight": 0.1, "turn_weight": 0.2}}}])
    resolved = resolver.resolve({"name": "t", "reward": {"shaping": {"turn_weight": 0.3}}}, RUNTIME)
    assert (resolved.shaping.format_weight, resolved.shaping.turn_weight) == (0.1, 0.3)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"shaping": {"format": 0.1}}, "did you mean 'format_weight'"),
        ({"shaping": {"length_weight": 0.1}}, "length_weight needs 0 < length_buffer <= length_limit"),
        ({"shaping": {"turn_weight": -1}}, "turn_weight"),
        ({"weights": {"tests": "much"}}, "the weight of 'tests' is 'much'"),
    ],
)
def test_a_mistake_is_told_where_it_stands(reward: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match="task 't'") as caught:
        config(**reward)
    assert said in str(caught.value)
