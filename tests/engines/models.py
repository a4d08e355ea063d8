"""Tiny random models for engine tests, and their weights at every policy version."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tests.engines.contract import Logits
from uniagent.adapters.engines.fit import cache_argument
from uniagent.engine.ports import Ids, VersionSpan

SIZE: dict[str, Any] = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM serves on a CPU
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
}
CONFIGS: dict[str, Any] = {
    "qwen3": lambda: Qwen3Config(**SIZE, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SIZE, tie_word_embeddings=False),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=False
    ),
}


@functools.cache
def reference(kind: str, version: int = 0) -> Any:
    """The model of a kind as it is at a policy version; never change what this returns."""
    if version == 0:
        state = torch.random.get_rng_state()
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).eval()
        torch.random.set_rng_state(state)
        return model.requires_grad_(False)
    model = copy.deepcopy(reference(kind))
    generator = torch.Generator().manual_seed(version)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise * 0.1 * parameter.abs().mean())
    return model


def module(kind: str) -> Any:
    """A module of one's own at version 0, with gradients."""
    return copy.deepcopy(reference(kind)).requires_grad_(True)


@torch.no_grad()
def forward(kind: str, ids: Ids, version: int) -> Logits:
    """[T, V] of a plain forward under a version's weights."""
    row = torch.from_numpy(ids).long()[None]
    return np.asarray(reference(kind, version)(input_ids=row, use_cache=False).logits[0].numpy())


@torch.no_grad()
def replayed(kind: str, ids: Ids, spans: tuple[VersionSpan, ...]) -> Logits:
    """[T, V] of a forward in which each span's tokens are computed by its version over the K/V before."""
    cache, parts = DynamicCache(), []
    for span in spans:
        piece = torch.from_numpy(ids[span.start : span.end]).long()[None]
        model = reference(kind, span.version)
        parts.append(model(input_ids=piece, use_cache=True, **{cache_argument(model): cache}).logits[0])
    return np.asarray(torch.cat(parts).numpy())
