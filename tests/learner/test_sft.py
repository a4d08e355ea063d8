"""Supervised training: it learns what the mask marks, the same from the same seed, and leaves the generators alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from uniagent.engine.learner.sft import SftStep, sft


def examples() -> list[tuple[np.ndarray, np.ndarray]]:
    """A prompt of two ids; the answer repeats them."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(32):
        a, b = rng.integers(1, 8, 2)
        made.append((np.array([a, b, 60, a, b, 61], np.int32), np.array([False] * 3 + [True] * 3)))
    return made


def test_it_learns_the_answers(kit: Any) -> None:
    steps: list[SftStep] = []
    done = sft(kit.model(), examples(), steps=60, tokens_per_step=96, lr=1e-2, seed=0, warmup=5, on_step=steps.append)
    assert done == steps
    assert done[-1].loss < 0.3 < done[0].loss
    assert done[0].learned == done[0].tokens // 2


def test_the_same_seed_gives_the_same_weights_and_packing_does_not_matter(kit: Any) -> None:
    def trained(micro_tokens: int, seed: int = 0) -> torch.Tensor:
        model = kit.model()
        sft(model, examples(), steps=4, tokens_per_step=60, lr=1e-3, seed=seed, micro_tokens=micro_tokens)
        weight: torch.Tensor = model.lm_head.weight
        return weight.detach()

    state = torch.get_rng_state()
    assert torch.equal(trained(1000), trained(1000))
    torch.testing.assert_close(trained(16), trained(1000), rtol=0, atol=1e-5)
    assert not torch.equal(trained(1000, seed=1), trained(1000))
    assert torch.equal(torch.get_rng_state(), state)


def test_every_example_is_seen_before_any_comes_again(kit: Any) -> None:
    made = [(np.array([1, 2 + i], np.int32), np.array([False, True])) for i in range(8)]
    steps = sft(kit.model(), made, steps=4, tokens_per_step=4, lr=0.0, seed=3)
    once = sft(kit.model(), made, steps=1, tokens_per_step=16, lr=0.0, seed=3)
    assert np.mean([s.loss for s in steps]) == pytest.approx(once[0].loss, rel=1e-5)


def test_nothing_to_learn_is_an_error(kit: Any) -> None:
    with pytest.raises(ValueError, match="no sequence has a token to learn"):
        sft(kit.model(), [(np.array([1, 2]), np.array([True, False]))], steps=1, tokens_per_step=8, lr=1e-3, seed=0)
