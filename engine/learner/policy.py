"""The model as the learner sees it: a row in, log-probabilities and entropies of its trained tokens out.

Wraps a Hugging Face causal LM without changing it: the body runs once over the row, the output matrix only where a
token is trained. The module is run in eval mode (dropout would make the ratio to the behaviour policy differ from 1),
and its mode is put back afterwards. Knows no loss and no optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from uniagent.engine.errors import UserError
from uniagent.engine.learner.attention import forest_attention
from uniagent.engine.learner.forest import Call
from uniagent.engine.learner.logprobs import Kept, logprobs
from uniagent.engine.learner.packing import Cost, Row


@frozen(eq=False)
class Inputs:
    """A row on the device: ids and positions [1, L], sources and targets [n], temperature [n] or None."""

    ids: Tensor
    positions: Tensor
    calls: tuple[Call, ...]
    sources: Tensor
    targets: Tensor
    temperature: Tensor | None = None
    kept: Kept | None = None


def inputs(row: Row, device: torch.device, temperature: Tensor | None = None, kept: Kept | None = None) -> Inputs:
    return Inputs(
        ids=torch.from_numpy(row.forest.ids).long().to(device)[None],
        positions=torch.from_numpy(row.forest.positions).to(device)[None],
        calls=row.forest.calls,
        sources=torch.from_numpy(row.sources).to(device),
        targets=torch.from_numpy(row.targets).to(device),
        temperature=temperature,
        kept=kept,
    )


class Policy(torch.nn.Module):
    """model: a Hugging Face causal LM whose layers all attend fully; raises UserError for others."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        check(model)
        self.model = model

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """(log p [n], entropy [n]) of the trained tokens; call inside ``running()``."""
        body = self.model.get_decoder()
        hidden = body(
            input_ids=x.ids, position_ids=x.positions, attention_mask=None, use_cache=False, forest=x.calls
        ).last_hidden_state[0]
        weight = self.model.get_output_embeddings().weight
        return logprobs(hidden[x.sources], weight, x.targets, temperature=x.temperature, kept=x.kept)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Open around a forward and its backward."""
        training = self.model.training
        self.model.eval()
        try:
            with forest_attention(self.model):
                yield
        finally:
            self.model.train(training)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def cost(self) -> Cost:
        """Floating-point operations of a forward and backward, up to a factor: 6 a weight and token, 12 a layer, head,
        head dimension and pair."""
        config = self.model.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        weights = sum(p.numel() for p in self.model.get_decoder().parameters())
        weights -= self.model.get_input_embeddings().weight.numel()
        return Cost(6.0 * weights, 12.0 * config.num_hidden_layers * config.num_attention_heads * width)


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
