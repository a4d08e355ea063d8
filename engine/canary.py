"""After a weight sync: does the engine compute what the learner computes?

A fresh prompt, different for every version so that no cache has it, is answered by the engine in a few tokens, and
their logprobs are compared with a full forward of the learner's module. A silent sync bug (weights that did not
arrive, K/V of older ones) shows here at once and stops the run, instead of training on wrong ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from uniagent.engine.accelerator import Accelerator
from uniagent.engine.ports import Floats, Generation, Ids, InferenceEngine, Json, Sampling

PROMPT, ANSWER = 24, 8  # tokens
FLOOR = 1e-4  # nats: float32 on one device
MARGIN = 8.0  # a gap this many times the one at the start is no rounding


Score = Callable[[Ids, Ids], Floats]  # (prompt, answer) -> logprobs of the answer


class CanaryMismatch(RuntimeError):
    """Engine and learner disagree after a sync."""


class Canary:
    """``score`` gives the learner's logprobs [T] of an answer after a prompt, on the accelerator's thread. ``gap`` is
    the latest largest difference in nats; the tolerance is calibrated by the first ``check``. ``greedy``: answers are
    those that other engines give too, so that ``reference`` is of use to them (``agree``)."""

    def __init__(
        self,
        accelerator: Accelerator,
        engine: InferenceEngine,
        score: Score,
        *,
        seed: int,
        vocabulary: int,
        greedy: bool = False,
    ) -> None:
        self._accelerator, self._engine, self._score = accelerator, engine, score
        self._seed, self._vocabulary = seed, vocabulary
        self._temperature = 0.0 if greedy else 1.0
        self.reference: dict[str, Json] = {}  # the latest question and the learner's answer, as JSON
        self.tolerance: float | None = None
        self.gap = 0.0

    async def check(self, version: int) -> float:
        """The gap in nats; raises CanaryMismatch when it is no rounding."""
        draw = np.random.default_rng([self._seed, version])
        prompt = draw.integers(0, self._vocabulary, PROMPT, dtype=np.int32)
        answer = await _ask(self._engine, prompt, self._temperature, self._seed, version)
        wanted = await self._accelerator.run(self._score, prompt, answer.token_ids, kind="canary")
        self.gap = float(np.abs(wanted - answer.logprobs).max())
        if self.tolerance is None:
            self.tolerance = max(FLOOR, MARGIN * self.gap)
        if not self.gap <= self.tolerance:
            raise CanaryMismatch(
                f"after the sync to policy version {version} the engine's logprobs are off by {self.gap:.2g} nats "
                f"(tolerance {self.tolerance:.2g}): the new weights did not arrive whole"
            )
        self.reference = {
            "version": version,
            "prompt": prompt.tolist(),
            "token_ids": answer.token_ids.tolist(),
            "logprobs": wanted.tolist(),
            "tolerance": 2 * self.tolerance,  # two roundings
            "seed": self._seed,
        }
        return self.gap


async def agree(engine: InferenceEngine, reference: Mapping[str, Json]) -> float | None:
    """Whether another engine computes what the learner did: the gap in nats up to the first token that differs, where
    two were equally likely; CanaryMismatch when it is no rounding. None: its weights changed meanwhile."""
    version = reference["version"]
    prompt = np.array(reference["prompt"], np.int32)
    answer = await _ask(engine, prompt, 0.0, reference["seed"], version)
    if any(span.version != version for span in answer.versions):
        return None
    same = answer.token_ids == np.array(reference["token_ids"], np.int32)[: len(answer.token_ids)]
    compared = min(len(same), int(same.argmin()) + 1 if not same.all() else len(same))
    wanted = np.array(reference["logprobs"], np.float32)
    gap = float(np.abs(answer.logprobs[:compared] - wanted[:compared]).max())
    if not gap <= reference["tolerance"]:
        raise CanaryMismatch(
            f"with policy version {version} this engine's logprobs are off by {gap:.2g} nats from the learner's "
            f"(tolerance {reference['tolerance']:.2g}): it does not compute the same"
        )
    return gap


async def _ask(engine: InferenceEngine, prompt: Ids, temperature: float, seed: int, version: int) -> Generation:
    sampling = Sampling(ANSWER, temperature=temperature, seed=seed, turn=version)
    return await engine.generate(prompt, sampling, session=f"canary-{version}")


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
