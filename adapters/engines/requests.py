"""Which requests an engine with a model can serve at all."""

from __future__ import annotations

from uniagent.engine.ports import StepRequest


def check(request: StepRequest, *, context: int, vocabulary: int) -> None:
    """Raises ValueError for a prompt or sampling parameters that can never be served."""
    prompt, sampling = request.prompt, request.sampling
    if not 0 < len(prompt) < context:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens cannot be served: 1 to {context - 1} fit into "
            f"engine.context = {context} with a token to sample"
        )
    for id in (int(prompt.min()), int(prompt.max()), *sampling.stop_ids):
        if not 0 <= id < vocabulary:
            raise ValueError(f"token id {id} is not in the vocabulary of {vocabulary}")
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens is {sampling.max_tokens}; at least 1")
    if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0):
        raise ValueError(
            f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}: temperature and "
            "top_k must be 0 or more, top_p in (0, 1]"
        )
