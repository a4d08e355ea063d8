"""Where the tiny model lies on disk, and its architecture.

``tiny_shell/`` is a Hugging Face folder made by ``python -m uniagent.tasks.shell_quest.make_model`` and shipped as
package data: Qwen3, 2 layers, hidden 128, 0.44 M parameters, warm-started on sloppy demonstrations.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def folder() -> Path:
    """The Hugging Face folder of the warm-started model."""
    return Path(str(files("uniagent.tasks.shell_quest") / "tiny_shell"))


def untrained(tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """The architecture with random weights. A large ``initializer_range`` (0.06) learns to copy names in half the
    tokens that the usual 0.02 takes; the global generator of torch is left as it was."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=pad,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    # engines take their defaults from here: plain sampling, no top-k of 50
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=stop, pad_token_id=pad
    )
    return model
