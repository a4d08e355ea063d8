"""How evenly a mixture-of-experts model spreads its tokens: counted while training, per layer and expert."""

from __future__ import annotations

from typing import Any

import torch
from attrs import define
from torch import Tensor


@define(eq=False)
class Router:
    """``used`` of ``experts`` see each token. ``seen`` are the router's outputs in the last forward, [tokens, experts]
    a layer; counts [layers, experts] the tokens of the forwards that were counted since the last ``take``."""

    used: int
    experts: int
    seen: tuple[Tensor, ...] = ()
    counts: Tensor | None = None

    @staticmethod
    def of(model: Any) -> Router | None:
        """None for a dense model."""
        config = model.config.get_text_config()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((n for name in names if (n := getattr(config, name, None))), None)
        return None if experts is None else Router(config.num_experts_per_tok, experts)

    def count(self) -> None:
        """Counts the last forward."""
        chosen = [layer.topk(self.used, dim=-1).indices.flatten() for layer in self.seen]
        now = torch.stack([torch.bincount(c, minlength=self.experts) for c in chosen])
        self.counts = now if self.counts is None else self.counts + now

    def take(self) -> Tensor | None:
        """The counts so far, from now on counted anew."""
        counts, self.counts = self.counts, None
        return counts


def load(counts: Tensor) -> dict[str, float]:
    """Metrics of counts [layers, experts]: ``router_load_max`` and ``router_load_min``, the busiest and the idlest
    expert of any layer relative to an even spread (1), and ``router_idle``, the share of experts without a token."""
    share = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1) * counts.shape[1]
    return {
        "router_load_max": float(share.max()),
        "router_load_min": float(share.min()),
        "router_idle": float((counts == 0).double().mean()),
    }
