"""One draw a row from logits: temperature, top-k, top-p, greedy. The kept set and exact logprobs come with it.

A draw is the inverse of the cumulative distribution, in vocabulary order and float64, at a given uniform number, so a
token depends on its own row and number alone. Filters work as in transformers and vLLM: temperature, then top-k, then
top-p over what top-k left (the smallest set of likeliest tokens whose mass reaches top_p). Logprobs are those of the
distribution drawn from: at the temperature, renormalised over the kept set. Temperature 0 takes the likeliest token;
its logprob is the one at temperature 1 over the whole vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from uniagent.engine.ports import Floats, Ids

_BLOCK = 512  # the cumulative sum over large vocabularies goes in two levels
_FIRST = 1024  # likeliest tokens looked at before a whole row is sorted


@frozen(eq=False)
class Drawn:
    """tokens [B], logprobs [B] in nats; kept[b] as in ``Generation``."""

    tokens: Ids
    logprobs: Floats
    kept: dict[int, Ids]  # by row; rows where nothing was cut are absent


def draw(
    logits: Tensor,
    temperature: Floats,
    top_p: npt.NDArray[np.float64],
    top_k: npt.NDArray[np.int32],
    uniforms: npt.NDArray[np.float64],
) -> Drawn:
    """logits [B, V] float32, the rest [B] -> one token a row. uniforms are in (0, 1)."""
    vocabulary = logits.shape[1]
    greedy = temperature == 0
    scale = np.where(greedy, np.float32(1), temperature)
    scaled = logits if (scale == 1).all() else logits / torch.from_numpy(scale).to(logits.device)[:, None]
    logp = scaled.log_softmax(-1)
    p = logp.exp()
    cut = np.flatnonzero(~greedy & ((top_p < 1) | ((top_k > 0) & (top_k < vocabulary))))
    kept: dict[int, Ids] = {}
    mass = np.ones(len(temperature))
    if cut.size:
        k = np.where(top_k[cut] > 0, np.minimum(top_k[cut], vocabulary), vocabulary)
        left = _left(p[cut], torch.from_numpy(k).to(p.device), torch.from_numpy(top_p[cut]).to(p.device))
        p[cut] = torch.where(left, p[cut], 0.0)
        mass[cut] = p[cut].sum(-1, dtype=torch.float64).cpu().numpy()
        for row, each in zip(cut.tolist(), left.cpu().numpy(), strict=True):
            if not each.all():
                kept[row] = np.flatnonzero(each).astype(np.int32)
    tokens = _inverse(p, torch.from_numpy(uniforms).to(p.device))
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(p.device), logits.argmax(-1), tokens)
    chosen = logp.gather(1, tokens[:, None])[:, 0].cpu().numpy()
    logprobs = (chosen - np.log(mass)).astype(np.float32) if kept else chosen
    return Drawn(tokens.cpu().numpy().astype(np.int32), logprobs, kept)


def _left(p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """p [B, V], top_k [B] (V: off), top_p [B] -> [B, V] whether the filters leave a token."""
    first = min(_FIRST, p.shape[1])
    values, order = torch.topk(p, first)
    short = (top_k > first) & ((top_k < p.shape[1]) | (values.sum(-1, dtype=torch.float64) < top_p))
    left = torch.zeros_like(p, dtype=torch.bool)
    left.scatter_(1, order, _leading(values, p, top_k, top_p))
    if short.any():
        values, order = p[short].sort(dim=-1, descending=True)
        left[short] = torch.zeros_like(order, dtype=torch.bool).scatter_(
            1, order, _leading(values, p[short], top_k[short], top_p[short])
        )
    return left


def _leading(values: Tensor, p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """values [B, N]: p's largest, descending -> [B, N] whether the filters leave it. The likeliest always stays."""
    within = torch.arange(values.shape[1], device=p.device) < top_k[:, None]
    double = torch.where(within, values.double(), 0.0)
    total = torch.where(top_k < p.shape[1], double.sum(-1), p.sum(-1, dtype=torch.float64))
    before = double.cumsum(-1) - double
    return within & ((before < (top_p * total)[:, None]) | (top_p >= 1)[:, None])


def _inverse(p: Tensor, u: Tensor) -> Tensor:
    """p [B, V] >= 0 (not normalised), u [B] in (0, 1) -> [B] the first token whose cumulative mass exceeds u."""
    rows, vocabulary = p.shape
    if vocabulary <= 4 * _BLOCK:
        return _first_over(p.double(), u)[0]
    padded = torch.nn.functional.pad(p, (0, -vocabulary % _BLOCK)).view(rows, -1, _BLOCK)
    block, left = _first_over(padded.sum(-1, dtype=torch.float64), u)
    inside = padded[torch.arange(rows, device=p.device), block].double()
    return block * _BLOCK + _first_over(inside, left / inside.sum(-1))[0]


def _first_over(mass: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """mass [B, N] float64 -> (index [B] of the first cumulative sum over u x total, how far into it the target is)."""
    cumulative = mass.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))  # never past the last mass
    index = (cumulative <= target[:, None]).sum(-1).clamp_(max=mass.shape[1] - 1)  # clamped only where NaN
    here = index[:, None]
    before = cumulative.gather(1, here) - mass.gather(1, here)
    return index, (target - before[:, 0]).clamp_(min=0)
