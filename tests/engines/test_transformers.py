"""The embedded engine beside a learner: what it refuses, what it leaves alone, weights by name, memory, exactness."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.engines.models import SIZE, module, reference
from uniagent.adapters.engines import fit
from uniagent.adapters.engines.transformers import SlotEngine, build
from uniagent.engine import config
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Finish, Generation, Ids, KvPolicy, Sampling, StepRequest

OTHER: dict[str, Any] = {**SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def engine(model: Any, *, slots: int = 4, context: int = 96, prefill: int = 32, shared: bool = True) -> SlotEngine:
    return SlotEngine(model, slots=slots, context=context, prefill_tokens=prefill, shared=shared)


def prompt(seed: int, length: int) -> Ids:
    return np.random.default_rng(seed).integers(3, SIZE["vocab_size"], length).astype(np.int32)


def finish(subject: SlotEngine, *requests: StepRequest) -> dict[int, Generation]:
    for request in requests:
        subject.add(request)
    done: dict[int, Generation] = {}
    while subject.busy():
        done.update({o.id: o.generation for o in subject.step() if o.generation is not None})
    return done


@torch.no_grad()
def error(model: Any, start: Ids, generation: Generation) -> float:
    ids = torch.from_numpy(np.concatenate([start, generation.token_ids])).long()[None]
    logp = model(input_ids=ids, use_cache=False).logits[0, len(start) - 1 : -1].float().log_softmax(-1)
    expected = logp.gather(1, torch.from_numpy(generation.token_ids).long()[:, None])[:, 0].numpy()
    return float(np.abs(expected - generation.logprobs).max())


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("kind", ["Qwen2", "Gemma", "Olmo2", "Granite", "Mixtral", "GPT2"])
def test_models_with_a_plain_cache_are_served_exactly(kind: str) -> None:
    options = (
        OTHER if kind != "GPT2" else {"vocab_size": 150, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    )
    extra = {"num_local_experts": 4} if kind == "Mixtral" else {}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**options, **extra)).eval()
    requests = [StepRequest(n, prompt(n, 5 + 9 * n), Sampling(8), f"s{n}") for n in range(6)]
    done = finish(engine(model), *requests)
    assert max(error(model, r.prompt, done[r.id]) for r in requests) < 3e-5


DEEPSEEK = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("Mistral", {**OTHER, "sliding_window": 16}, "sliding window of 16"),
        ("Gemma2", OTHER, "softcap"),
        ("GptOss", {**OTHER, "num_local_experts": 4}, "s_aux"),
        ("Lfm2", {**OTHER, "layer_types": ["conv", "full_attention"]}, "conv layers"),
        ("DeepseekV3", {**OTHER, **DEEPSEEK, "num_key_value_heads": 4}, "latent attention"),
        ("Bloom", {"vocab_size": 150, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "plain K/V cache"),
    ],
)
def test_other_attention_is_refused_with_a_way_out(kind: str, options: dict[str, Any], why: str) -> None:
    with torch.device("meta" if kind == "DeepseekV3" else "cpu"):
        model = AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**options))
    with pytest.raises(UserError, match=rf"{why}.*vllm"):
        engine(model)


def test_a_window_longer_than_the_context_is_served() -> None:
    model = AutoModelForCausalLM.from_config(transformers.MistralConfig(**OTHER, sliding_window=96)).eval()
    done = finish(engine(model), StepRequest(0, prompt(0, 70), Sampling(20), "s"))
    assert error(model, prompt(0, 70), done[0]) < 3e-5


def test_a_model_that_attends_otherwise_is_refused_by_the_probe() -> None:
    """Nothing in the config says so: attention that ignores its first token."""
    model = module("llama").eval()
    attention = type(model.model.layers[0].self_attn)

    class Forgetful(attention):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            gone = torch.zeros_like(hidden_states)
            gone[:, 1:] = hidden_states[:, :-1]
            return super().forward(hidden_states + gone, *args, **kwargs)

    for layer in model.model.layers:
        layer.self_attn.__class__ = Forgetful
    with pytest.raises(UserError, match=r"logits differ.*vllm"):
        engine(model)


def test_half_precision_is_served() -> None:
    model = module("qwen3").to(torch.bfloat16).eval()
    done = finish(engine(model), StepRequest(0, prompt(0, 20), Sampling(8), "s"))
    assert error(model, prompt(0, 20), done[0]) < 0.1


# ---------------------------------------------------------------- beside the learner


def test_a_learner_sharing_the_module_notices_nothing() -> None:
    model = module("qwen3")
    alone = copy.deepcopy(model)
    model.train()
    model.model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    rng = torch.random.get_rng_state()
    subject = engine(model)
    finish(subject, StepRequest(0, prompt(0, 40), Sampling(6, top_p=0.9), "s"))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert model.config._attn_implementation == alone.config._attn_implementation
    assert all(p.requires_grad and p.grad is None for p in model.parameters())

    ids = torch.from_numpy(prompt(1, 30)).long()[None]
    for each in (model.train(), alone.train()):
        loss = each(input_ids=ids, labels=ids, use_cache=False).loss
        finish(subject, StepRequest(1, prompt(2, 20), Sampling(4), "t"))  # steps between a forward and its backward
        loss.backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_an_own_copy_does_not_follow_the_learner_until_updated() -> None:
    learner = module("qwen3")
    subject = build(config.Engine(slots=2, context=64), learner, shared=False)
    before = finish(subject, StepRequest(0, prompt(0, 10), Sampling(8), "s"))[0]
    learner.load_state_dict(reference("qwen3", 1).state_dict())
    same = finish(subject, StepRequest(1, prompt(0, 10), Sampling(8), "s"))[1]
    assert before.token_ids.tolist() == same.token_ids.tolist()
    subject.update(learner.named_parameters(), 1, KvPolicy.RECOMPUTE)
    after = finish(subject, StepRequest(2, prompt(0, 10), Sampling(8), "s"))[2]
    assert error(reference("qwen3", 1), prompt(0, 10), after) < 3e-5


# ---------------------------------------------------------------- weights


def test_experts_may_come_one_by_one_or_fused(tmp_path: Path) -> None:
    new = reference("qwen3_moe", 1)
    new.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert any(".experts.3.gate_proj.weight" in name for name in saved)
    subject = build(config.Engine(slots=2, context=64), module("qwen3_moe"), shared=False)
    for weights in (saved.items(), new.named_parameters()):
        subject.update(((n, torch.zeros_like(p)) for n, p in new.named_parameters()), 1, KvPolicy.RECOMPUTE)
        subject.update(weights, 2, KvPolicy.RECOMPUTE)
        for name, parameter in subject._model.named_parameters():
            assert torch.equal(parameter, new.get_parameter(name)), name


@pytest.mark.parametrize("names", [{"lm_head.weight"}, {"model.embed_tokens.weight"}, set()])
def test_tied_matrices_may_come_under_either_name_or_both(names: set[str]) -> None:
    new = reference("qwen3", 2)
    subject = build(config.Engine(slots=2, context=64), module("qwen3"), shared=False)
    weights = {n: p for n, p in new.named_parameters(remove_duplicate=False) if n not in names}
    subject.update(weights.items(), 1, KvPolicy.RECOMPUTE)
    done = finish(subject, StepRequest(0, prompt(0, 10), Sampling(4), "s"))
    assert error(new, prompt(0, 10), done[0]) < 3e-5


def test_an_incomplete_update_is_refused_and_nothing_is_sampled_from_a_mixture() -> None:
    new = reference("qwen3", 1)
    for weights, why in [
        ([("model.norm.weight", new.model.norm.weight)], "did not come"),
        ([("model.nrm.weight", new.model.norm.weight)], "no weight named"),
        ([("model.norm.weight", torch.zeros(3))], "shape"),
    ]:
        subject = build(config.Engine(slots=2, context=64), module("qwen3"), shared=False)
        with pytest.raises(ValueError, match=why):
            subject.update(weights, 1, KvPolicy.RECOMPUTE)
        subject.add(StepRequest(0, prompt(0, 10), Sampling(4), "s"))
        with pytest.raises(RuntimeError, match="mixture"):
            subject.step()
        subject.update(new.named_parameters(), 2, KvPolicy.RECOMPUTE)  # a whole one mends it
        assert subject.step()


def test_the_kind_of_update_must_fit_the_kind_of_engine() -> None:
    with pytest.raises(ValueError, match="weights None"):
        engine(module("qwen3")).update([], 1, KvPolicy.KEEP)
    with pytest.raises(ValueError, match="own copy"):
        build(config.Engine(slots=1, context=64), module("qwen3"), shared=False).update(None, 1, KvPolicy.KEEP)


def test_broken_weights_stop_the_engine() -> None:
    model = module("qwen3")
    subject = engine(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    subject.update(None, 7, KvPolicy.RECOMPUTE)
    subject.add(StepRequest(0, prompt(0, 5), Sampling(3), "s"))
    with pytest.raises(RuntimeError, match="not finite under policy version 7"):
        subject.step()


# ---------------------------------------------------------------- limits


def test_kv_that_does_not_fit_is_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    token = 4 * 2 * 2 * 2 * SIZE["head_dim"]  # bytes, layers, heads, keys and values, their width
    monkeypatch.setattr(fit, "_free", lambda device: 100 * 64 * token)
    engine(module("qwen3"), slots=90, context=64)
    why = rf"{token} bytes a token.*engine\.slots to at most 90.*engine\.context to at most 60"
    with pytest.raises(UserError, match=why):
        engine(module("qwen3"), slots=96, context=64)


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        (Sampling(0), "max_tokens"),
        (Sampling(3, temperature=-1.0), "temperature"),
        (Sampling(3, temperature=float("nan")), "temperature"),
        (Sampling(3, top_p=0.0), "top_p"),
        (Sampling(3, top_k=-1), "top_k"),
        (Sampling(3, stop_ids=(150,)), "not in the vocabulary"),
    ],
)
def test_sampling_that_means_nothing_is_refused(sampling: Sampling, why: str) -> None:
    subject = engine(module("qwen3"))
    with pytest.raises(ValueError, match=why):
        subject.add(StepRequest(0, prompt(0, 5), sampling, "s"))
    assert not subject.busy()


def test_options_are_refused() -> None:
    with pytest.raises(UserError, match="'page_size'"):
        build(config.Engine(options={"page_size": 3}), module("qwen3"), shared=True)


# ---------------------------------------------------------------- order


def test_requests_start_first_come_first_served() -> None:
    subject = engine(module("qwen3"), slots=2)
    for n in range(6):
        subject.add(StepRequest(n, prompt(n, 5), Sampling(3), f"s{n}", stream=False))
    ended: list[int] = []
    while subject.busy():
        load = subject.capacity()
        assert load.running + load.waiting == 6 - len(ended)
        ended += [o.id for o in subject.step()]
    assert ended == [0, 1, 2, 3, 4, 5]


def test_an_abort_gives_what_was_sampled_in_every_phase() -> None:
    subject = engine(module("qwen3"), slots=1, prefill=8)
    subject.add(StepRequest(0, prompt(0, 20), Sampling(50), "a"))
    subject.add(StepRequest(1, prompt(1, 20), Sampling(50), "b"))
    waiting = subject.abort(1)
    subject.step()
    filling = subject.abort(0)
    assert waiting is not None
    assert filling is not None
    assert len(waiting.token_ids) == len(filling.token_ids) == 0
    subject.add(StepRequest(2, prompt(0, 20), Sampling(50), "a"))
    for _ in range(6):
        subject.step()
    decoding = subject.abort(2)
    assert decoding is not None
    assert len(decoding.token_ids) == 5
    assert decoding.cached_tokens == 8
    assert error(reference("qwen3"), prompt(0, 20), decoding) < 3e-5
    assert {g.finish for g in (waiting, filling, decoding)} == {Finish.ABORTED}
    assert subject.abort(2) is None
    assert not subject.busy()


def test_requests_nobody_streams_give_one_output() -> None:
    subject = engine(module("qwen3"))
    subject.add(StepRequest(0, prompt(0, 5), Sampling(6), "a", stream=False))
    subject.add(StepRequest(1, prompt(0, 5), Sampling(6), "b"))
    outputs = []
    while subject.busy():
        outputs += subject.step()
    assert [o.id for o in outputs].count(0) == 1
    assert [o.id for o in outputs].count(1) == 6


def test_long_beside_short_contexts_stay_exact() -> None:
    """Lengths far enough apart that decoding attends in two groups, over views and over copies."""
    model = reference("llama")
    subject = engine(model, slots=32, context=640, prefill=4096)
    requests = [
        StepRequest(n, prompt(n, 600 if n % 9 == 4 else 10 + n), Sampling(4 if n % 3 else 12), f"s{n}")
        for n in range(32)
    ]
    done = finish(subject, *requests)
    assert max(error(model, r.prompt, done[r.id]) for r in requests) < 3e-5
