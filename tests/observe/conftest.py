"""A hand-written episode for the tests of record and observation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from uniagent.engine.episode import Episode
from uniagent.engine.ports import Sampling, TaskResult
from uniagent.engine.trajectory.types import ActionSpan, Export, Ledger, Provenance, Trajectory

T, C, S, R = Provenance.TEMPLATE, Provenance.CONTENT, Provenance.SAMPLED, Provenance.REPAIR


def _chain() -> Trajectory:
    """Two actions: [4, 6) trained, [7, 8) retried. Logprob -0.25 and version 3 on sampled tokens."""
    kinds = np.array([T, C, C, T, S, S, R, S], np.uint8)
    return Trajectory(
        token_ids=np.array([1, 10, 11, 2, 20, 21, 3, 22], np.int32),
        provenance=kinds,
        loss_mask=np.array([0, 0, 0, 0, 1, 1, 0, 0], np.bool_),
        logprobs=np.where(kinds == S, np.float32(-0.25), np.float32(np.nan)),
        versions=np.where(kinds == S, 3, -1).astype(np.int32),
        actions=(
            ActionSpan(0, 4, 6, Sampling(8), "verbatim", True, "live"),
            ActionSpan(1, 7, 8, Sampling(8), None, True, "retried"),
        ),
    )


@pytest.fixture
def make_episode() -> Callable[..., Episode]:
    def make(session: str = "s0", reward: float = 1.0, **changes: Any) -> Episode:
        fields: dict[str, Any] = {
            "session": session,
            "task": "shell_quest",
            "sample": 5,
            "replica": 1,
            "result": TaskResult(reward),
            "export": Export((_chain(),), ("live", "retried"), Ledger(3, 2, 0, {"retried": 1})),
            "timings": {"total": 1.5, "engine": 0.5},
        }
        return Episode(**{**fields, **changes})

    return make
