"""An export as the JSON that ``POST /sessions/{id}/finish`` answers with. Pure."""

from __future__ import annotations

import math
from typing import Any

from uniagent.engine.ports import Json
from uniagent.engine.trajectory.types import Export, Provenance, Trajectory


def export_json(export: Export, reward: float | None) -> dict[str, Json]:
    """``logprobs`` are null and ``versions`` -1 off sampled tokens; ``echo_tiers`` and ``actions`` are one per action
    of the chain in order, ``fates`` one per action of the session."""
    return {
        "trajectories": [_trajectory(t) for t in export.trajectories],
        "ledger": {
            "sampled": export.ledger.sampled,
            "trainable": export.ledger.trainable,
            "context": export.ledger.context,
            "discarded": dict(export.ledger.discarded),
        },
        "fates": list(export.fates),
        "reward": reward,
    }


_NAMES = [p.name.lower() for p in Provenance]


def _trajectory(t: Trajectory) -> dict[str, Any]:
    return {
        "token_ids": t.token_ids.tolist(),
        "loss_mask": t.loss_mask.astype(int).tolist(),
        "provenance": [_NAMES[p] for p in t.provenance.tolist()],
        "logprobs": [None if math.isnan(value) else value for value in t.logprobs.tolist()],
        "versions": t.versions.tolist(),
        "kind": t.kind,
        "weight": t.weight,
        "parent": t.parent,
        "echo_tiers": list(t.echo_tiers),
        "actions": [
            {"order": a.order, "start": a.start, "end": a.end, "home": a.home, "fate": a.fate, "tier": a.tier}
            for a in t.actions
        ],
    }
