"""Subagents and compaction in the real programs: chains of their own, every sampled token trained where it was said."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from theatre import Outcome, answered, programs, theatre

from uniagent.adapters.agents.check import shell_call
from uniagent.adapters.agents.opencode import CONFIG
from uniagent.adapters.agents.rehearsal import call_text
from uniagent.engine.messages import ModelCall

pytestmark = [pytest.mark.harness, pytest.mark.usefixtures("confined")]
JOBS = ("JOB-A", "JOB-B")
Spawn = Callable[[str], tuple[str, dict[str, Any]]]


def _spawn(tool: str, kind: str, **more: Any) -> Spawn:
    def spawn(job: str) -> tuple[str, dict[str, Any]]:
        about = {"description": f"does {job}", "prompt": f"{job}: write the file", "subagent_type": kind}
        return tool, {**about, **more}

    return spawn


SPAWN: dict[str, Spawn] = {
    "claude_code": _spawn("Agent", "general-purpose", run_in_background=False),
    "codex": lambda job: ("spawn_agent", {"message": f"{job}: write the file"}),
    "opencode": _spawn("task", "general"),
    "qwen_code": _spawn("agent", "general-purpose", run_in_background=False),
}


def opening(call: ModelCall) -> str:
    """What was said before the model spoke."""
    said = itertools.takewhile(lambda m: m.role != "assistant", call.messages)
    return "\n".join(m.text for m in said if m.role == "user")


def delegating(name: str) -> Callable[[ModelCall], str]:
    """A model that gives two jobs to two subagents at once, waits for them, and ends."""

    def play(call: ModelCall) -> str:
        turn, job = answered(call), next((job for job in JOBS if job in opening(call)), None)
        if not call.tools:
            return "A title"
        if job is not None:
            file = call_text(*shell_call(call.tools, f"echo {job} > {job}.txt"))
            return file if turn == 0 else f"I have finished {job} as you asked me to."
        if turn == 0:
            return "\n".join(call_text(*SPAWN[name](job)) for job in JOBS)
        seen = "\n".join(m.text for m in call.messages)
        if name == "codex" and not all(f"finished {job}" in seen for job in JOBS):  # the first one ends a wait
            agents = re.findall(r'"agent_id":\s*"([^"]+)"', seen)
            return call_text("wait_agent", {"targets": agents, "timeout_ms": 60000})
        return "All is done."

    return play


@pytest.mark.parametrize("name", SPAWN)
async def test_two_subagents_at_once_have_a_chain_each(name: str, root: Path) -> None:
    async with theatre(delegating(name), root) as stage:
        outcome = await stage.run(name, {"programs": programs(name)})
    assert outcome.result.finished, outcome.result
    assert outcome.files == {f"{job}.txt": f"{job}\n".encode() for job in JOBS}
    assert sorted(outcome.chains) == ["main", "subagent", "subagent"]
    assert set(outcome.export.fates) <= {"live", "side_call"}
    orders = [{a.order for a in t.actions} for t in outcome.export.trajectories]
    assert len(orders[0] | orders[1] | orders[2]) == sum(map(len, orders)), "no chain has another one's answers"
    assert_all_trained(outcome)


SUMMARY = "SUMMARY-MARK: the numbers were printed, now end the work."


def forgetful(call: ModelCall) -> str:
    """A model that prints a lot, is asked for a summary, and ends after it."""
    said = "\n".join(m.text for m in call.messages)
    if not call.tools:
        return SUMMARY if "conversation so far" in said or "CHECKPOINT COMPACTION" in said else "A title"
    if "SUMMARY-MARK" in said:
        return "All is done."
    return call_text(*shell_call(call.tools, "seq 1 3000"))


def small_window() -> dict[str, Any]:
    """OpenCode, told that its model has room for 45,000 tokens."""
    config = json.loads(json.dumps(CONFIG))
    config["provider"]["uniagent"]["models"]["{model}"]["limit"] = {"context": 45000, "output": 8192}
    return {"files": {".config/opencode/opencode.json": json.dumps(config)}}


@pytest.mark.parametrize(
    ("name", "options"),
    [("codex", {"args": ["-c", "model_auto_compact_token_limit=40000"]}), ("opencode", small_window())],
)
async def test_compaction_begins_a_new_chain_and_loses_nothing(name: str, options: dict[str, Any], root: Path) -> None:
    async with theatre(forgetful, root) as stage:
        outcome = await stage.run(name, {"programs": programs(name), **options})
    assert outcome.result.finished, outcome.result
    assert len(outcome.chains) == 3, "before, the summary, after"
    summaries = [turn["action"] for turn in outcome.session.turns if turn["reply"]["text"] == SUMMARY]
    assert [outcome.export.fates[order] for order in summaries] == ["live"]
    assert_all_trained(outcome)


def assert_all_trained(outcome: Outcome) -> None:
    """Every live answer has its tokens trained once, in one chain."""
    ledger = outcome.export.ledger
    assert ledger.context == 0
    assert ledger.discarded.keys() <= {"side_call"}
    assert ledger.trainable == sum(int(np.sum(t.loss_mask)) for t in outcome.export.trajectories)
