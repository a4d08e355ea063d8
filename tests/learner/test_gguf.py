"""A GGUF file becomes a folder with the same model and a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from uniagent.engine import model_files
from uniagent.engine.errors import UserError
from uniagent.engine.learner.gguf import import_gguf, main


def write(path: Path, extra: str = "") -> Any:
    """A tiny Llama as a GGUF file, with ``extra`` behind the names of its tensors; gives the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = ["<s>", "</s>", *(chr(i) for i in range(33, 127)), "ab"]
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_block_count(1)
    out.add_context_length(64)
    out.add_embedding_length(32)
    out.add_feed_forward_length(48)
    out.add_head_count(4)
    out.add_head_count_kv(4)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_dimension_count(8)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_token_list(tokens)
    out.add_token_merges(["a b"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:  # the file format interleaves the halves of rotary pairs
            weight = weight.reshape(4, 2, 4, 32).swapaxes(1, 2).reshape(32, 32)
        out.add_tensor(f"{names.get_name(name, try_suffixes=('.weight',))}{extra}", weight)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return model


def test_the_model_and_the_tokenizer_are_the_same(tmp_path: Path) -> None:
    model = write(tmp_path / "tiny.gguf")
    assert main([str(tmp_path / "tiny.gguf"), str(tmp_path / "hf")]) == 0
    loaded = model_files.load(tmp_path / "hf", dtype="float32", device="cpu")
    ids = torch.arange(2, 20)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    assert (tmp_path / "hf" / "tokenizer.json").exists()


def test_what_is_not_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "hf")
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"cannot read .*bad\.gguf"):
        import_gguf(tmp_path / "bad.gguf", tmp_path / "hf")
    write(tmp_path / "names.gguf", extra=".x")
    with pytest.raises(UserError, match=r"a LlamaForCausalLM: missing: lm_head\.weight, .* and 7 more"):
        import_gguf(tmp_path / "names.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
