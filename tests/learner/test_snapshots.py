"""Training goes on from a snapshot bit for bit, and a half-written one is never taken for a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from uniagent.engine.config import Learner
from uniagent.engine.errors import UserError
from uniagent.engine.learner import snapshots
from uniagent.engine.learner.batch import build
from uniagent.engine.learner.trainer import Trainer
from uniagent.engine.model_files import load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONFIG = Learner(lr=1e-2, warmup_steps=3, schedule="cosine", minibatches=2)


def trainer(kit: Any) -> Trainer:
    return Trainer(kit.model(), CONFIG, seed=3, steps=6)


def step(kit: Any, made: Trainer, number: int) -> dict[str, float]:
    return made.step(build(kit.groups(seed=number), "mean"))


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in made.policy.model.named_parameters()}


def test_resuming_is_bit_equal_to_going_on(kit: Any, tmp_path: Path) -> None:
    whole = trainer(kit)
    for number in range(2):
        step(kit, whole, number)
    extra = {"position": 17, "version": 2, "admission": {"admitted": 9}, "rng": [1, 2, 3]}
    pending = snapshots.save(whole, tmp_path / "step-2", extra=extra)
    metrics = [step(kit, whole, number) for number in range(2, 4)]  # goes on while it is written
    assert pending.finish() == tmp_path / "step-2"

    resumed = trainer(kit)
    step(kit, resumed, 9)  # whatever it did before
    assert snapshots.load(resumed, tmp_path / "step-2") == extra
    assert [step(kit, resumed, number) for number in range(2, 4)] == metrics
    assert all(torch.equal(weights(resumed)[name], tensor) for name, tensor in weights(whole).items())


def test_a_snapshot_can_hold_a_hugging_face_folder_too(kit: Any, tmp_path: Path) -> None:
    made, tokenizer = trainer(kit), tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    before = weights(made)
    pending = snapshots.save(made, tmp_path / "step-0", tokenizer_folder=tokenizer)
    step(kit, made, 0)
    pending.finish()
    loaded = load(tmp_path / "step-0" / "hf", dtype="float32", device="cpu")
    assert all(torch.equal(p, before[name]) for name, p in loaded.named_parameters())
    assert (tmp_path / "step-0" / "hf" / "tokenizer.json").exists()


def test_nothing_has_the_final_name_until_it_is_whole(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(kit)
    snapshots.save(made, tmp_path / "step-0").finish()
    pending = snapshots.save(made, tmp_path / "step-1")
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-0"]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshots, "commit", full)
    with pytest.raises(UserError, match=r"step-1: the disk is full"):
        pending.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["step-0"]
    with pytest.raises(UserError, match="is not a training checkpoint"):
        snapshots.load(made, tmp_path)
