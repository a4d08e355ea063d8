"""A trial: one finished session as the history of trials keeps it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from attrs import frozen

from uniagent.engine.curriculum.pool import Row, family_of
from uniagent.engine.episode import Episode
from uniagent.engine.fingerprint import of_rows, of_text


@frozen
class Trial:
    """``sample`` is the fingerprint of the row; ``version`` the newest policy version that sampled a token; ``outcome``
    None where the infrastructure failed; ``harness_hash`` that of the whole agent section, sampling included;
    ``turns`` counts generations, ``tokens`` those sampled."""

    session: str
    sample: str
    family: str
    task: str
    purpose: str  # train, eval or difficulty
    version: int
    reward: float
    outcome: bool | None
    harness: str
    harness_hash: str
    turns: int
    tokens: int


def trial_of(episode: Episode, row: Row, *, family: str, purpose: str, version: int) -> Trial:
    """``row`` is the sample as the data has it, ``family`` the dotted path of its family; ``version`` stands for a
    session that sampled nothing."""
    agent = episode.row.get("agent") or {}
    sampled = [int(t.versions.max()) for t in episode.export.trajectories if len(t.versions)]
    return Trial(
        session=episode.session,
        sample=key_of(row),
        family=family_of(row, family),
        task=episode.task,
        purpose=purpose,
        version=max([v for v in sampled if v >= 0], default=version),
        reward=episode.result.reward,
        outcome=episode.result.solved if episode.counts else None,
        harness=str(agent.get("name", "react")) if isinstance(agent, Mapping) else "react",
        harness_hash=harness_hash(episode.row),
        turns=len(episode.export.fates),
        tokens=episode.export.ledger.sampled,
    )


def harness_hash(merged: Row) -> str:
    """Fingerprint of the agent section of a merged sample config: harness, tools and sampling."""
    return of_text(json.dumps(merged.get("agent") or {}, sort_keys=True, default=str))


def key_of(row: Row) -> str:
    """A sample's identity across runs: the fingerprint of its row."""
    return of_rows([row])
