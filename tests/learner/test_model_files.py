"""A folder whose weights are not exactly the model's is refused by name, instead of training on random ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from uniagent.engine import model_files
from uniagent.engine.errors import UserError


@pytest.fixture
def folder(kit: Any, tmp_path: Path) -> Path:
    kit.model().save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Sets weights by name (``__`` for a dot); None takes one away."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, file, metadata={"format": "pt"})


NORM = "model__norm__weight"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({NORM: None}, "missing: model.norm.weight"),
        ({"model__extra": torch.ones(3)}, "unexpected: model.extra"),
        ({NORM: torch.ones(31)}, "of another shape: model.norm.weight is (31,) instead of (32,)"),
        ({NORM: None, "model__extra": torch.ones(3)}, "missing: model.norm.weight; unexpected: model.extra"),
    ],
)
def test_other_weights_are_refused_by_name(folder: Path, changes: dict[str, Any], text: str) -> None:
    change(folder, **changes)
    with pytest.raises(UserError, match=re.escape(f"does not hold the weights of a Qwen3ForCausalLM: {text}")):
        model_files.load(folder, dtype="float32", device="cpu")


def test_tied_weights_may_be_there_once_or_twice(kit: Any, folder: Path) -> None:
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    expected = kit.model().get_input_embeddings().weight
    for both in (False, True):
        if both:
            change(folder, lm_head__weight=expected.detach().clone())
        model = model_files.load(folder, dtype="float32", device="cpu")
        assert torch.equal(model.get_output_embeddings().weight, expected)  # type: ignore[operator]


def test_a_broken_file_is_told_in_a_sentence(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.path: cannot load a model"):
        model_files.load(folder, dtype="float32", device="cpu")


def test_a_gguf_file_is_told_how_to_become_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    with pytest.raises(UserError, match=r"python -m uniagent\.engine\.learner\.gguf .*x\.gguf FOLDER"):
        model_files.folder(str(tmp_path / "x.gguf"))
