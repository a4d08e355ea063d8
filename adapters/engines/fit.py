"""Whether the slot engine can serve a model, and whether its K/V fits: refused with a sentence at start-up.

What a config says is checked first. Then a probe decides: a few tokens go through the slot cache in pieces and through
the model alone, and the logits must agree. So a model with an unknown kind of attention is refused, not served wrongly.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uniagent.adapters.engines.slot_attention import Shape, SlotKv
from uniagent.adapters.engines.slots import Piece
from uniagent.engine.errors import UserError

_TOLERANCE = {torch.float32: 3e-4, torch.float64: 3e-4}  # of the logits' standard deviation; half precision: 0.15


def refuse(model: Any, why: str) -> UserError:
    return UserError(
        f'engine transformers cannot serve {type(model).__name__}: {why}; use engine.name = "vllm" for this model'
    )


def check_config(model: Any, context: int) -> None:
    """Raises UserError for kinds of attention that a plain K/V cache cannot hold."""
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise refuse(model, "it has an encoder")
    if getattr(config, "kv_lora_rank", None):
        raise refuse(model, "it has latent attention (MLA)")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention", "sliding_attention"}
    if kinds:
        raise refuse(model, f"it has {', '.join(sorted(kinds))} layers (hybrid)")
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < context:
        raise refuse(model, f"its layers see a sliding window of {window} tokens, less than engine.context ({context})")


def cache_argument(model: Any) -> str:
    """What the forward calls its cache: ``cache`` in newer releases of transformers."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


class _Recorder:
    """A cache that only notes what the layers store."""

    is_compileable = False

    def __init__(self) -> None:
        self.shapes: dict[int, Shape] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.shapes[layer] = Shape(key.shape[1], key.shape[3], value.shape[3])
        return key, value

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0


@torch.no_grad()
def shapes(model: Any) -> list[Shape]:
    """K/V of each layer, as one token through the model shows them."""
    recorder = _Recorder()
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    arguments = {cache_argument(model): recorder, "attention_mask": mask(model.device)}
    try:
        model(input_ids=ids, position_ids=ids, use_cache=True, **arguments)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as problem:
        raise refuse(
            model, f"its layers do not take a plain K/V cache ({type(problem).__name__}: {problem})"
        ) from problem
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(recorder.shapes) != list(range(layers)):
        raise refuse(model, f"only {len(recorder.shapes)} of its {layers} layers store K/V of their own")
    return [recorder.shapes[layer] for layer in range(layers)]


def mask(device: torch.device) -> Tensor:
    """A 4D mask: transformers hands it to the layers as it is and builds none of its own."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def check_memory(layers: list[Shape], slots: int, context: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises UserError with the figures when the K/V of all slots does not fit into what is free."""
    token = dtype.itemsize * sum(s.heads * (s.key + s.value) for s in layers)
    free = _free(device)
    needed = slots * context * token
    if free is None or needed <= 0.9 * free:
        return
    fitting = int(0.9 * free) // token
    raise UserError(
        f"the K/V of engine.slots = {slots} requests of engine.context = {context} tokens takes {needed >> 20} MiB "
        f"({token} bytes a token), but {free >> 20} MiB are free: set engine.slots to at most {fitting // context} or "
        f"engine.context to at most {fitting // slots}"
    )


def _free(device: torch.device) -> int | None:
    """Bytes; None: unknown here."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    if device.type != "cpu" or not info.exists():
        return None
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


@torch.no_grad()
def probe(model: Any, layers: list[Shape]) -> None:
    """Two sequences in pieces through a small slot cache against the model alone; raises UserError when they differ."""
    kv = SlotKv(layers, 3, 12, model.dtype, model.device)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, (2, 10))).to(model.device)
    arguments = {cache_argument(model): kv, "attention_mask": mask(model.device)}
    steps = [
        ([], [Piece(0, 0, 6), Piece(2, 0, 4)]),
        ([], [Piece(0, 6, 3), Piece(2, 4, 5)]),
        ([0, 2], []),
    ]
    try:
        for decode, pieces in steps:
            rows, columns = kv.lay_out(np.array(decode, np.int64), np.full(len(decode), 10), pieces)
            inputs = ids[torch.from_numpy(rows // 2), torch.from_numpy(columns)]
            logits = kv.forward(model, arguments, inputs, torch.arange(len(rows), device=model.device)[-2:])
        alone = model(input_ids=ids, use_cache=False).logits[:, -1].float()
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, UserError) as problem:
        raise refuse(model, f"its attention needs more than a plain K/V cache ({problem})") from problem
    difference, size = (logits - alone).abs().max().item(), alone.std().item()
    if not difference <= _TOLERANCE.get(model.dtype, 0.15) * size:
        raise refuse(
            model, f"through a plain K/V cache its logits differ by {difference:.2g} (they spread by {size:.2g})"
        )
