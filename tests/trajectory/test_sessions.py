"""Random sessions: the invariants after every step, the same tree from the record, the fates as brute force has them,
and every behaviour that the documentation names really met."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from fate_oracle import Oracle
from harness_kit import check, replayed, same_export
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_sessions import ROWS, Session, rows

from uniagent.engine.trajectory.tree import TreePolicy

POLICIES = st.builds(
    TreePolicy,
    rewind=st.sampled_from(["split", "discard"]),
    refused=st.sampled_from(["discard", "train"]),
    side_call=st.sampled_from(["discard", "train"]),
    edited=st.sampled_from(["train", "context"]),
)


def whole_check(rng: Any, policy: TreePolicy, steps: int) -> None:
    h = Session(rng, policy).run(steps)
    out = check(h)
    assert list(out.fates) == Oracle(h.tree, policy).fates()
    same_export(out, replayed(h))
    same_export(out, h.tree.export())


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), policy=POLICIES, steps=st.integers(1, 14))
def test_invariants_hold_after_every_step(rng: Any, policy: TreePolicy, steps: int) -> None:
    whole_check(rng, policy, steps)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 40), policy=POLICIES, steps=st.integers(1, 40))
def test_invariants_hold_in_long_sessions(seed: int, policy: TreePolicy, steps: int) -> None:
    whole_check(random.Random(seed), policy, steps)


def test_every_behaviour_is_met_in_one_session_of_a_hundred() -> None:
    met: Counter[str] = Counter()
    sessions = 200
    for seed in range(sessions):
        rng = random.Random(seed)
        policy = TreePolicy(rewind=rng.choice(["split", "discard"]), edited=rng.choice(["train", "context"]))
        h = Session(rng, policy, checked=False).run(12)
        met.update(rows(h, h.export()))
    rare = {row: met[row] / sessions for row in ROWS if met[row] < 0.01 * sessions}
    assert not rare, rare
