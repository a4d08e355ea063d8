"""Prefix forests: every token stands after exactly its own prefix, and shared prefixes stand once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.learner.forest import Forest, grow

# few ids and repeated beginnings, so that prefixes are shared, nested, equal and cut short
sequences = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), max_size=8)).map(
        lambda x: np.array([7] * x[0] * 2 + x[1] or [5], np.int32)
    ),
    min_size=1,
    max_size=8,
)


def seen(forest: Forest) -> np.ndarray:
    """[L, L]: how often query i sees key j."""
    out = np.zeros((len(forest.ids), len(forest.ids)), int)
    for c in forest.calls:
        block = np.ones((c.q1 - c.q0, c.k1 - c.k0), int)
        out[c.q0 : c.q1, c.k0 : c.k1] += np.tril(block) if c.causal else block
    return out


@given(given_sequences=sequences, least=st.integers(0, 4))
def test_every_token_sees_its_own_prefix_once(given_sequences: list[np.ndarray], least: int) -> None:
    forest = grow(given_sequences, least=least)
    sees = seen(forest)
    for ids, places in zip(given_sequences, forest.places, strict=True):
        np.testing.assert_array_equal(forest.ids[places], ids)
        np.testing.assert_array_equal(forest.positions[places], np.arange(len(ids)))
        for t, place in enumerate(places):
            expected = np.zeros(len(forest.ids), int)
            expected[places[: t + 1]] = 1
            np.testing.assert_array_equal(sees[place], expected)
    assert forest.pairs == sees.sum()


def test_a_shared_prompt_stands_once() -> None:
    prompt = np.arange(20)
    made = [np.concatenate([prompt, [90 + i] * 5]).astype(np.int32) for i in range(4)]
    assert len(grow(made).ids) == 20 + 4 * 5
    assert len(grow(made, least=0).ids) == 4 * 25
    assert len(grow(made, least=21).ids) == 4 * 25  # too short to be worth a call


def test_nested_branches_and_equal_sequences() -> None:
    trunk, branch = [1] * 16, [2] * 16
    made = [
        np.array(x, np.int32) for x in (trunk + branch + [3], trunk + branch + [4], [*trunk, 5], trunk, [*trunk, 5])
    ]
    assert len(grow(made).ids) == 16 + 16 + 1 + 1 + 1


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        grow([np.array([1], np.int32), np.array([], np.int32)])
