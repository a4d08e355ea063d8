"""The model as the learner sees it: a row in, log-probabilities and entropies of its trained tokens out.

Wraps a Hugging Face causal LM without changing it: the body runs once over the row, the output matrix only where a
token is trained. The module is run in eval mode (dropout would make the ratio to the behaviour policy differ from 1),
and its mode is put back afterwards. Knows no loss and no optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from uniagent.engine.errors import UserError
from uniagent.engine.learner import flex
from uniagent.engine.learner.attention import Layout, forest_attention
from uniagent.engine.learner.context import part
from uniagent.engine.learner.forest import Index
from uniagent.engine.learner.logprobs import Kept, logprobs
from uniagent.engine.learner.packing import Cost, Row
from uniagent.engine.learner.ranks import ALONE, Ranks, shard
from uniagent.engine.learner.router import Router


@frozen(eq=False)
class Inputs:
    """A row on the device: ids and positions [1, L], sources and targets [n], temperature [n] or None."""

    ids: Tensor
    positions: Tensor
    layout: Layout
    sources: Tensor
    targets: Tensor
    temperature: Tensor | None = None
    kept: Kept | None = None


class Policy(torch.nn.Module):
    """model: a Hugging Face causal LM whose layers all attend fully; raises UserError for others. With several ranks
    its weights are sharded over them, and every forward is one of all ranks. ``autocast``: dtype of matrix products;
    ``recompute``: layers run again in the backward, so that their activations are not kept."""

    def __init__(
        self, model: Any, ranks: Ranks = ALONE, *, autocast: torch.dtype | None = None, recompute: bool = False
    ) -> None:
        super().__init__()
        check(model)
        self.model, self.ranks, self.autocast = model, ranks, autocast
        self.router = Router.of(model)
        self.recompute = recompute
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if ranks.size > 1:
            shard(self, model.get_decoder().layers, ranks, autocast)

    def inputs(self, row: Row) -> tuple[Inputs, Index]:
        """This rank's part of a row, and the numbers of the row's trained tokens that it has."""
        if self.ranks.context == 1:
            mine, kept = row.forest, np.arange(len(row.tokens))
            ids, positions, sources = mine.ids, mine.positions, row.sources
            layout = Layout(mine.calls, mask=self._mask(np.arange(len(ids)), mine.ends))
        else:
            piece = part(row, self.ranks.part, self.ranks.context)
            ids, positions, sources, kept = piece.ids, piece.positions, piece.sources, piece.kept
            mask = self._mask(piece.places, piece.ends)
            layout = Layout(piece.calls, self.ranks.context_group, self.put(piece.order), mask)
        made = Inputs(
            ids=self.put(ids).long()[None],
            positions=self.put(positions)[None],
            layout=layout,
            sources=self.put(sources),
            targets=self.put(row.targets[kept]),
        )
        return made, kept

    def _mask(self, places: Index, ends: Index) -> Any:
        """For flex attention, where it is used."""
        dtype = self.autocast or self.model.dtype
        return flex.block_mask(places, ends, self.device) if flex.usable(self.device, dtype, self.width) else None

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """On the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """(log p [n], entropy [n]) of the trained tokens; call inside ``running()``."""
        settings = {"output_router_logits": True} if self.router else {}
        out = self.model.get_decoder()(
            input_ids=x.ids, position_ids=x.positions, attention_mask=None, use_cache=False, forest=x.layout, **settings
        )
        if self.router:
            self.router.seen = tuple(layer.detach() for layer in out.router_logits)
        hidden = out.last_hidden_state[0]
        weight = self.model.get_output_embeddings().weight
        if self.autocast is not None:  # norms leave fp32, and the head is not an operation that autocast knows
            hidden, weight = hidden.to(self.autocast), weight.to(self.autocast)
        return logprobs(hidden[x.sources], weight, x.targets, temperature=x.temperature, kept=x.kept)

    @torch.no_grad()
    def score(self, x: Inputs) -> Tensor:
        """log p [n] without gradient."""
        with self.running():
            lp: Tensor = self(x)[0]
        if self.ranks.size > 1:  # no backward does it: an optimizer step would leave the gathered weights behind
            self.reshard()  # type: ignore[operator]
        return lp

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Open around a forward and its backward."""
        training = self.model.training
        self.model.eval()
        if self.recompute:  # the layers look at their own flag, what is in them does not see it
            for layer in self.model.get_decoder().layers:
                layer.training = True
        autocast = self.autocast is not None and self.ranks.size == 1  # sharded weights are gathered in that dtype
        try:
            with forest_attention(self.model), torch.autocast(self.device.type, self.autocast, enabled=autocast):
                yield
        finally:
            self.model.train(training)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def width(self) -> int:
        """Dimension of a head."""
        config = self.model.config.get_text_config()
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def cost(self) -> Cost:
        """Floating-point operations of a forward and backward, up to a factor: 6 a weight and token, 12 a layer, head,
        head dimension and pair."""
        config = self.model.config.get_text_config()
        named = self.model.get_decoder().named_parameters()
        used = self.router.used / self.router.experts if self.router else 1.0
        weights = sum(p.numel() * (used if ".experts." in name else 1.0) for name, p in named)
        weights -= self.model.get_input_embeddings().weight.numel()
        return Cost(6.0 * weights, 12.0 * config.num_hidden_layers * config.num_attention_heads * self.width)


def check(model: Any) -> None:
    """Refuses models whose rows cannot be packed exactly."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        raise UserError(
            f"model {type(model).__name__} has {', '.join(sorted(kinds))} layers, which the learner cannot pack: "
            "use a model whose layers all attend fully"
        )
    if getattr(config, "final_logit_softcapping", None):
        raise UserError(
            f"model {type(model).__name__} caps its logits (final_logit_softcapping), which the learner does not"
        )
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UserError(
            f"model {type(model).__name__} has a bias on its output matrix, which the learner does not support"
        )
