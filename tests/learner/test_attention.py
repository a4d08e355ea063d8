"""Forest attention equals dense masked attention, value and gradient, and touches no other forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex_module

from uniagent.engine.config import Learner
from uniagent.engine.learner import flex
from uniagent.engine.learner.attention import Layout, attend, by_ancestors, forest_attention
from uniagent.engine.learner.batch import build
from uniagent.engine.learner.context import part
from uniagent.engine.learner.forest import Forest, grow
from uniagent.engine.learner.packing import Cost, Item, Row, pack_row
from uniagent.engine.learner.trainer import Trainer

HEADS, KV_HEADS, WIDTH = 4, 2, 8


@pytest.fixture(autouse=True, scope="module")
def flex_backward_on_cpu() -> Iterator[None]:
    """Its plain form has a backward everywhere; only its front door turns CPU tensors away, for want of a fast one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_module, "_validate_device", lambda *_: None)
        yield


def forest() -> Forest:
    trunk, branch = [1] * 20, [2] * 17
    made = [trunk + branch + [3], trunk + branch + [4, 4, 4], [*trunk, 5], [6] * 9]
    return grow([np.array(x, np.int32) for x in made])


def qkv(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, h, length, WIDTH, generator=g, dtype=dtype).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS)
    ]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Forest) -> torch.Tensor:
    mask = torch.zeros(len(layout.ids), len(layout.ids), dtype=torch.bool)
    for places in layout.places:
        for t, place in enumerate(places):
            mask[place, places[: t + 1]] = True
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)


def cascade(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Forest) -> torch.Tensor:
    return attend(torch.nn.Identity(), q, k, v, None, scaling=0.3, forest=Layout(layout.calls))[0].transpose(1, 2)


def flexible(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Forest) -> torch.Tensor:
    mask = flex.block_mask(np.arange(len(layout.ids)), layout.ends, torch.device("cpu"))
    made = Layout(layout.calls, mask=mask)
    return attend(torch.nn.Identity(), q, k, v, None, scaling=0.3, forest=made)[0].transpose(1, 2)


def ancestors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Forest) -> torch.Tensor:
    return by_ancestors(q, k, v, layout.calls, 0.3)


@pytest.mark.parametrize("attention", [cascade, ancestors, pytest.param(flexible, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_equals_dense_attention(attention: Callable[..., Any], dtype: torch.dtype, tolerance: float) -> None:
    layout = forest()
    results = []
    attentions: list[Callable[..., Any]] = [dense, attention]
    for how in attentions:
        inputs = qkv(len(layout.ids), dtype)
        out = how(*inputs, layout)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_other_forwards_of_the_module_are_not_touched(kit: Any) -> None:
    model = kit.model()
    ids = torch.arange(1, 20)[None]
    before = model(input_ids=ids, use_cache=False).logits
    with forest_attention(model):
        assert model.config._attn_implementation == "uniagent_forest"
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, before)  # no forest: stock
    assert model.config._attn_implementation == "sdpa"
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"sdpa"}


def test_the_implementation_is_put_back_after_an_error(kit: Any) -> None:
    model = kit.model()
    with pytest.raises(RuntimeError), forest_attention(model):
        raise RuntimeError
    assert model.config._attn_implementation == "sdpa"


def wide_row(branches: list[int], trunk: int) -> Row:
    """A trunk with branches beside a sequence of its own, over several blocks."""
    made = [np.concatenate([np.arange(trunk), 1000 * (i + 1) + np.arange(n)]) for i, n in enumerate(branches)]
    made.append(np.full(200, 9))
    where = np.array([1])
    return pack_row([Item(ids.astype(np.int32), where, where - 1, 0) for ids in made], Cost(), least=16)


@settings(deadline=None, max_examples=20)
@given(
    branches=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    trunk=st.integers(16, 300),
    parts=st.sampled_from([1, 2, 3]),
)
def test_the_block_mask_is_the_forest(branches: list[int], trunk: int, parts: int) -> None:
    row = wide_row(branches, trunk)
    length = len(row.forest.ids)
    whole = np.zeros((length, length), bool)
    for c in row.forest.calls:
        block = np.ones((c.q1 - c.q0, c.k1 - c.k0), bool)
        whole[c.q0 : c.q1, c.k0 : c.k1] |= np.tril(block) if c.causal else block
    for number in range(parts):
        mine = part(row, number, parts)
        made = flex.block_mask(mine.places, mine.ends, torch.device("cpu"))
        queries, keys = (torch.arange(n) for n in (len(mine.places), len(mine.ends)))
        exact = made.mask_mod(torch.tensor(0), torch.tensor(0), queries[:, None], keys[None]).numpy()
        real = mine.places < length
        np.testing.assert_array_equal(exact[real][:, :length], whole[mine.places[real]])
        assert not exact[real][:, length:].any()
        for kinds, counts, blocks in (
            ("partial", made.kv_num_blocks, made.kv_indices),
            ("full", made.full_kv_num_blocks, made.full_kv_indices),
        ):
            assert counts is not None
            assert blocks is not None
            for q, count in enumerate(counts[0, 0].tolist()):
                for k in blocks[0, 0, q, :count].tolist():
                    pairs = exact[q * 128 : (q + 1) * 128, k * 128 : (k + 1) * 128].copy()
                    exact[q * 128 : (q + 1) * 128, k * 128 : (k + 1) * 128] = False
                    assert kinds == "partial" or (pairs.all() and pairs.shape == (128, 128))
        assert not exact.any()  # every pair that is seen is in a block


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "tolerance"), [(0, 3e-6), (4, 1e-5)])  # with experts some gradients are tiny
def test_a_model_has_the_same_gradients_by_flex_attention(
    kit: Any, monkeypatch: pytest.MonkeyPatch, experts: int, tolerance: float
) -> None:
    gradients = []
    for flexes in (False, True):
        monkeypatch.setattr(flex, "usable", lambda *_, flexes=flexes: flexes)
        trainer = Trainer(kit.model(experts=experts), Learner(micro_tokens=256), seed=0, steps=1)
        for piece in trainer.plan(build(kit.groups(split=True), "mean")):
            trainer.micro(piece)
        gradients.append({n: p.grad for n, p in trainer.policy.named_parameters() if p.grad is not None})
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).norm() <= tolerance * expected.norm(), name
