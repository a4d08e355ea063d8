"""The same tokens as transformers' own continuous batching, given the same draws.

The library's scheduler and paged cache are stepped by hand here (private names, so a release may move them: the test
then says so), and its sampling is replaced by ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.engines.models import SIZE, module
from uniagent.adapters.engines.categorical import draw
from uniagent.adapters.engines.sampling import draw_key, uniforms
from uniagent.adapters.engines.transformers import SlotEngine
from uniagent.engine.ports import Generation, Sampling, StepRequest


def requests() -> list[StepRequest]:
    rng = np.random.default_rng(3)
    settings = [Sampling(15), Sampling(15, temperature=0.7), Sampling(15, top_p=0.9), Sampling(15, top_k=20)]
    return [
        StepRequest(n, rng.integers(0, SIZE["vocab_size"], 3 + 9 * n).astype(np.int32), settings[n % 4], f"s{n}")
        for n in range(8)
    ]


def ours(asked: list[StepRequest]) -> dict[int, Generation]:
    engine = SlotEngine(module("qwen3"), slots=4, context=128, prefill_tokens=32, shared=True)
    for request in asked:
        engine.add(request)
    done: dict[int, Generation] = {}
    while engine.busy():
        done.update({o.id: o.generation for o in engine.step() if o.generation is not None})
    return done


def theirs(asked: list[StepRequest]) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and logprobs, by request."""
    model = module("qwen3").eval()
    state = torch.random.get_rng_state()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=16, num_blocks=64, max_batch_tokens=64, max_requests_per_batch=8, return_logprobs=False,
            per_request_processors=False, auto_switch_to_flash=False, use_async_batching=False, use_cuda_graph=False,
            max_blocks_per_request=0,
        ),
    )  # fmt: skip
    processor = manager.batch_processor = manager._create_batch_processor()
    torch.random.set_rng_state(state)
    by_name = {str(request.id): request for request in asked}
    sampled: dict[int, tuple[list[int], list[float]]] = {request.id: ([], []) for request in asked}

    def sample(scores: torch.Tensor, output: torch.Tensor) -> None:
        ready = [f.state.request_id for f in processor.inputs_and_outputs.requests_in_batch if f.has_new_token]
        if not ready:
            return
        rows = [by_name[name] for name in ready]
        drawn = draw(
            scores[0, : len(rows)],
            np.array([r.sampling.temperature for r in rows], np.float32),
            np.array([r.sampling.top_p for r in rows]),
            np.array([r.sampling.top_k for r in rows], np.int32),
            uniforms(
                np.array([draw_key(0, r.session, 0) for r in rows], np.uint64),
                np.array([len(sampled[r.id][0]) for r in rows], np.uint64),
            ),
        )
        output[0, : len(rows)].copy_(torch.from_numpy(drawn.tokens))
        for row, request in enumerate(rows):
            sampled[request.id][0].append(int(drawn.tokens[row]))
            sampled[request.id][1].append(float(drawn.logprobs[row]))

    processor.model_runner._sample = sample
    for request in asked:
        manager.add_request(
            request.prompt.tolist(),
            request_id=str(request.id),
            max_new_tokens=request.sampling.max_tokens,
            eos_token_id=-1,
        )
    while any(len(tokens) < by_name[str(id)].sampling.max_tokens for id, (tokens, _) in sampled.items()):
        assert processor.prepare_next_batch()
        processor._generation_step(model)
        processor.update_batch()
    return sampled


def test_the_same_tokens_as_the_librarys_continuous_batching() -> None:
    asked = requests()
    try:
        reference: Any = theirs(asked)
    except MemoryError as problem:
        pytest.skip(f"this release of transformers needs psutil to size its cache: {problem}")
    except (AttributeError, TypeError) as problem:
        pytest.fail(f"this release of transformers drives its continuous batching differently: {problem}")
    done = ours(asked)
    for id, (tokens, logprobs) in reference.items():
        assert done[id].token_ids.tolist() == tokens
        assert np.allclose(done[id].logprobs, logprobs, atol=3e-5)
