"""The trainer: one gradient whatever the packing, ratio 1 at unchanged weights, bad steps skipped, nothing leaked."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from uniagent.engine.config import Learner
from uniagent.engine.errors import UserError
from uniagent.engine.learner.batch import Batch, build, moved
from uniagent.engine.learner.recipe import recipe
from uniagent.engine.learner.trainer import Trainer
from uniagent.engine.ports import Sampling

HOT = Sampling(max_tokens=64, temperature=0.7)


def gradient(kit: Any, model: Any, config: Learner, batch: Batch) -> dict[str, torch.Tensor]:
    trainer = Trainer(model, config, seed=0, steps=10, reference=kit.older(model, 0.01))
    for piece in trainer.plan(batch):
        trainer.micro(piece)
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of any parameter's gradient."""
    return max(float((a[n] - b[n]).norm() / (b[n].norm() + 1e-12)) for n in b)


CONFIGS = {
    "grpo": Learner(loss="grpo"),
    "dapo": Learner(loss="dapo"),
    "dr_grpo": Learner(loss="dr_grpo"),
    "gspo": Learner(loss="gspo", proximal="behaviour", clip_low=0.1, clip_high=0.1),
    "cispo": Learner(loss="cispo"),
    "rloo": Learner(loss="rloo", proximal="behaviour"),
    "sequence": Learner(loss="grpo", correction="tis_sequence"),
    "geometric": Learner(loss="dapo", geometric_low=0.95, geometric_high=1.05),
    "kl": Learner(loss="dapo", kl_coef=0.1, entropy_coef=0.01),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_depends_on_no_layout(kit: Any, name: str) -> None:
    model = kit.model().double()
    score = kit.scorer(kit.older(model))
    config = evolve(CONFIGS[name], micro_tokens=4096, prefix_tree=False)
    kind = recipe(config).advantage
    expected = gradient(kit, model, config, build(kit.groups(score=score), kind))
    model.zero_grad()
    groups = kit.groups(score=score, split=True)
    for micro_tokens, prefix_tree in ((16, False), (60, True), (4096, True)):
        layout = evolve(config, micro_tokens=micro_tokens, prefix_tree=prefix_tree)
        found = gradient(kit, model, layout, build(groups[::-1], kind))
        model.zero_grad()
        assert distance(found, expected) < 1e-6, (micro_tokens, prefix_tree)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000), micro_tokens=st.integers(16, 200), split=st.booleans(), name=st.sampled_from([*CONFIGS])
)
def test_the_gradient_depends_on_no_layout_for_random_groups(
    kit: Any, seed: int, micro_tokens: int, split: bool, name: str
) -> None:
    model = kit.model().double()
    config, sizes = CONFIGS[name], np.random.default_rng(seed).integers(1, 5, 2)
    shape = {"count": int(sizes[0]), "size": 1 + int(sizes[1]), "seed": seed, "score": kit.scorer(kit.older(model))}
    kind = recipe(config).advantage
    expected = gradient(kit, model, evolve(config, micro_tokens=4096), build(kit.groups(**shape), kind))
    model.zero_grad()
    found = gradient(
        kit, model, evolve(config, micro_tokens=micro_tokens), build(kit.groups(split=split, **shape), kind)
    )
    assert distance(found, expected) < 1e-6


def test_several_minibatches_do_not_depend_on_layout_either(kit: Any) -> None:
    trained = []
    for micro_tokens, split in ((4096, False), (32, True)):
        model = kit.model().double()
        config = Learner(loss="gspo", clip_low=0.1, clip_high=0.1, minibatches=3, micro_tokens=micro_tokens, lr=1e-2)
        batch = build(kit.groups(count=4, split=split, score=kit.scorer(kit.older(model))), "mean_std")
        trainer = Trainer(model, config, seed=0, steps=10)
        metrics = trainer.step(batch)
        assert trainer.train_step == 3
        trained.append((metrics, dict(model.named_parameters())))
    assert trained[0][0] == pytest.approx(trained[1][0], rel=1e-5, abs=1e-7)
    start = kit.model().double()
    for name, weight in trained[0][1].items():  # Adam divides by gradients that may be all rounding: compare updates
        update = weight - start.get_parameter(name)
        assert (weight - trained[1][1][name]).norm() < 1e-4 * update.norm(), name


def only_some(n: int) -> tuple[Any, ...]:
    """Kept sets that hold every id a test samples, and leave a quarter of the others out."""
    return tuple(
        None if i % 3 == 0 else np.array([v for v in range(64) if v % 4 or v == 0], np.int32) for i in range(n)
    )


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=9), HOT, Sampling(max_tokens=9, temperature=1.7)])
@pytest.mark.parametrize("prefix_tree", [True, False])
def test_the_ratio_is_one_at_unchanged_weights(kit: Any, sampling: Sampling, prefix_tree: bool) -> None:
    model = kit.model()
    groups = kit.groups(score=kit.scorer(model), sampling=sampling)
    metrics = Trainer(model, Learner(prefix_tree=prefix_tree), seed=0, steps=1).step(build(groups, "mean"))
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_min"] == pytest.approx(1, abs=1e-5)
    assert metrics["mismatch_kl"] < 1e-9


def test_the_ratio_is_one_over_the_kept_set(kit: Any) -> None:
    model = kit.model()
    ids = [5, 6, 7, 9, 10, 11]
    turns = [kit.Turn([1, 2, 3], ids, HOT, kept=only_some), kit.Turn([8], ids[:4], HOT, kept=only_some)]
    group = [kit.episode(turns, float(i), replica=i, score=kit.scorer(model)) for i in range(2)]
    batch = build([group], "mean")
    metrics = Trainer(model, Learner(), seed=0, steps=1).step(batch)
    assert metrics["logprob_gap"] < 1e-5
    # without the record the same tokens are off by the log of what was cut away
    assert Trainer(model, Learner(), seed=0, steps=1).step(evolve(batch, kept=None))["logprob_gap"] > 0.01


def test_training_raises_the_probability_of_what_was_rewarded(kit: Any) -> None:
    model = kit.model()
    good, bad = [kit.Turn([1, 2], [3, 4, 5])], [kit.Turn([1, 2], [6, 7, 8])]
    trainer = Trainer(model, Learner(lr=1e-2, warmup_steps=0), seed=0, steps=5)

    def probability(ids: list[int]) -> float:
        return float(trainer.logprobs(np.array([1, 2, *ids], np.int32), np.arange(2, 5)).sum())

    before = probability([3, 4, 5]) - probability([6, 7, 8])
    for _ in range(5):
        score = kit.scorer(model)
        pair = [kit.episode(good, 1.0, replica=0, score=score), kit.episode(bad, 0.0, replica=1, score=score)]
        trainer.step(build([pair], "mean"))
    assert probability([3, 4, 5]) - probability([6, 7, 8]) > before + 1


def test_with_a_learning_rate_of_zero_nothing_moves(kit: Any) -> None:
    model = kit.model()
    before = copy.deepcopy(model.state_dict())
    Trainer(model, Learner(lr=0.0, weight_decay=0.1), seed=0, steps=1).step(build(kit.groups(), "mean"))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_batch_without_a_trained_token_takes_no_step(kit: Any) -> None:
    constant = [kit.episode([kit.Turn([1], [2])], 1.0, replica=i) for i in range(2)]
    trainer = Trainer(kit.model(), Learner(), seed=0, steps=1)
    metrics = trainer.step(build([constant], "mean"))
    assert trainer.train_step == 0
    assert metrics["batch/discarded_no_signal"] == 2


def test_non_finite_steps_are_skipped_and_three_in_a_row_stop_the_run(kit: Any) -> None:
    model = kit.model()
    trainer = Trainer(model, Learner(), seed=0, steps=9)
    good = build(kit.groups(score=kit.scorer(model)), "mean")
    poison = good.logprobs.copy()
    poison[good.session == 2] = np.nan
    bad = evolve(good, logprobs=poison)
    before = copy.deepcopy(model.state_dict())
    metrics = trainer.step(bad)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert metrics["skipped_steps"] == 1
    assert metrics["batch/discarded_skipped_step"] == good.tokens
    assert sum(trainer.lost.values()) == good.tokens
    kept = moved(good.uses, trainer.lost)
    assert sum(use.get("skipped_step", 0) for use in kept.values()) == good.tokens
    assert not any(use.get("trained") for use in kept.values())
    assert metrics["batch/trained_tokens"] == 0
    trainer.step(good)  # a good one starts the count again
    assert trainer.train_step == 1
    trainer.step(bad)
    trainer.step(bad)
    with pytest.raises(UserError, match=rf"3 optimizer steps in a row .*sessions: {good.sessions[2]}\)"):
        trainer.step(bad)


def test_masked_tokens_cannot_poison_the_loss(kit: Any) -> None:
    """A masked session with an absurd ratio has weight 0 and its place in the denominator, not NaN."""
    model = kit.model()
    batch = build(kit.groups(score=kit.scorer(model)), "mean")
    far = np.where(batch.session == 0, -1e30, batch.logprobs).astype(np.float32)
    config = Learner(geometric_low=0.5, geometric_high=2.0)
    metrics = Trainer(model, config, seed=0, steps=1).step(evolve(batch, logprobs=far))
    assert np.isfinite(metrics["loss"])
    assert metrics["correction_masked"] == pytest.approx(float((batch.session == 0).mean()))


def test_no_global_generator_is_used_and_the_mode_is_kept(kit: Any) -> None:
    model = kit.model()
    batch = build(kit.groups(), "mean")
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].copy()
    Trainer(model.train(), Learner(minibatches=2), seed=0, steps=1).step(batch)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state(legacy=False)["state"]["key"] == numpy_state).all()
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_staleness_and_mismatch_are_logged_by_age_and_turn(kit: Any) -> None:
    model = kit.model()
    turns = [kit.Turn([1], [2, 3], version=1), kit.Turn([4], [5], version=3)]
    group = [kit.episode(turns, float(i), replica=i, score=kit.scorer(model)) for i in range(2)]
    batch = build([group], "mean", version=4)
    moved = np.where(batch.turn == 1, batch.logprobs + 0.3, batch.logprobs).astype(np.float32)
    metrics = Trainer(model, Learner(), seed=0, steps=1).step(evolve(batch, logprobs=moved))
    assert metrics["age_mean"] == pytest.approx(7 / 3)
    assert metrics["age_max"] == 3
    assert metrics["mismatch_kl/turn_0"] < 1e-9
    assert metrics["mismatch_kl/turn_1"] == pytest.approx(np.exp(-0.3) + 0.3 - 1, rel=1e-3)
    assert metrics["ratio_min"] == pytest.approx(np.exp(-0.3), rel=1e-4)


def test_pieces_are_run_between_plan_and_apply(kit: Any) -> None:
    trainer = Trainer(kit.model(), Learner(), seed=0, steps=1)
    with pytest.raises(RuntimeError, match="no batch is open"):
        trainer.apply()
    trainer.plan(build(kit.groups(), "mean"))
    with pytest.raises(RuntimeError, match="call apply"):
        trainer.plan(build(kit.groups(), "mean"))


def test_a_kl_term_needs_a_reference(kit: Any) -> None:
    with pytest.raises(ValueError, match="needs a reference model"):
        Trainer(kit.model(), Learner(kl_coef=0.1), seed=0, steps=1)


def test_weights_are_kept_in_fp32(kit: Any) -> None:
    model = kit.model().bfloat16()
    Trainer(model, Learner(lr=1e-4), seed=0, steps=1).step(build(kit.groups(), "mean"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("proximal", ["policy", "behaviour"])
def test_the_share_of_clipped_tokens_is_that_of_the_ratio_in_use(kit: Any, proximal: str) -> None:
    """One step on tokens of another policy: clipped only where the ratio is to that policy; capped where it is not."""
    model = kit.model()
    batch = build(kit.groups(score=kit.scorer(model)), "mean")
    moved = np.where(batch.session == 0, batch.logprobs - 1.0, batch.logprobs).astype(np.float32)  # ratio e
    config = Learner(proximal=proximal, correction="tis", correction_high=2.0)
    metrics = Trainer(model, config, seed=0, steps=1).step(evolve(batch, logprobs=moved))
    share = pytest.approx(float((batch.session == 0).mean()))
    assert metrics["ratio_max"] == pytest.approx(np.e, rel=1e-4)
    assert metrics["clip_share"] == (share if proximal == "behaviour" else 0)
    assert metrics["correction_capped"] == (share if proximal == "policy" else 0)
