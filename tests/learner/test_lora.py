"""Adapters: only they are trained, the module samples from them, and outside there are plain weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from uniagent.engine import model_files
from uniagent.engine.config import Learner
from uniagent.engine.learner.batch import build
from uniagent.engine.learner.checkpoints import save_hf
from uniagent.engine.learner.trainer import Trainer
from uniagent.engine.learner.weights import copy_weights, named_weights

CONFIG = Learner(lora_rank=4, lr=1e-2, warmup_steps=0)


def trained(kit: Any, config: Learner = CONFIG) -> tuple[Any, Any, list[dict[str, float]]]:
    """(model before, model after, metrics of three steps)."""
    model = kit.model(tie_word_embeddings=False)
    before = copy.deepcopy(model)
    trainer = Trainer(model, config, seed=0, steps=3)
    metrics = [trainer.step(build(kit.groups(seed=i, score=kit.scorer(model)), "mean")) for i in range(3)]
    return before, model, metrics


def test_only_adapters_are_trained(kit: Any) -> None:
    before, model, metrics = trained(kit)
    kept = dict(before.named_parameters())
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, kept[name.replace(".base_layer", "")])
            assert not parameter.requires_grad
    assert metrics[0]["logprob_gap"] < 1e-5  # an adapter starts at nothing
    assert metrics[2]["logprob_gap"] < 1e-5  # the module itself samples from the adapted weights
    ids = torch.arange(1, 20)[None]
    assert (before(ids).logits - model(ids).logits).abs().max() > 1e-3


def test_outside_there_are_plain_weights(kit: Any, tmp_path: Path) -> None:
    before, model, _ = trained(kit)
    ids = torch.arange(1, 20)[None]
    copy_weights(named_weights(model), before)  # an engine's own copy
    torch.testing.assert_close(before(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
    save_hf(model, tmp_path, tmp_path / "hf")
    loaded = model_files.load(tmp_path / "hf", dtype="float32", device="cpu")
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-4)


def test_the_reference_is_the_model_without_adapters(kit: Any) -> None:
    _, _, metrics = trained(kit, Learner(lora_rank=4, lr=1e-2, warmup_steps=0, kl_coef=0.1))
    assert metrics[0]["reference_kl"] == pytest.approx(0, abs=1e-9)
    assert metrics[2]["reference_kl"] > 1e-6


def test_adapters_start_from_the_seed_alone(kit: Any) -> None:
    def start(seed: int) -> np.ndarray:
        model = kit.model()
        Trainer(model, CONFIG, seed=seed, steps=1)
        return np.concatenate([p.detach().flatten().numpy() for n, p in model.named_parameters() if "lora_A" in n])

    state = torch.get_rng_state()
    assert (start(1) == start(1)).all()
    assert (start(1) != start(2)).any()
    assert torch.equal(torch.get_rng_state(), state)
