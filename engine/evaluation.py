"""Evaluation: held-out samples through the same sessions as training, sampled and greedily; nothing is trained.

Invariants: the policy does not change while an evaluation runs: the sessions of the next batch go on beside it, and the
learner waits; its sessions are named apart from training's, so that they touch no training data and no draw of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import trio

from uniagent.engine.curriculum.history import History
from uniagent.engine.curriculum.trials import Trial, trial_of
from uniagent.engine.episode import Episode
from uniagent.engine.journal import Journal, Record, Use
from uniagent.engine.node import Node
from uniagent.engine.observe.metrics import pass_at_k, success
from uniagent.engine.ports import Json
from uniagent.engine.rollout.groups import run_groups
from uniagent.engine.session import SessionParts, run_session


async def evaluate(
    node: Node, journal: Journal | None, *, name: str, step: int, history: History | None = None
) -> dict[str, float]:
    """``success`` (sampled), ``n`` and ``stderr``, over the first eval.n held-out samples; where asked for,
    ``success_greedy``, and ``pass@k`` with ``pass@k_low`` and ``_high`` (95 %) for k = 2, 4, … eval.samples."""
    config = node.config.eval
    rows = list(itertools.islice(node.rows(config.data, seed=config.seed, repeat=False), config.n))
    how = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
    sampled = await _pass(node, rows, f"{name}-sampled", config.samples, how)
    result = success(sampled)
    if config.samples > 1:
        result["stderr"] = pass_at_k(sampled, 1)["stderr"]  # the episodes of one sample are not independent
    for k in _powers(config.samples):
        found = pass_at_k(sampled, k)
        result |= {f"pass@{k}": found["value"], f"pass@{k}_low": found["low"], f"pass@{k}_high": found["high"]}
    episodes = {f"{name}/sampled": sampled}
    if config.greedy:
        greedy = await _pass(node, rows, f"{name}-greedy", 1, {"temperature": 0.0})
        episodes[f"{name}/greedy"] = greedy
        result["success_greedy"] = success(greedy)["success"]
    if journal is not None:
        for evaluation, some in episodes.items():
            await journal.append([Record(e, Use(step, evaluation=evaluation)) for e in some])
    if history is not None:
        await history.add(await trio.to_thread.run_sync(_trials, node, sampled, rows))
    return result


def _trials(node: Node, episodes: Sequence[Episode], rows: Sequence[Mapping[str, Json]]) -> list[Trial]:
    family = node.config.curriculum.family
    return [trial_of(e, rows[e.sample], family=family, purpose="eval", version=node.version) for e in episodes]


def _powers(most: int) -> list[int]:
    """2, 4, 8, … and the most itself."""
    return sorted({*(2**i for i in range(1, most.bit_length())), *((most,) if most > 1 else ())})


async def _pass(
    node: Node, rows: list[Mapping[str, Json]], name: str, size: int, how: Mapping[str, float]
) -> list[Episode]:
    """``size`` episodes of every row; ``how`` they are sampled."""
    parts = SessionParts(
        node.gateway,
        node.tasks,
        node.providers,
        node.config.rollout.session_timeout_s,
        sampling=how,
        training=False,
    )
    done = 0

    async def one(row: Mapping[str, Json], sample: int, replica: int) -> Episode:
        nonlocal done
        label = f"{name}-{sample}" if size == 1 else f"{name}-{sample}-{replica}"
        episode = await run_session(parts, row, name=label, sample=sample, replica=replica)
        done += 1
        node.progress.phase("evaluating", done, len(rows) * size)
        return episode

    limit = max(node.config.rollout.max_sessions, size)
    groups = await run_groups(enumerate(rows), one, size=size, limit=limit, stop=node.stop.event)
    return list(itertools.chain.from_iterable(groups))
