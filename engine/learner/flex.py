"""Attention over a forest by PyTorch's flex attention: one kernel a layer, whatever the number of segments.

In a row laid out depth first, a query sees exactly the keys that stand at or before it and whose segment's descendants
have not ended before it: two comparisons a pair, and whole blocks of pairs are known to be seen or unseen from the
segments alone (FlexAttention, Dong et al. 2024, arXiv:2412.05496). The block mask is made from the segments, so nothing
of size L x L exists. Compiled on an accelerator; uncompiled, for tests, it is a plain masked attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from uniagent.engine.learner.forest import Index

BLOCK = 128  # queries and keys of a block
_NARROWEST = 16  # head dimension that the kernels take


def usable(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the compiled kernels take tensors of this dtype and head dimension on the device."""
    return device.type == "cuda" and dtype != torch.float64 and width >= _NARROWEST


def block_mask(places: Index, ends: Index, device: torch.device) -> BlockMask:
    """The mask of queries at ``places`` [l] of a row, ascending within a block, and all of its keys: ``ends`` [L] is
    where the descendants of a key's segment end."""
    seen, whole = _blocks(places, ends)
    partial = _listed(seen & ~whole, device)
    full = _listed(whole, device)
    at, until = (torch.from_numpy(_filled(x)).to(device) for x in (places, ends))

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= at[query]) & (at[query] < until[key])

    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(len(places), len(ends))
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None) -> Tensor:
    """[1, H, l, D], [1, Hk, L, D] -> [1, H, l, D]."""
    run: Any = _compiled() if query.is_cuda else flex_attention
    out: Tensor = run(query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    return out


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def _blocks(places: Index, ends: Index) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """For each block of queries and of keys: whether a pair may be seen, and whether all are. A last block that is not
    full is never whole."""
    first_query, last_query = _spans(places)
    first_end, last_end = _spans(ends)
    first_key, last_key = _spans(np.arange(len(ends)))
    seen = (first_key <= last_query[:, None]) & (first_query[:, None] < last_end)
    whole = (last_key <= first_query[:, None]) & (last_query[:, None] < first_end)
    whole[len(places) // BLOCK :] = False
    whole[:, len(ends) // BLOCK :] = False
    return seen, whole & seen


def _spans(values: Index) -> tuple[Index, Index]:
    """(least, greatest) of every block."""
    starts = np.arange(0, len(values), BLOCK)
    return np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def _listed(chosen: npt.NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """(how many, which first) blocks of keys for each block of queries, as ``from_kv_blocks`` wants them."""
    counts = chosen.sum(1, dtype=np.int32)
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    made = (torch.from_numpy(x).to(device)[None, None] for x in (counts, order))
    return next(made), next(made)


def _filled(values: Index) -> Index:
    """Up to a whole number of blocks: a kernel reads there, and masks what it read."""
    return np.concatenate([values, np.zeros(-len(values) % BLOCK, values.dtype)])
