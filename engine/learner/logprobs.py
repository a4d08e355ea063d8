"""Log-probabilities and entropies of trained tokens, in chunks: peak memory does not grow with their number.

Logits exist for one chunk of tokens at a time and are computed again in the backward. Each token is scored as it was
sampled: at its action's temperature and, under top-p or top-k, over the kept token ids that the engine recorded, so
that at unchanged weights the ratio to the behaviour policy is 1 (a full-vocabulary score would be off by log of the
kept mass). Knows hidden states and an output matrix; no model, no loss.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

LOGITS = {"cpu": 1 << 19, "cuda": 1 << 27}  # elements of one chunk of logits: about a core's cache, 512 MiB
EXCLUDED = -1e30  # finite: exp gives 0, and 0 times it is 0, not NaN


@frozen(eq=False)
class Kept:
    """Kept token ids of N tokens, ragged: those of token i are ids[starts[i]:starts[i + 1]]; none means all."""

    ids: Tensor  # [K] int64
    starts: Tensor  # [N + 1] int64


def logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: Tensor | None = None, kept: Kept | None = None
) -> tuple[Tensor, Tensor]:
    """hidden [N, H] predicts targets [N] through weight [V, H] -> (log p(target) [N], entropy [N]), in nats, fp32 or
    wider; both are differentiable. temperature [N] > 0."""
    return _Head.apply(hidden, weight, targets, temperature, kept)  # type: ignore[no-untyped-call, no-any-return]


def chunk_tokens(vocabulary: int, device: str) -> int:
    return max(64, LOGITS.get(device, LOGITS["cuda"]) // vocabulary)


def _scores(h: Tensor, w: Tensor, temperature: Tensor | None, kept: Kept | None, a: int, b: int) -> Tensor:
    """[b - a, V]: logits over temperature, in fp32 or wider, with what was not kept excluded."""
    x = h[a:b] @ w.t()
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if temperature is not None:
        x = x / temperature[a:b, None]
    if kept is None:
        return x
    starts = kept.starts[a : b + 1]
    counts = starts.diff()
    allowed = (counts == 0)[:, None].expand_as(x).contiguous()
    rows = torch.repeat_interleave(torch.arange(b - a, device=x.device), counts)
    allowed[rows, kept.ids[int(starts[0]) : int(starts[-1])]] = True
    return torch.where(allowed, x, EXCLUDED)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w: Tensor, targets: Tensor, temperature: Tensor | None, kept: Kept | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        n, step = len(targets), chunk_tokens(len(w), h.device.type)
        wide = torch.promote_types(h.dtype, torch.float32)
        lp, entropy, lse = (h.new_empty(n, dtype=wide) for _ in range(3))
        for a in range(0, n, step):
            b = min(a + step, n)
            x = _scores(h, w, temperature, kept, a, b)
            z = x.logsumexp(-1)
            lp[a:b] = x.gather(-1, targets[a:b, None])[:, 0] - z
            entropy[a:b] = z - torch.einsum("nv,nv->n", (x - z[:, None]).exp_(), x)
            lse[a:b] = z
        ctx.save_for_backward(h, w, targets, temperature, lse, entropy)
        ctx.kept = kept
        return lp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None, None]:
        g, g_entropy = grads
        h, w, targets, temperature, lse, entropy = ctx.saved_tensors
        n, step = len(targets), chunk_tokens(len(w), h.device.type)
        dh, dw = torch.zeros_like(h), w.new_zeros(w.shape, dtype=lse.dtype)
        for a in range(0, n, step):
            b = min(a + step, n)
            x = _scores(h, w, temperature, ctx.kept, a, b).sub_(lse[a:b, None])  # log p
            if g_entropy is None:
                d = x.exp_()
            else:
                d = x.exp()
                extra = g_entropy[a:b, None] * d * x.add_(entropy[a:b, None])
            if g is None:
                d.zero_()
            else:
                d.mul_(-g[a:b, None]).scatter_add_(1, targets[a:b, None], g[a:b, None])
            if g_entropy is not None:
                d -= extra
            if temperature is not None:
                d = d / temperature[a:b, None]
            d = d.to(h.dtype)
            dh[a:b] = d @ w
            dw += d.t() @ h[a:b]
        return dh, dw.to(w.dtype), None, None, None
