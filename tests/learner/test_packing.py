"""Packing: every trained token once, within the budget, deterministic, balanced."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.learner.packing import Cost, Item, pack

lengths = st.lists(st.integers(2, 40), min_size=1, max_size=20)


def items(sizes: list[int], unit: int = 4, shared: int = 0) -> list[Item]:
    made, at = [], 0
    for i, n in enumerate(sizes):
        prompt = np.full(shared, i // unit)
        ids = np.concatenate([prompt, 100 + np.arange(n) + 1000 * i]).astype(np.int32)
        trained = np.arange(max(1, shared), len(ids))
        made.append(Item(ids, trained, at + np.arange(len(trained)), i // unit))
        at += len(trained)
    return made


@given(sizes=lengths, budget=st.integers(20, 90), shared=st.sampled_from([0, 18]), share=st.booleans())
def test_every_trained_token_once_and_rows_within_the_budget(
    sizes: list[int], budget: int, shared: int, share: bool
) -> None:
    made = items(sizes, shared=shared)
    rows = pack(made, budget, share=share)
    tokens = np.concatenate([r.tokens for r in rows])
    assert sorted(tokens.tolist()) == list(range(sum(len(i.trained) for i in made)))
    for row in rows:
        assert len(row.forest.ids) <= budget or len(row.forest.places) == 1
        # the hidden state that predicts a token stands right before it, in its own sequence
        wanted = {int(t): int(i.ids[p]) for i in made for p, t in zip(i.trained, i.tokens, strict=True)}
        before = {int(t): int(i.ids[p - 1]) for i in made for p, t in zip(i.trained, i.tokens, strict=True)}
        assert [wanted[int(t)] for t in row.tokens] == row.targets.tolist()
        assert [before[int(t)] for t in row.tokens] == row.forest.ids[row.sources].tolist()


@given(sizes=lengths)
def test_the_same_sequences_give_the_same_rows(sizes: list[int]) -> None:
    first, second = (pack(items(sizes, shared=16), 80) for _ in range(2))
    assert [r.tokens.tolist() for r in first] == [r.tokens.tolist() for r in second]


def test_groups_share_their_prompt_and_large_groups_are_cut() -> None:
    rows = pack(items([10] * 8, unit=8, shared=50), 1000)
    assert [len(r.forest.ids) for r in rows] == [50 + 80]
    rows = pack(items([10] * 8, unit=8, shared=50), 100)
    assert [len(r.forest.ids) for r in rows] == [50 + 40, 50 + 40]


def test_rows_are_balanced_by_cost_not_by_tokens() -> None:
    quadratic = Cost(token=0.0, pair=1.0)
    rows = pack(items([64, 32, 32, 32, 32], unit=1), 200, cost=quadratic, share=False, rows=2)
    assert sorted(sorted(len(p) for p in r.forest.places) for r in rows) == [[32, 32, 32, 32], [64]]
