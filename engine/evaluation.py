"""Evaluation: held-out samples through the same sessions as training, sampled and greedily; nothing is trained.

Invariants: the policy does not change while an evaluation runs; its sessions are named apart from training's, so that
they touch no training data and no draw of training.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from uniagent.engine.episode import Episode
from uniagent.engine.journal import Journal, Record, Use
from uniagent.engine.node import Node
from uniagent.engine.observe.metrics import success
from uniagent.engine.ports import Json
from uniagent.engine.rollout.groups import run_groups
from uniagent.engine.session import SessionParts, run_session


async def evaluate(node: Node, journal: Journal | None, *, name: str, step: int) -> dict[str, float]:
    """success (sampled), n, stderr and, where asked for, success_greedy, over the first eval.n held-out samples."""
    config = node.config.eval
    rows = list(itertools.islice(node.rows(config.data, seed=config.seed, repeat=False), config.n))
    sampled = await _pass(node, rows, f"{name}-sampled", config.temperature)
    result = success(sampled)
    episodes = {f"{name}/sampled": sampled}
    if config.greedy:
        greedy = await _pass(node, rows, f"{name}-greedy", 0.0)
        episodes[f"{name}/greedy"] = greedy
        result["success_greedy"] = success(greedy)["success"]
    if journal is not None:
        for evaluation, some in episodes.items():
            await journal.append([Record(e, Use(step, evaluation=evaluation)) for e in some])
    return result


async def _pass(node: Node, rows: list[Mapping[str, Json]], name: str, temperature: float) -> list[Episode]:
    parts = SessionParts(
        node.gateway,
        node.tasks,
        node.providers,
        node.config.rollout.session_timeout_s,
        temperature=temperature,
        training=False,
    )
    done = 0

    async def one(row: Mapping[str, Json], sample: int, replica: int) -> Episode:
        nonlocal done
        episode = await run_session(parts, row, name=f"{name}-{sample}", sample=sample, replica=replica)
        done += 1
        node.progress.phase("evaluating", done, len(rows))
        return episode

    limit = node.config.rollout.max_sessions
    groups = await run_groups(enumerate(rows), one, size=1, limit=limit, stop=node.stop.event)
    return list(itertools.chain.from_iterable(groups))
