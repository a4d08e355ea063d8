"""A mixture of experts passes the same tests, and says how evenly its experts are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from uniagent.engine.config import Learner
from uniagent.engine.learner.batch import build
from uniagent.engine.learner.policy import Policy
from uniagent.engine.learner.router import load
from uniagent.engine.learner.trainer import Trainer


def gradient(kit: Any, model: Any, config: Learner, split: bool) -> dict[str, torch.Tensor]:
    groups = kit.groups(score=kit.scorer(kit.older(model, 0.005)), split=split)
    trainer = Trainer(model, config, seed=0, steps=1)
    for piece in trainer.plan(build(groups, "mean")):
        trainer.micro(piece)
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return found


def test_the_gradient_depends_on_no_layout(kit: Any) -> None:
    model = kit.model(experts=4).double()
    model.set_experts_implementation("eager")  # the grouped product has no fp64
    config = Learner(prefix_tree=False, micro_tokens=4096)
    expected = gradient(kit, model, config, split=False)
    assert any(".experts." in name for name in expected)
    for micro_tokens, prefix_tree in ((16, False), (60, True)):
        layout = evolve(config, micro_tokens=micro_tokens, prefix_tree=prefix_tree)
        for name, found in gradient(kit, model, layout, split=True).items():
            assert (found - expected[name]).norm() <= 1e-6 * (expected[name].norm() + 1e-9), name


def test_router_load_and_logprob_gap_are_reported(kit: Any) -> None:
    model = kit.model(experts=4)
    metrics = Trainer(model, Learner(), seed=0, steps=1).step(build(kit.groups(score=kit.scorer(model)), "mean"))
    assert metrics["logprob_gap"] < 1e-5
    assert 1 <= metrics["router_load_max"] <= 2  # two of four experts a token: at most all tokens at one of them
    assert 0 <= metrics["router_load_min"] <= 1
    assert "router_load_max" not in Trainer(kit.model(), Learner(), seed=0, steps=1).step(build(kit.groups(), "mean"))


def test_load_is_relative_to_an_even_spread() -> None:
    assert load(torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0]])) == {
        "router_load_max": 4.0,
        "router_load_min": 0.0,
        "router_idle": 3 / 8,
    }


def test_cost_counts_the_experts_that_are_used(kit: Any) -> None:
    dense = 6 * sum(
        p.numel() for n, p in kit.model(experts=4).named_parameters() if "embed" not in n and ".experts." not in n
    )
    experts = 6 * sum(p.numel() for n, p in kit.model(experts=4).named_parameters() if ".experts." in n)
    assert Policy(kit.model(experts=4)).cost().token == pytest.approx(dense + experts / 2)
