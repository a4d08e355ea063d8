"""The slot cache's K/V and the attention over it, for the layers of an unchanged Hugging Face causal LM.

One forward computes a step's tokens as one packed row [1, N]: the next token of each decoding slot, then pieces of
prompts. Linear layers see no padding; only attention knows about slots. ``SlotKv`` is what the layers call as their
cache; ``attend`` is registered with transformers under a name of its own and in force only inside ``SlotKv.forward``,
so every other use of the same module (the learner's) is untouched.

Decoding slots attend in at most two calls, split by length where that saves work, over a view of adjoining slots where
those are dense enough and over a copy otherwise. K/V of a layer: [slots, heads, context, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from uniagent.adapters.engines.slots import Copy, Piece, Rows
from uniagent.engine.errors import UserError

NAME = "uniagent_slots"

_CALL = 1000  # cost of one more attention call, in K/V columns read
_COPY = 3  # cost of copying a K/V column before reading it, in columns read
_QUERIES = 512  # tokens of a prompt that attend in one call
_KEPT = 1 << 22  # elements of the largest mask that is kept for the other layers


@frozen
class Shape:
    """K/V of one layer and token."""

    heads: int
    key: int
    value: int


@frozen(eq=False)
class _Group:
    """Decoding slots that attend together: places [begin, end) of the row; K/V of ``select`` slots, ``columns`` wide;
    ``places`` of the queries among them (None: one each, in order)."""

    begin: int
    end: int
    select: slice | Tensor
    width: int
    columns: int
    places: Tensor | None
    mask: Tensor


class SlotKv:
    """The K/V of all slots, and one step's layout at a time. Passed to the model as its cache."""

    is_compileable = False

    def __init__(
        self, shapes: Sequence[Shape], slots: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device = device
        self.keys = [torch.zeros(slots, s.heads, context, s.key, dtype=dtype, device=device) for s in shapes]
        self.values = [torch.zeros(slots, s.heads, context, s.value, dtype=dtype, device=device) for s in shapes]
        self._layer = 0
        self._rows = self._columns = torch.zeros(0, dtype=torch.long)
        self._groups: list[_Group] = []
        self._pieces: list[tuple[int, Piece]] = []  # with their place in the row
        self._masks: dict[tuple[int, int], Tensor] = {}

    # ------------------------------------------------------------ a step

    def copy(self, copies: Sequence[Copy]) -> None:
        for each in copies:
            span = slice(each.begin, each.end)
            for store in (*self.keys, *self.values):
                store[each.target, :, span] = store[each.source, :, span]

    def lay_out(self, decode: Rows, lengths: npt.NDArray[np.int64], pieces: Sequence[Piece]) -> tuple[Rows, Rows]:
        """Slot and position of each token of the packed row [N], which starts with the decoding slots, in an order of
        this function's choosing. lengths [B]: tokens each decoding slot attends to, its new one included."""
        self._groups, order = [], []
        begin = 0
        for part in _split(decode, lengths):
            part = part[decode[part].argsort()]
            self._groups.append(self._group(decode[part], lengths[part], begin))
            order.append(part)
            begin += len(part)
        taken = np.concatenate(order) if order else np.zeros(0, np.int64)
        slots, positions = [decode[taken]], [lengths[taken] - 1]
        self._pieces = []
        for piece in pieces:
            self._pieces.append((begin, piece))
            slots.append(np.full(piece.take, piece.slot))
            positions.append(np.arange(piece.begin, piece.begin + piece.take))
            begin += piece.take
        self._masks.clear()
        rows, columns = np.concatenate(slots), np.concatenate(positions)
        self._rows = torch.from_numpy(rows).to(self.device)
        self._columns = torch.from_numpy(columns).to(self.device)
        return rows, columns

    def _group(self, slots: Rows, lengths: npt.NDArray[np.int64], begin: int) -> _Group:
        """slots ascending."""
        low, high, columns = int(slots[0]), int(slots[-1]) + 1, int(lengths.max())
        width, places = high - low, None
        select: slice | Tensor = slice(low, high)
        if width > _COPY * len(slots):
            select, width = torch.from_numpy(slots).to(self.device), len(slots)
        elif width > len(slots):
            places = torch.from_numpy(slots - low).to(self.device)
        attended = lengths
        if places is not None:
            attended = np.ones(width, np.int64)  # an idle slot in between attends to its first token, to no effect
            attended[slots - low] = lengths
        mask = torch.from_numpy(np.arange(columns) < attended[:, None]).to(self.device)[:, None, None]
        return _Group(begin, begin + len(slots), select, width, columns, places, mask)

    @torch.no_grad()
    def forward(self, model: Any, arguments: dict[str, Any], ids: Tensor, wanted: Tensor) -> Tensor:
        """The laid-out tokens ids [N] through the model -> logits [len(wanted), V] float32 of the wanted places."""
        configs = {id(c): c for c in (model.config, model.config.get_text_config())}.values()
        before = [config._attn_implementation for config in configs]
        for config in configs:
            config._attn_implementation = NAME
        try:
            logits = model(
                input_ids=ids[None],
                position_ids=self._columns[None],
                logits_to_keep=wanted,
                use_cache=True,
                slots=self,
                **arguments,
            ).logits
        finally:
            for config, name in zip(configs, before, strict=True):
                config._attn_implementation = name
        return logits[0].float()  # type: ignore[no-any-return]

    # ------------------------------------------------------------ what the layers call

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """key, value [1, heads, N, width] of the step's tokens are stored; attention reads the store."""
        self._layer = layer
        self.keys[layer][self._rows, :, self._columns] = key[0].transpose(0, 1)
        self.values[layer][self._rows, :, self._columns] = value[0].transpose(0, 1)
        return key, value

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        """query [1, H, N, D] -> [1, N, H, Dv], each token over its own slot up to its own position."""
        keys, values = self.keys[self._layer], self.values[self._layer]
        out = query.new_empty(query.shape[2], query.shape[1], values.shape[3])
        for group in self._groups:
            self._decode(group, query[0, :, group.begin : group.end].transpose(0, 1), keys, values, scaling, out)
        for begin, piece in self._pieces:
            for first in range(0, piece.take, _QUERIES):
                last = min(first + _QUERIES, piece.take)
                end = piece.begin + last
                before = piece.begin + first
                out[begin + first : begin + last] = scaled_dot_product_attention(
                    query[:, :, begin + first : begin + last],
                    keys[piece.slot, None, :, :end],
                    values[piece.slot, None, :, :end],
                    attn_mask=self._mask(before, last - first) if before else None,
                    is_causal=not before,
                    scale=scaling,
                    enable_gqa=True,
                )[0].transpose(0, 1)
        return out[None]

    def _decode(
        self, group: _Group, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, out: Tensor
    ) -> None:
        """query [B, H, D]. The query heads of a K/V head are folded into the query length: no K/V is repeated."""
        heads, width = query.shape[1:]
        if group.places is not None:
            spread = query.new_zeros(group.width, heads, width)
            spread[group.places] = query
            query = spread
        attended = scaled_dot_product_attention(
            query.reshape(group.width, keys.shape[1], -1, width),
            keys[group.select][:, :, : group.columns],
            values[group.select][:, :, : group.columns],
            attn_mask=group.mask,
            scale=scaling,
        ).reshape(group.width, heads, -1)
        out[group.begin : group.end] = attended if group.places is None else attended[group.places]

    def _mask(self, before: int, count: int) -> Tensor:
        """[count, before + count]: each of count tokens sees the ones before and those up to itself."""
        mask = self._masks.get((before, count))
        if mask is None:
            mask = torch.ones(count, before + count, dtype=torch.bool, device=self.device).tril(before)
            if mask.numel() <= _KEPT:
                self._masks[before, count] = mask
        return mask


def _split(slots: Rows, lengths: npt.NDArray[np.int64]) -> list[Rows]:
    """[B], [B] -> one or two groups, as indices into slots: short ones apart where that saves more than a call."""
    count = len(slots)
    if not count:
        return []
    order = lengths.argsort(kind="stable")
    if count * int(lengths[order[-1]]) <= 4 * _CALL:
        return [order]
    by_length, sizes = slots[order], lengths[order]

    def cost(numbers: Rows, members: npt.NDArray[np.int64], longest: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of the first 1, 2, ... of ``numbers`` as one group."""
        spread = np.maximum.accumulate(numbers) - np.minimum.accumulate(numbers) + 1
        return np.asarray(np.minimum(spread, _COPY * members) * longest)

    members = np.arange(1, count + 1)
    short = cost(by_length, members, sizes)
    long = cost(by_length[::-1], members, np.full(count, sizes[-1]))[::-1]  # long[k]: from k to the end
    both = short[:-1] + long[1:] + _CALL
    if not both.size or int(both.min()) >= int(short[-1]):
        return [order]
    cut = int(both.argmin()) + 1
    return [order[:cut], order[cut:]]


_FOREIGN = ("softcap", "s_aux", "position_bias")  # attention that this module does not compute


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    slots: SlotKv | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls. query [1, H, N, D] -> [1, N, H, Dv]."""
    if slots is None:
        raise UserError(f"{type(module).__name__} does not pass keyword arguments on to its attention")
    for name in _FOREIGN:
        if kwargs.get(name) is not None:
            raise UserError(f"{type(module).__name__} attends with {name}")
    return slots.attend(query, scaling), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)
