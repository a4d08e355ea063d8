"""Checkpoints as Hugging Face folders: whole or not there, and the same model when loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from uniagent.engine import model_files
from uniagent.engine.errors import UserError
from uniagent.engine.learner.checkpoints import (
    atomic_folder,
    best,
    forget_best,
    mark_best,
    prune,
    save_hf,
    step_folder,
    steps,
)


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
    loaded = model_files.load(target, dtype="float32", device="cpu")
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

    with pytest.raises(UserError, match=r"cannot write .*hf: the disk is full"):
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


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        with atomic_folder(step_folder(tmp_path, step)) as folder:
            (folder / "x").touch()
    assert [mark_best(tmp_path, step, value) for step, value in ((1, 0.2), (2, 0.7), (3, 0.7), (5, 0.1))] == [
        True,
        True,
        False,
        False,
    ]
    (tmp_path / ".step-9.part").mkdir()  # a crash while writing
    assert prune(tmp_path, keep=2) == [2, 5, 6]
    assert best(tmp_path) == 2
    forget_best(tmp_path, after=2)  # a run goes on after step 2: still the best
    assert best(tmp_path) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.json", "step-2", "step-5", "step-6"]
    forget_best(tmp_path, after=1)  # and from before it, one that is yet to come
    assert best(tmp_path) is None
    assert mark_best(tmp_path, 2, 0.7)
