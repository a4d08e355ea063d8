"""Forest attention equals dense masked attention, value and gradient, and touches no other forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from uniagent.engine.learner.attention import Layout, attend, by_ancestors, forest_attention
from uniagent.engine.learner.forest import Forest, grow

HEADS, KV_HEADS, WIDTH = 4, 2, 8


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


def ancestors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Forest) -> torch.Tensor:
    return by_ancestors(q, k, v, layout.calls, 0.3)


@pytest.mark.parametrize("attention", [cascade, ancestors])
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
