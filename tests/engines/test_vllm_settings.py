"""How settings become vLLM's, and vLLM's outputs a generation: without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from uniagent.adapters.engines.vllm_requests import SPANS, Live, kept, written
from uniagent.adapters.engines.vllm_setup import (
    TIES,
    Options,
    engine_arguments,
    logprobs_asked,
    read_options,
    sampling_arguments,
)
from uniagent.engine import config
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Finish, Sampling, StepRequest, VersionSpan


def settings(**options: Any) -> config.Engine:
    return config.Engine("vllm", slots=4, context=128, prefill_tokens=32, options=options)


def request(sampling: Sampling, length: int = 5) -> StepRequest:
    return StepRequest(1, np.arange(length, dtype=np.int32), sampling, "s")


@pytest.mark.parametrize(
    ("options", "device", "said"),
    [
        ({"proces": "child"}, "cpu", "process"),
        ({"process": "thread"}, "cpu", "inline"),
        ({"transfer": "pigeon"}, "cuda", "nccl"),
        ({"transfer": "nccl", "process": "child"}, "cpu", "GPU"),
        ({"sleep": True}, "cpu", "GPU"),
        ({"sampling_mask": True}, "cpu", "GPU"),
        ({"sleep": True, "process": "child"}, "cuda", "inline"),
        ({"pipeline_parallel": 2}, "cuda", "child"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], device: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_options(settings(**options), device=device)


def test_sleep_drops_kv_and_is_refused_where_it_is_to_be_kept() -> None:
    keeping = config.Engine("vllm", kv="keep", options={"sleep": True})
    with pytest.raises(UserError, match="recompute"):
        read_options(keeping, device="cuda")
    assert read_options(settings(sleep=True), device="cuda").sleep


def test_a_cpu_prefills_whole_prompts() -> None:
    cpu = engine_arguments(settings(), Options(), "folder", dtype="float32", device="cpu")
    assert cpu["enable_chunked_prefill"] is False
    assert cpu["max_num_batched_tokens"] == 128  # the longest prompt
    assert cpu["enforce_eager"] is True
    gpu = engine_arguments(settings(), Options(sleep=True), "folder", dtype="bfloat16", device="cuda")
    assert "enable_chunked_prefill" not in gpu
    assert gpu["max_num_batched_tokens"] == 32
    assert gpu["enable_sleep_mode"] is True
    for arguments in (cpu, gpu):
        assert arguments["async_scheduling"] is False
        assert arguments["logprobs_mode"] == "processed_logprobs"


def test_only_the_logprobs_that_are_needed_are_asked_for() -> None:
    assert logprobs_asked(request(Sampling(3)), 1000) == 0
    assert logprobs_asked(request(Sampling(3, temperature=0.0, top_k=5)), 1000) == 0
    assert logprobs_asked(request(Sampling(3, top_k=5)), 1000) == 5 + TIES
    assert logprobs_asked(request(Sampling(3, top_k=995)), 1000) == -1
    assert logprobs_asked(request(Sampling(3, top_p=0.9)), 1000) == -1


def test_the_sampling_mask_takes_the_place_of_logprobs() -> None:
    options = Options(sampling_mask=True)
    found = sampling_arguments(request(Sampling(300, top_p=0.9)), options, context=128, vocabulary=1000)
    assert found["logprobs"] == 0
    assert found["top_k"] == 1000  # vLLM's mask needs a bound
    assert found["max_tokens"] == 123
    with pytest.raises(ValueError, match="temperature 0"):
        sampling_arguments(request(Sampling(3, temperature=0.0)), options, context=128, vocabulary=1000)


def test_seeds_differ_by_seed_session_and_turn_and_fit_vllm() -> None:
    def seed(sampling: Sampling, session: str = "s") -> int:
        asked = StepRequest(1, np.zeros(3, np.int32), sampling, session)
        return int(sampling_arguments(asked, Options(), context=64, vocabulary=10)["seed"])

    seeds = [seed(Sampling(1)), seed(Sampling(1, seed=1)), seed(Sampling(1, turn=1)), seed(Sampling(1), "t")]
    assert len(set(seeds)) == 4
    assert all(0 <= each < 2**62 for each in seeds)


# ---------------------------------------------------------------- K/V by epochs


def test_kv_runs_follow_steps_and_the_prefix_cache() -> None:
    runs = written([], 0, 10, 0)
    assert runs == [[0, 10]]
    runs = written(runs, 10, 11, 0)
    assert runs == [[0, 11]]
    runs = written(runs, 11, 12, 1)
    assert runs == [[0, 11], [1, 12]]
    assert written([], 32, 40, 3) == [[3, 40]]  # 32 tokens were cached
    assert written(runs, 4, 12, 2) == [[0, 4], [2, 12]]
    assert written(runs, 0, 12, 2) == [[2, 12]]


def output(
    tokens: dict[int, dict[int, float]],
    *,
    runs: list[list[int]] | None = None,
    finish: str | None = None,
    mask: Any = None,
) -> Any:
    """A RequestOutput of kind DELTA: sampled token -> {id: logprob} of its position."""
    said = SimpleNamespace(
        token_ids=list(tokens),
        logprobs=[{id: SimpleNamespace(logprob=lp) for id, lp in scores.items()} for scores in tokens.values()],
        sampling_mask=None if mask is None else SimpleNamespace(token_ids=mask),
        finish_reason=finish,
    )
    transfer = {SPANS: runs} if runs is not None else None
    return SimpleNamespace(
        outputs=[said], num_cached_tokens=2, kv_transfer_params=transfer, finished=finish is not None
    )


def test_outputs_become_a_generation() -> None:
    live = Live(request(Sampling(9, top_k=2)))
    live.take(output({7: {7: -0.5, 8: -1.0, 9: -np.inf}}, runs=[[0, 5]]), 10)
    live.versions += [0]
    ids = live.take(output({8: {7: -0.5, 8: -1.0}}, runs=[[0, 5], [1, 6]], finish="stop"), 10)
    live.versions += [3]
    assert ids.tolist() == [8]
    assert live.finish is Finish.STOP
    assert live.computed().tolist() == [0, 1, 2, 3, 4, 7]
    made = live.generation(Finish.STOP, epochs=[0, 3], version=3)
    assert made.token_ids.tolist() == [7, 8]
    assert made.versions == (VersionSpan(0, 0, 1), VersionSpan(3, 1, 2))
    assert made.kv_versions == (VersionSpan(0, 0, 5), VersionSpan(3, 5, 7))
    assert made.kept is not None
    assert [k.tolist() for k in made.kept if k is not None] == [[7, 8], [7, 8]]
    assert made.cached_tokens == 2


def test_outputs_that_say_nothing_of_their_kv_were_written_as_they_were_sampled() -> None:
    live = Live(request(Sampling(9), length=3))
    live.take(output({1: {1: -0.5}, 2: {2: -0.5}}), 10)
    live.versions += [0, 1]
    made = live.generation(Finish.ABORTED, epochs=[0, 1], version=1)
    assert made.kv_versions == (VersionSpan(0, 0, 3), VersionSpan(1, 3, 5))
    assert made.kept is None


def test_the_sampling_mask_is_the_kept_set() -> None:
    live = Live(request(Sampling(9, top_p=0.5)))
    live.take(output({4: {4: -0.1}}, mask=[[6, 4]]), 10)
    assert [k.tolist() for k in live.kept if k is not None] == [[4, 6]]
    assert kept(list(range(10)), live.request, 10) is None  # nothing was cut


def test_a_logprob_that_is_not_finite_breaks_the_engine() -> None:
    with pytest.raises(RuntimeError, match="not finite"):
        Live(request(Sampling(9))).take(output({4: {4: float("nan")}}), 10)
