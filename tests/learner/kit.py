"""What learner tests are made of: a tiny Qwen3, and episodes with real behaviour log-probabilities.

Conftest gives this module to tests as the fixture ``kit``; programs that torchrun starts import it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from attrs import field, frozen

from uniagent.engine.episode import Episode
from uniagent.engine.ports import Failure, Sampling, TaskResult
from uniagent.engine.trajectory.types import ActionSpan, Export, Ledger, Provenance, Trajectory

VOCABULARY = 64


def model(*, experts: int = 0, **changes: Any) -> Any:
    """A tiny Qwen3, or with ``experts`` a tiny Qwen3-MoE of which every token uses two."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    if experts:
        settings |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    settings |= changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = (
            Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)) if experts else Qwen3ForCausalLM(Qwen3Config(**settings))
        )
        for parameter in made.parameters():  # away from ones and zeros, so that every path matters
            parameter.data += 0.1 * torch.randn_like(parameter)
    return made.eval()


@frozen
class Turn:
    """What the harness says (ids), then what the model samples (ids)."""

    context: Sequence[int]
    sampled: Sequence[int]
    sampling: Sampling = field(factory=lambda: Sampling(max_tokens=64))
    version: int = 0
    kept: Any = None


def _trajectory(turns: Sequence[Turn], trained: Sequence[bool], first: int, score: Any) -> Trajectory:
    """One chain of all turns; the actions of turns with trained = False are context."""
    ids: list[int] = []
    spans = []
    for order, turn in enumerate(turns, first):
        ids += turn.context
        spans.append((order, turn, len(ids), len(ids) + len(turn.sampled)))
        ids += turn.sampled
    array = np.array(ids, np.int32)
    n = len(array)
    provenance = np.full(n, Provenance.CONTENT, np.uint8)
    mask, logprobs = np.zeros(n, bool), np.full(n, np.nan, np.float32)
    versions = np.full(n, -1, np.int32)
    actions = []
    for order, turn, start, end in spans:
        live = trained[order - first]
        provenance[start:end], mask[start:end], versions[start:end] = Provenance.SAMPLED, live, turn.version
        logprobs[start:end] = score(array, np.arange(start, end), turn) if score else -1.0
        kept = turn.kept(end - start) if callable(turn.kept) else turn.kept
        actions.append(ActionSpan(order, start, end, turn.sampling, "verbatim", live, "live", kept))
    return Trajectory(array, provenance, mask, logprobs, versions, tuple(actions))


def scorer(policy: Any) -> Callable[..., Any]:
    """Log-probabilities as an engine records them: plain forward, the action's temperature, over its kept sets."""

    @torch.no_grad()
    def score(ids: np.ndarray, where: np.ndarray, turn: Any) -> np.ndarray:
        logits = policy(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0, where - 1].double()
        logits = logits / turn.sampling.temperature
        kept = turn.kept(len(where)) if callable(turn.kept) else turn.kept or [None] * len(where)
        for row, allowed in zip(logits, kept, strict=True):
            if allowed is not None:
                row[[v for v in range(len(row)) if v not in set(allowed.tolist())]] = -torch.inf
        lp = logits.log_softmax(-1)[torch.arange(len(where)), torch.from_numpy(ids[where]).long()]
        return np.asarray(lp.numpy())

    return score


def older(policy: Any, size: float = 0.02) -> Any:
    """The same model some updates ago: its log-probabilities differ by about 0.1."""
    other = copy.deepcopy(policy)
    g = torch.Generator().manual_seed(5)
    for p in other.parameters():
        p.data += size * torch.randn(p.shape, generator=g, dtype=p.dtype)
    return other


def episode(
    turns: Sequence[Turn],
    reward: float,
    *,
    sample: int = 0,
    replica: int = 0,
    split: bool = False,
    score: Any = None,
    step_rewards: tuple[float, ...] = (),
    failure: Failure | None = None,
) -> Episode:
    """An episode of ``turns``, as one chain or, with ``split``, as a chain a turn that repeats the earlier ones."""
    count = len(turns)
    if split:
        chains = [_trajectory(turns[: i + 1], [j == i for j in range(i + 1)], 0, score) for i in range(count)]
    else:
        chains = [_trajectory(turns, [True] * count, 0, score)]
    sampled = sum(len(t.sampled) for t in turns)
    return Episode(
        session=f"s{sample}.{replica}",
        task="t",
        sample=sample,
        replica=replica,
        result=TaskResult(reward=reward, step_rewards=step_rewards, failure=failure),
        export=Export(tuple(chains), ("live",) * count, Ledger(sampled=sampled, trainable=sampled)),
    )


def groups(
    count: int = 3,
    size: int = 4,
    *,
    seed: int = 0,
    split: bool = False,
    score: Any = None,
    sampling: Sampling | None = None,
    kept: Any = None,
    prompt: int = 24,
) -> list[list[Episode]]:
    """``count`` groups of ``size`` episodes that share a prompt, of 1-3 turns, with rewards 0 and 1."""
    rng = np.random.default_rng(seed)
    sampling = sampling or Sampling(max_tokens=64)

    def some(low: int, high: int) -> list[int]:
        return [int(i) for i in rng.integers(1, VOCABULARY, rng.integers(low, high))]

    made = []
    for g in range(count):
        shared = some(prompt, prompt + 6)
        group = []
        for r in range(size):
            turns = [
                Turn(shared if t == 0 else some(1, 6), some(1, 9), sampling, kept=kept)
                for t in range(rng.integers(1, 4))
            ]
            reward = float(r % 2 if r < 2 else rng.integers(0, 2))
            group.append(episode(turns, reward, sample=g, replica=r, split=split, score=score))
        made.append(group)
    return made
