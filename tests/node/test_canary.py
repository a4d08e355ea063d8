"""The canary: silent when engine and learner agree, loud when the engine has other weights."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from uniagent.adapters.engines.transformers import SlotEngine
from uniagent.engine.accelerator import Accelerator
from uniagent.engine.canary import Canary, CanaryMismatch, agree, forward_logprobs
from uniagent.engine.ports import KvPolicy
from uniagent.engine.rollout.driver import StepDriver


def tiny() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


async def test_agreement_passes_and_a_lost_update_stops_the_run() -> None:
    learner = tiny()
    served = copy.deepcopy(learner)
    engine = SlotEngine(served, slots=2, context=64, prefill_tokens=64, shared=False)
    async with Accelerator.start() as accelerator:
        driver = StepDriver(accelerator, engine)
        canary = Canary(accelerator, driver, partial(forward_logprobs, learner), seed=3, vocabulary=200)
        assert await canary.check(0) < 1e-4
        with torch.no_grad():
            for parameter in learner.parameters():
                parameter.mul_(1.1)
        with pytest.raises(CanaryMismatch, match="version 1"):
            await canary.check(1)
        await driver.update(learner.named_parameters(), 2, KvPolicy.RECOMPUTE)
        assert await canary.check(2) < 1e-4


@pytest.mark.slow
def test_weights_that_do_not_arrive_stop_the_run_by_name(quickstart: Any, tmp_path: Path) -> None:
    lost = """
from uniagent.adapters.engines import transformers as engine
whole = engine.load
def load(module, weights):
    whole(module, weights)
    dict(module.named_parameters())["model.norm.weight"].data[3] += 1e-6
engine.load = load
"""
    copies = ("rollout.mode='colocated'", "learner.minibatches=2")  # the engine has a module of its own
    done = quickstart.train(tmp_path / "run", "run.steps=2", "eval.data=''", *copies, prelude=lost)
    assert done.returncode == 1
    assert "model.norm.weight (1 weights in all) are not what the learner sent" in done.stderr


async def test_another_engine_is_held_to_the_learners_answer() -> None:
    learner = tiny()
    same, other = copy.deepcopy(learner), copy.deepcopy(learner)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    async with Accelerator.start() as accelerator:
        drivers = [
            StepDriver(accelerator, SlotEngine(model, slots=2, context=64, prefill_tokens=64, shared=False))
            for model in (learner, same, other)
        ]
        canary = Canary(
            accelerator, drivers[0], partial(forward_logprobs, learner), seed=3, vocabulary=200, greedy=True
        )
        await canary.check(0)
        gap = await agree(drivers[1], canary.reference)
        assert gap is not None
        assert gap < 1e-4
        with pytest.raises(CanaryMismatch, match="does not compute the same"):
            await agree(drivers[2], canary.reference)
        await drivers[1].update(same.named_parameters(), 1, KvPolicy.RECOMPUTE)
        assert await agree(drivers[1], canary.reference) is None  # it has newer weights
