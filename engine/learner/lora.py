"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) through peft, put into the model in place.

The model keeps its class and its forward, so that an engine that decodes on the same module samples from the adapted
weights. Outside, weights have their old names and hold base plus adapter. Needs the extra ``lora``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from uniagent.engine.errors import UserError

NAME = "default"  # peft's name of the only adapter


def add(model: Any, *, rank: int, alpha: float, seed: int) -> None:
    """Adapters on every linear layer but the output; only they require a gradient from now on."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as problem:
        raise UserError("learner.lora_rank needs peft: pip install 'uniagent[lora]'") from problem
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"), model)


def adapted(model: Any) -> bool:
    return any(hasattr(m, "lora_A") for m in model.modules())


@contextlib.contextmanager
def disabled(model: Any) -> Iterator[None]:
    """While open, the model is the one before any training: a reference that costs no memory."""
    layers = [m for m in model.modules() if hasattr(m, "lora_A")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(model: Any, name: str, weight: Tensor, whole: Callable[[Tensor], Tensor]) -> tuple[str, Tensor] | None:
    """What a parameter is outside: its old name and base plus adapter; None for an adapter's own. ``whole`` gathers a
    sharded tensor."""
    if ".lora_" in name:
        return None
    before, inside, after = name.partition(".base_layer.")
    if not inside:
        return name, weight
    layer = model.get_submodule(before)
    if after == "weight":
        down, up = (whole(getattr(layer, part)[NAME].weight.detach()) for part in ("lora_A", "lora_B"))
        weight = weight + (up @ down).to(weight.dtype) * layer.scaling[NAME]
    return f"{before}.{after}", weight
