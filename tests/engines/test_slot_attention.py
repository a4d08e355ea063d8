"""Attention over slots against the plain formula, for every layout: dense, scattered, long beside short, pieces."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.adapters.engines import slot_attention
from uniagent.adapters.engines.slot_attention import Shape, SlotKv
from uniagent.adapters.engines.slots import Copy, Piece

HEADS, GROUPS, KEY, VALUE, CONTEXT = 4, 2, 8, 6, 1200


def plain(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """query [H, D], keys [G, T, D], values [G, T, V] -> [H, V]."""
    keys, values = keys.repeat_interleave(HEADS // GROUPS, 0), values.repeat_interleave(HEADS // GROUPS, 0)
    weights = (torch.einsum("hd,htd->ht", query, keys) * KEY**-0.5).softmax(-1)
    return torch.einsum("ht,htv->hv", weights, values)


@settings(max_examples=40, deadline=None)
@given(
    slots=st.sampled_from([1, 4, 24]),
    share=st.sampled_from([0.15, 0.6, 1.0]),
    longest=st.sampled_from([3, 40, 1100]),
    pieces=st.integers(0, 3),
    seed=st.integers(0, 10_000),
)
def test_every_layout_attends_to_its_own_past(slots: int, share: float, longest: int, pieces: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kv = SlotKv([Shape(GROUPS, KEY, VALUE)], slots, CONTEXT, torch.float32, torch.device("cpu"))
    kv.keys[0].normal_()
    kv.values[0].normal_()
    busy = np.flatnonzero(rng.random(slots) < share)
    own = busy[:pieces] if pieces < len(busy) else busy[:0]
    decode = busy[len(own) :]
    lengths = np.where(rng.random(len(decode)) < 0.7, rng.integers(1, 20, len(decode)), rng.integers(1, longest + 1))
    parts = [Piece(int(s), int(rng.choice([0, 5])), int(rng.choice([1, 7, 530]))) for s in own]
    if not (len(decode) or parts):
        return
    rows, columns = kv.lay_out(decode, lengths, parts)
    assert sorted(rows[: len(decode)].tolist()) == decode.tolist()
    n = len(rows)
    query, key, value = torch.randn(1, HEADS, n, KEY), torch.randn(1, GROUPS, n, KEY), torch.randn(1, GROUPS, n, VALUE)
    kv.update(key, value, 0)
    out = kv.attend(query, KEY**-0.5)
    assert out.shape == (1, n, HEADS, VALUE)
    for token in rng.choice(n, min(n, 40), replace=False):
        slot, end = rows[token], columns[token] + 1
        assert torch.equal(kv.keys[0][slot, :, end - 1], key[0, :, token])
        expected = plain(query[0, :, token], kv.keys[0][slot, :, :end], kv.values[0][slot, :, :end])
        assert torch.allclose(out[0, token], expected, atol=1e-5)


def test_short_requests_do_not_pay_for_long_ones() -> None:
    lengths = np.array([30] * 28 + [1000] * 4)
    groups = slot_attention._split(np.arange(32), lengths)
    assert [sorted(lengths[g].tolist()) for g in groups] == [[30] * 28, [1000] * 4]
    assert len(slot_attention._split(np.arange(32), np.full(32, 500))) == 1


def test_copies_move_all_layers() -> None:
    kv = SlotKv([Shape(1, 2, 3), Shape(2, 2, 2)], 3, 10, torch.float32, torch.device("cpu"))
    for store in (*kv.keys, *kv.values):
        store.normal_()
    before = [store.clone() for store in (*kv.keys, *kv.values)]
    kv.copy([Copy(0, 2, 1, 4)])
    for store, old in zip((*kv.keys, *kv.values), before, strict=True):
        assert torch.equal(store[2, :, 1:4], old[0, :, 1:4])
        old[2, :, 1:4] = old[0, :, 1:4]
        assert torch.equal(store, old)
