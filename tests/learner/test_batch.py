"""The batch: every trainable token accounted for, credit by session and action, nothing that splits or order change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from uniagent.engine.learner.batch import Batch, build
from uniagent.engine.ports import Failure, Sampling


def by_token(batch: Batch) -> dict[tuple[str, int, int], tuple[float, ...]]:
    """(session, turn, number in the turn) -> what the loss looks at."""
    out: dict[tuple[str, int, int], tuple[float, ...]] = {}
    for chain in batch.chains:
        for offset in range(len(chain.trained)):
            i = chain.first + offset
            name, turn = batch.sessions[batch.session[i]], int(batch.turn[i])
            number = sum(1 for key in out if key[:2] == (name, turn))
            out[name, turn, number] = (batch.advantages[i], batch.logprobs[i], batch.temperature[i], batch.versions[i])
    return out


@pytest.mark.parametrize("kind", ["mean", "mean_std", "rloo", "maxrl"])
def test_a_split_changes_no_token(kit: Any, kind: str) -> None:
    whole, split = (build(kit.groups(split=s), kind) for s in (False, True))
    assert len(split.chains) > len(whole.chains)
    assert by_token(whole) == by_token(split)
    assert whole.ledger == split.ledger


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(seed=st.integers(0, 1000))
def test_the_order_in_which_sessions_end_does_not_matter(kit: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = kit.groups(seed=seed)
    first = build(groups, "mean_std")
    for group in groups:
        rng.shuffle(group)
    rng.shuffle(groups)
    second = build(groups, "mean_std")
    assert first.sessions == second.sessions
    for name in ("logprobs", "advantages", "session", "turn"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_causes_of_untrained_tokens(kit: Any) -> None:
    def group(sample: int, *rewards: float, **more: Any) -> list[Any]:
        turns = [kit.Turn([1, 2], [3, 4]), kit.Turn([5], [6], version=3)]
        return [kit.episode(turns, r, sample=sample, replica=i, **more) for i, r in enumerate(rewards)]

    groups = [
        group(0, 1, 0),
        group(1, 1, 1, 1),
        [*group(2, 1, 0), kit.episode([kit.Turn([1], [2])], 0, sample=2, replica=2, failure=Failure.INFRA)],
    ]
    batch = build(groups, "mean", version=4, max_staleness=2)
    assert batch.ledger.trainable == 7 * 3 + 1
    assert batch.ledger.discarded == {"no_signal": 9, "infra": 1, "stale": 8}
    assert batch.ledger.trained == batch.tokens == 4
    assert set(batch.versions) == {3}
    assert batch.advantages.tolist() == [0.5, -0.5, 0.5, -0.5]  # the failed session is in no baseline


def test_the_ledger_must_balance_and_moves_skipped_steps(kit: Any) -> None:
    ledger = build(kit.groups(), "mean").ledger
    moved = ledger.skipped(5)
    assert (moved.trained, moved.discarded["skipped_step"]) == (ledger.trained - 5, 5)
    assert ledger.skipped(0) is ledger
    with pytest.raises(AssertionError, match="does not balance"):
        type(ledger)(trainable=3, trained=1, discarded={"stale": 1})


def test_step_rewards_are_added_to_their_action_after_centring(kit: Any) -> None:
    turns = [kit.Turn([1], [2, 3]), kit.Turn([4], [5])]
    good = kit.episode(turns, 1.0, replica=0, step_rewards=(0.25,))
    bad = kit.episode(turns, 0.0, replica=1, step_rewards=(0.0, -1.0))
    assert build([[good, bad]], "mean").advantages.tolist() == [0.75, 0.75, 0.5, -0.5, -0.5, -1.5]
    # they are a signal of their own where rewards are equal, and for a group of one
    alone = build([[kit.episode(turns, 1.0, step_rewards=(0.0, 2.0))]], "mean")
    assert alone.advantages.tolist() == [0, 0, 2]
    with pytest.raises(ValueError, match="3 step rewards for 2 actions"):
        build([[kit.episode(turns, 1.0, step_rewards=(1.0, 1.0, 1.0))]], "mean")


def test_temperature_and_kept_sets_go_with_their_tokens(kit: Any) -> None:
    hot = Sampling(max_tokens=8, temperature=0.5, top_p=0.9)
    sets = (np.array([2, 3], np.int32), None)
    turns = [kit.Turn([1], [2, 3], hot, kept=sets), kit.Turn([4], [5])]
    batch = build([[kit.episode(turns, float(i), replica=i) for i in range(2)]], "mean")
    assert batch.temperature.tolist() == [0.5, 0.5, 1.0] * 2
    assert batch.kept is not None
    assert [None if k is None else k.tolist() for k in batch.kept] == [[2, 3], None, None] * 2


def test_greedy_tokens_are_never_trained(kit: Any) -> None:
    greedy = [kit.Turn([1], [2], Sampling(max_tokens=8, temperature=0.0))]
    with pytest.raises(ValueError, match="temperature 0, which cannot be trained"):
        build([[kit.episode(greedy, float(i), replica=i) for i in range(2)]], "mean")


def test_the_overlong_penalty_counts_sampled_tokens_only(kit: Any) -> None:
    long_tool_output = kit.episode([kit.Turn([1] * 200, [2] * 4)], 1.0, replica=0)
    long_answer = kit.episode([kit.Turn([1], [2] * 10)], 1.0, replica=1)
    batch = build([[long_tool_output, long_answer]], "mean", overlong_limit=10, overlong_buffer=4)
    assert batch.advantages[[0, -1]].tolist() == [0.5, -0.5]


def test_an_empty_batch_is_a_batch() -> None:
    batch = build([], "mean")
    assert (batch.tokens, batch.chains, batch.ledger.trainable) == (0, (), 0)
