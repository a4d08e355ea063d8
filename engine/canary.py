"""After a weight sync: does the engine compute what the learner computes?

A fresh prompt, different for every version so that no cache has it, is answered by the engine in a few tokens, and
their logprobs are compared with a full forward of the learner's module. A silent sync bug (weights that did not
arrive, K/V of older ones) shows here at once and stops the run, instead of training on wrong ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from uniagent.engine.accelerator import Accelerator
from uniagent.engine.ports import Floats, Ids, InferenceEngine, Sampling

PROMPT, ANSWER = 24, 8  # tokens
FLOOR = 1e-4  # nats: float32 on one device
MARGIN = 8.0  # a gap this many times the one at the start is no rounding


Score = Callable[[Ids, Ids], Floats]  # (prompt, answer) -> logprobs of the answer


class CanaryMismatch(RuntimeError):
    """Engine and learner disagree after a sync."""


class Canary:
    """``score`` gives the learner's logprobs [T] of an answer after a prompt, on the accelerator's thread. ``gap`` is
    the latest largest difference in nats; the tolerance is calibrated by the first ``check``."""

    def __init__(
        self, accelerator: Accelerator, engine: InferenceEngine, score: Score, *, seed: int, vocabulary: int
    ) -> None:
        self._accelerator, self._engine, self._score = accelerator, engine, score
        self._seed, self._vocabulary = seed, vocabulary
        self.tolerance: float | None = None
        self.gap = 0.0

    async def check(self, version: int) -> float:
        """The gap in nats; raises CanaryMismatch when it is no rounding."""
        draw = np.random.default_rng([self._seed, version])
        prompt = draw.integers(0, self._vocabulary, PROMPT, dtype=np.int32)
        sampling = Sampling(ANSWER, seed=self._seed, turn=version)
        answer = await self._engine.generate(prompt, sampling, session=f"canary-{version}")
        wanted = await self._accelerator.run(self._score, prompt, answer.token_ids, kind="canary")
        self.gap = float(np.abs(wanted - answer.logprobs).max())
        if self.tolerance is None:
            self.tolerance = max(FLOOR, MARGIN * self.gap)
        if not self.gap <= self.tolerance:
            raise CanaryMismatch(
                f"after the sync to policy version {version} the engine's logprobs are off by {self.gap:.2g} nats "
                f"(tolerance {self.tolerance:.2g}): the new weights did not arrive whole"
            )
        return self.gap


def forward_logprobs(model: Any, prompt: Ids, answer: Ids) -> Floats:
    """[T] of the answer after the prompt, by one full forward in evaluation mode."""
    import torch

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64)).to(model.device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            scores = logits.float().log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
    finally:
        model.train(training)
    found: Floats = scores.cpu().numpy()
    return found
