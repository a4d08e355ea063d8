"""One request at vLLM: what it sampled so far, from vLLM's outputs, as a ``Generation``.

Epochs (``vllm_scheduler``) become policy versions by a list that the driver keeps. Invariant: a logprob that is not
finite is a RuntimeError: the engine's weights are broken. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, field

from uniagent.adapters.engines.spans import version_spans
from uniagent.adapters.engines.vllm_setup import cuts
from uniagent.engine.ports import Finish, Generation, Ids, StepRequest

SPANS = "uniagent_epochs"  # key in kv_transfer_params


@define(eq=False)
class Live:
    """``versions``: of each sampled token. ``runs``: [epoch, end] over the tokens whose K/V was written."""

    request: StepRequest
    ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    versions: list[int] = field(factory=list)
    kept: list[Ids | None] = field(factory=list)
    runs: list[list[int]] = field(factory=list)
    cached: int = 0
    finish: Finish | None = None

    def take(self, output: Any, vocabulary: int) -> Ids:
        """The new tokens of a RequestOutput of kind DELTA; their versions are the driver's to add."""
        said = output.outputs[0]
        fresh = list(said.token_ids)
        self.cached = max(self.cached, output.num_cached_tokens or 0)
        self.runs = (output.kv_transfer_params or {}).get(SPANS) or self.runs
        masks = said.sampling_mask.token_ids if said.sampling_mask is not None else None
        for position, (token, scores) in enumerate(zip(fresh, said.logprobs or (), strict=True)):
            if not np.isfinite(scores[token].logprob):
                raise RuntimeError(f"the engine gave a logprob of {scores[token].logprob}: its weights are not finite")
            self.ids.append(token)
            self.logprobs.append(scores[token].logprob)
            finite = masks[position] if masks is not None else _finite(scores)
            self.kept.append(kept(finite, self.request, vocabulary))
        if output.finished and said.finish_reason in ("stop", "length"):
            self.finish = Finish.STOP if said.finish_reason == "stop" else Finish.LENGTH
        return np.asarray(fresh, np.int32)

    def computed(self) -> Ids:
        """The tokens whose K/V is written: all but the last."""
        return np.concatenate([self.request.prompt, np.asarray(self.ids[:-1], np.int32)])

    def generation(self, finish: Finish, epochs: Sequence[int], version: int) -> Generation:
        """``epochs[e]``: the policy version of epoch e; ``version``: the newest."""
        return Generation(
            token_ids=np.asarray(self.ids, np.int32),
            logprobs=np.minimum(np.asarray(self.logprobs, np.float32), 0),
            versions=version_spans(self.versions),
            kv_versions=version_spans(self._wrote(epochs, version)),
            finish=finish,
            cached_tokens=min(self.cached, len(self.request.prompt) - 1),
            kept=tuple(self.kept) if any(k is not None for k in self.kept) else None,
        )

    def _wrote(self, epochs: Sequence[int], version: int) -> list[int]:
        """Of prompt + tokens. The last token's K/V is not written yet, or it was the engine's last step."""
        if not self.ids:
            return []
        total = len(self.request.prompt) + len(self.ids)
        each: list[int] = []
        for epoch, end in self.runs:
            each += [epochs[epoch]] * (min(end, total) - len(each))
        for position in range(
            len(each), total - 1
        ):  # outputs that say nothing of their K/V: a step wrote as it sampled
            each.append(self.versions[max(0, position + 1 - len(self.request.prompt))])
        return each + [version] * (total - len(each))


def written(runs: list[list[int]], start: int, end: int, epoch: int) -> list[list[int]]:
    """The runs once tokens [start, end) were computed in ``epoch``; what is before start and in no run was found in the
    prefix cache, and is of this epoch too."""
    kept: list[list[int]] = []
    for known, stop in runs:
        if (kept[-1][1] if kept else 0) < start:
            kept.append([known, min(stop, start)])
    if kept and kept[-1][0] == epoch:
        kept[-1][1] = end
    else:
        kept.append([epoch, end])
    return kept


def _finite(scores: Any) -> list[int]:
    return [id for id, score in scores.items() if np.isfinite(score.logprob)]


def kept(finite: Sequence[int], request: StepRequest, vocabulary: int) -> Ids | None:
    """The ids that top-p and top-k left, sorted; None where they cut nothing."""
    if not cuts(request) or len(finite) == vocabulary:
        return None
    return np.sort(np.asarray(finite, np.int32))
