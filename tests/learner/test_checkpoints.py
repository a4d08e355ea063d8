"""Checkpoints as Hugging Face folders: whole or not there, and the same model when loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from uniagent.engine.errors import UserError
from uniagent.engine.learner.checkpoints import atomic_folder, load_hf, save_hf, step_folder, steps


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"not these weights")
    return folder


def test_what_is_saved_is_what_is_loaded(kit: Any, tmp_path: Path, tokenizer: Path) -> None:
    model = kit.model()
    target = step_folder(tmp_path / "checkpoints", 7) / "hf"
    save_hf(model, tokenizer, target)
    loaded = load_hf(target)
    assert not loaded.training
    ids = torch.arange(1, 9)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert (target / "tokenizer.json").read_text() == "{}"
    assert steps(tmp_path / "checkpoints") == [7]


def test_an_error_leaves_the_last_good_one(tmp_path: Path) -> None:
    target = tmp_path / "hf"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("good")

    def fail(problem: BaseException) -> None:
        with atomic_folder(target) as folder:
            (folder / "a").write_text("half")
            raise problem

    with pytest.raises(UserError, match=r"cannot write .* No space left"):
        fail(OSError(28, "No space left on device"))
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt())
    assert (target / "a").read_text() == "good"
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_replacing_a_folder(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with atomic_folder(tmp_path / "hf") as folder:
            (folder / text).write_text(text)
    assert [p.name for p in (tmp_path / "hf").iterdir()] == ["second"]
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it has no config\.json"):
        load_hf(tmp_path)
