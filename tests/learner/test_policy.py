"""A packed row equals the plain forward of each sequence, value and gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from uniagent.engine.errors import UserError
from uniagent.engine.learner.packing import Item, pack
from uniagent.engine.learner.policy import Policy


def items() -> list[Item]:
    rng = np.random.default_rng(0)
    made, at = [], 0
    for group in range(2):
        prompt = rng.integers(1, 64, 20)
        for _ in range(3):
            ids = np.concatenate([prompt, rng.integers(1, 64, rng.integers(2, 12))]).astype(np.int32)
            trained = np.arange(20, len(ids))
            made.append(Item(ids, trained, at + np.arange(len(trained)), group))
            at += len(trained)
    return made


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_equal_plain_forwards(kit: Any, share: bool, tied: bool) -> None:
    model = kit.model(tie_word_embeddings=tied)
    made = items()
    total = sum(len(i.trained) for i in made)
    weight = torch.randn(total, generator=torch.Generator().manual_seed(0))
    expected = torch.empty(total)
    for item in made:
        logits = model(input_ids=torch.from_numpy(item.ids).long()[None], use_cache=False).logits[0]
        lp = logits.log_softmax(-1)[item.trained - 1, item.ids[item.trained]]
        (lp * weight[item.tokens]).sum().backward()
        expected[item.tokens] = lp.detach()
    wanted = gradients(model)
    policy = Policy(model)
    for row in pack(made, 64, share=share):
        with policy.running():
            lp, _ = policy(policy.inputs(row)[0])
            (lp * weight[row.tokens]).sum().backward()
        torch.testing.assert_close(lp.detach(), expected[row.tokens], rtol=0, atol=1e-5)
    for name, found in gradients(model).items():
        assert (found - wanted[name]).norm() <= 3e-6 * wanted[name].norm(), name


def test_the_mode_is_put_back_and_dropout_never_runs(kit: Any) -> None:
    model = kit.model(attention_dropout=0.5).train()
    policy = Policy(model)
    (row,) = pack(items(), 1000)
    with policy.running():
        first, second = policy(policy.inputs(row)[0])[0], policy(policy.inputs(row)[0])[0]
        assert not model.training
    assert model.training
    assert torch.equal(first, second)


def test_models_that_cannot_be_packed_are_refused(kit: Any) -> None:
    sliding = kit.model(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(UserError, match="sliding_attention"):
        Policy(sliding)


def test_cost_counts_weights_and_pairs(kit: Any) -> None:
    cost = Policy(kit.model()).cost()
    assert cost.pair == 12 * 2 * 4 * 8
    assert cost.token == 6 * sum(p.numel() for n, p in kit.model().named_parameters() if "embed" not in n)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_layers_can_run_again_in_the_backward(kit: Any) -> None:
    """The same gradient, and every layer runs twice."""
    found, runs = [], []
    for recompute in (False, True):
        model = kit.model(attention_dropout=0.5)
        calls: list[int] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        policy = Policy(model, recompute=recompute)
        (row,) = pack(items(), 1000)
        with policy.running():
            policy(policy.inputs(row)[0])[0].sum().backward()
        found.append(gradients(model))
        runs.append(len(calls))
        assert not any(m.training for m in model.modules())
    assert runs == [1, 2]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_matrix_products_can_be_in_bfloat16(kit: Any) -> None:
    """Weights and their gradients stay in fp32; log-probabilities are off by bf16's rounding and no more."""
    model = kit.model()
    (row,) = pack(items(), 1000)
    scores = []
    for autocast in (None, torch.bfloat16):
        policy = Policy(model, autocast=autocast)
        with policy.running():
            lp, _ = policy(policy.inputs(row)[0])
            lp.sum().backward()
        assert lp.dtype == torch.float32
        assert {g.dtype for g in gradients(model).values()} == {torch.float32}
        scores.append(lp.detach())
    assert 0 < (scores[0] - scores[1]).abs().max() < 0.3
