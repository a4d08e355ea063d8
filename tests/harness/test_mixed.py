"""One batch of several agents, sandboxes and rewards, sample by sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from theatre import OPTIONS, batch, sometimes

from uniagent.engine.learner.batch import build
from uniagent.engine.observe.metrics import of_agents

REACT = {"name": "react", "tools": [{"name": "stateful_shell"}]}


def row(agent: Mapping[str, Any], verifier: Mapping[str, Any], **sandbox: Any) -> dict[str, Any]:
    agent = {"model": {"max_tokens": 4096}, "timeout_s": 200, **agent}
    return {"name": "file", "agent": agent, "verifier": verifier, "sandbox": sandbox}


@pytest.mark.usefixtures("confined")
async def test_react_and_black_boxes_in_one_batch(root: Path) -> None:
    command = {"name": "command", "options": OPTIONS}
    rows = [
        row(REACT, {"function": "theatre:wrote", "worth": 0.5}),
        row(command, {"function": "theatre:wrote"}),
        row(command, {"function": "theatre:said"}, isolation="none"),
    ]
    groups = await batch(sometimes(), root, rows, size=4)
    found = build(groups, "mean", version=0)
    everyone = [e for group in groups for e in group]
    assert [e.error for e in everyone] == [None] * 12
    assert {e.result.reward for e in groups[0]} <= {0.0, 0.5}
    assert {e.result.reward for e in groups[2]} == {1.0}, "whatever is in the file, it told of it"
    assert {e.export.fates for e in everyone} == {("live", "live")}
    assert found.ledger.trainable == sum(e.export.ledger.trainable for e in everyone)
    assert found.ledger.discarded["no_signal"] >= sum(e.export.ledger.trainable for e in groups[2])
    numbers = of_agents(everyone)
    assert (numbers["agent/react/episodes"], numbers["agent/command/episodes"]) == (4, 8)
    assert numbers["agent/command/chains"] == numbers["agent/react/chains"] == 1.0
    assert numbers["agent/command/success"] >= 0.5
