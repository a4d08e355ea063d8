"""Attention over a forest of segments, exact, without building a mask.

Registered with transformers under a name of its own, and used only while ``forest_attention(model)`` is open and the
forward passes ``forest=Layout(...)``; every other forward of the same module (an inference engine's) is not touched.
The parts of a query's attention are merged by their log-sum-exp; the backward of a part is the ordinary flash
backward given the merged output and log-sum-exp (the identity of ring attention, Liu et al. 2023, arXiv:2310.01889),
so gradients are exact and nothing of size L x L exists. Off the CPU the same is done by one flex attention kernel
(``flex``), or, where that takes no such tensors, by one call a segment over its ancestors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from uniagent.engine.learner import flex
from uniagent.engine.learner.forest import Call

NAME = "uniagent_forest"

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@frozen(eq=False)
class Layout:
    """How a row attends: ``calls`` with local queries, and the same as a ``mask`` where flex attention is used. With
    ``group``, this rank holds a part of the row: keys are gathered from the group, and order [L] puts them in the row's
    order."""

    calls: tuple[Call, ...]
    group: Any = None
    order: Tensor | None = None
    mask: Any = None


@contextlib.contextmanager
def forest_attention(model: torch.nn.Module) -> Iterator[None]:
    """While open, ``model`` attends by forests. Open it around the backward too: activation checkpointing runs the
    forward again there."""
    found: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    configs = list(found.values())
    before = [c._attn_implementation for c in configs]
    for config in configs:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    forest: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, L, D], key and value [1, Hk, L, D] -> [1, L, H, D]. Without a forest: the stock sdpa."""
    if forest is None:
        stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return stock(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)  # type: ignore[no-any-return]
    out: Tensor
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast both leave the rotary embedding in fp32
    if forest.group is not None:
        key, value = (_Gather.apply(x, forest.group)[:, :, forest.order] for x in (key, value))  # type: ignore[no-untyped-call]
    if forest.mask is not None:
        out = flex.attend(query, key, value, forest.mask, scaling)
    elif query.device.type == "cpu":
        out = _Cascade.apply(query, key, value, forest.calls, scaling)  # type: ignore[no-untyped-call]
    else:
        out = by_ancestors(query, key, value, forest.calls, scaling)
    return out.transpose(1, 2), None


def by_ancestors(query: Tensor, key: Tensor, value: Tensor, forest: Sequence[Call], scaling: float | None) -> Tensor:
    """Each segment against its ancestors and itself under a lower-right causal mask: public operations only.

    [1, H, L, D], [1, Hk, L, D] -> [1, H, L, D].
    """
    outs = []
    for own in (c for c in forest if c.causal):
        above = sorted((c.k0, c.k1) for c in forest if not c.causal and c.q0 <= own.q0 < c.q1)
        spans = [*above, (own.k0, own.k1)]
        k, v = (
            torch.cat([x[:, :, a:b] for a, b in spans], 2) if above else x[:, :, own.k0 : own.k1] for x in (key, value)
        )
        n, m = own.q1 - own.q0, k.shape[2]
        q = query[:, :, own.q0 : own.q1]
        if above:  # with a mask, kernels that never hold all scores want as many key heads as query heads
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)
            outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling))
        else:
            outs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
    return torch.cat(outs, 2)


class _Gather(torch.autograd.Function):
    """[1, Hk, l, D] of every rank -> [1, Hk, ranks x l, D]; the backward sums what the ranks send back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        mine = x[0].transpose(0, 1).contiguous()
        out = mine.new_empty(mine.shape[0] * dist.get_world_size(group), *mine.shape[1:])
        dist.all_gather_single(out, mine, group=group)
        return out.transpose(0, 1)[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0][0].transpose(0, 1).contiguous()
        mine = whole.new_empty(whole.shape[0] // dist.get_world_size(ctx.group), *whole.shape[1:])
        dist.reduce_scatter_single(mine, whole, group=ctx.group)
        return mine.transpose(0, 1)[None], None


def _queries(x: Tensor, group: int, a: int, b: int) -> Tensor:
    """[1, H, L, D] -> [Hk, group, b - a, D]."""
    return x[0, :, a:b].reshape(-1, group, b - a, x.shape[3])


def _keys(x: Tensor, group: int, a: int, b: int) -> Tensor:
    """[1, Hk, L, D] -> [Hk, group, b - a, D], repeated over the group by a zero stride, without a copy."""
    return x[0, :, a:b, None].transpose(1, 2).expand(-1, group, -1, -1)


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Call], scale: float | None) -> Tensor:
        heads, length, width = q.shape[1:]
        group = heads // k.shape[1]
        out = q.new_empty(1, length, heads, width).transpose(1, 2)
        lse = q.new_empty(heads, length, dtype=torch.promote_types(q.dtype, torch.float32))
        for c in calls:
            keys, values = _keys(k, group, c.k0, c.k1), _keys(v, group, c.k0, c.k1)
            o, part = _flash(_queries(q, group, c.q0, c.q1), keys, values, 0.0, c.causal, scale=scale)
            o, part = o.reshape(heads, -1, width), part.reshape(heads, -1)
            if c.causal:
                out[0, :, c.q0 : c.q1], lse[:, c.q0 : c.q1] = o, part
                continue
            old = lse[:, c.q0 : c.q1].clone()
            new = torch.logaddexp(old, part)
            here = out[0, :, c.q0 : c.q1]
            out[0, :, c.q0 : c.q1] = (here * (old - new).exp()[..., None] + o * (part - new).exp()[..., None]).to(
                out.dtype
            )
            lse[:, c.q0 : c.q1] = new
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (go,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        heads, length, width = q.shape[1:]
        group = heads // k.shape[1]
        dq = q.new_empty(1, length, heads, width).transpose(1, 2)
        dk, dv = (x.new_zeros(1, x.shape[2], x.shape[1], width).transpose(1, 2) for x in (k, v))
        for c in ctx.calls:
            x, y, z = _flash_backward(
                _queries(go, group, c.q0, c.q1),
                _queries(q, group, c.q0, c.q1),
                _keys(k, group, c.k0, c.k1),
                _keys(v, group, c.k0, c.k1),
                _queries(out, group, c.q0, c.q1),
                lse[:, c.q0 : c.q1].reshape(-1, group, c.q1 - c.q0),
                0.0,
                c.causal,
                scale=ctx.scale,
            )
            x, y, z = x.reshape(heads, -1, width), y.sum(1), z.sum(1)
            if c.causal:
                dq[0, :, c.q0 : c.q1] = x
            else:
                dq[0, :, c.q0 : c.q1] += x
            dk[0, :, c.k0 : c.k1] += y
            dv[0, :, c.k0 : c.k1] += z
        return dq, dk, dv, None, None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)
