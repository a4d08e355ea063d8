"""The real programs, headless, through the gateway in a sandbox without a network: what the facts about them promise.

They need the folder that ``tests/harness/install.py`` fills. The model is scripted; each run takes seconds to a minute.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import pytest
from faults import cut, overloaded, strike
from theatre import Settings, answered, batch, play_of, programs, shell, sometimes, theatre

from uniagent.adapters.agents.check import EXPECTED, check, shell_call
from uniagent.adapters.agents.rehearsal import call_text
from uniagent.engine.messages import ModelCall
from uniagent.engine.observe.metrics import of_agents
from uniagent.engine.ports import Sandbox
from uniagent.engine.registry import load

pytestmark = [pytest.mark.harness, pytest.mark.usefixtures("confined")]
NAMES = ("claude_code", "codex", "mini_swe_agent", "opencode", "qwen_code")
CHECKS = Path(__file__).parent / "checks"
WAIT = "tail -f /dev/null"  # some refuse to sleep
every_harness = pytest.mark.parametrize("name", NAMES)


@every_harness
async def test_a_check_finds_what_is_on_record_for_this_version(name: str) -> None:
    settings = Settings(name, {"programs": programs(name)})
    found = await check(settings, ends_by=None, isolation="bwrap", timeout_s=180)
    assert found.task_done, found
    assert found.finished, found
    assert found.one_chain, found
    now = json.dumps(found.lasting(), indent=2, ensure_ascii=False) + "\n"
    file = CHECKS / f"{name}.json"
    difference = "".join(
        difflib.unified_diff(file.read_text().splitlines(True), now.splitlines(True), "on record", "found")
    )
    assert not difference, f"{name} behaves differently from its record; uniagent harness check --out\n{difference}"


@every_harness
async def test_a_request_that_is_refused_under_load_is_sent_again(name: str, root: Path) -> None:
    async with theatre(play_of(name), root) as stage:
        bodies = strike(stage.stage.server, 2, overloaded)
        outcome = await stage.run(name, {"programs": programs(name)})
    assert bodies[1] == bodies[2]
    assert outcome.result.finished, outcome.result
    assert outcome.files == {"out.txt": EXPECTED}
    assert outcome.chains == ["main"]
    assert outcome.export.ledger.discarded.keys() <= {"side_call"}


@every_harness
async def test_an_answer_that_is_cut_is_not_trained_and_the_conversation_goes_on(name: str, root: Path) -> None:
    async with theatre(play_of(name), root) as stage:
        strike(stage.stage.server, 2, cut(after=120))
        outcome = await stage.run(name, {"programs": programs(name)})
    assert outcome.result.finished, outcome.result
    assert outcome.files == {"out.txt": EXPECTED}
    assert outcome.chains == ["main"]
    discarded = dict(outcome.export.ledger.discarded)
    assert discarded.pop("undelivered") > 0
    assert discarded.keys() <= {"side_call"}
    assert outcome.export.fates.count("undelivered") == 1


@every_harness
async def test_a_harness_without_generations_left_ends_soon(name: str, root: Path) -> None:
    most = 2 if name == "opencode" else 1  # its title is one
    async with theatre(play_of(name), root) as stage:
        outcome = await stage.run(name, {"programs": programs(name)}, limit_s=100, max_generations=most)
    assert outcome.result.info["stop"] == "max_steps"
    assert not outcome.result.finished
    assert len(outcome.export.fates) == most


@every_harness
async def test_a_harness_is_stopped_at_its_time_limit_with_all_it_started(name: str, root: Path) -> None:
    def play(call: ModelCall) -> str:
        return call_text(*shell_call(call.tools, WAIT)) if call.tools else "A title"

    async def none_waits(sandbox: Sandbox) -> None:
        done = await sandbox.exec(["sh", "-c", "grep -lsaE '^tail.-f' /proc/[0-9]*/cmdline; true"], timeout_s=30)
        assert done.output == b""

    async with theatre(play, root) as stage:
        outcome = await stage.run(name, {"programs": programs(name)}, limit_s=12, look=none_waits)
    assert outcome.result.info["stop"] == "timeout"
    assert not outcome.result.finished
    assert outcome.session.running == 0


async def test_a_call_that_mini_swe_agent_cannot_read_is_refused(root: Path) -> None:
    """It drops the answer and appends an error: the talk goes on without the answer."""
    ends = shell(load("agents", "mini_swe_agent").ends_by, tool="bash")
    answers = iter(['<tool_call>\n{"name": "bash", "arguments": {"command": "ls\n</tool_call>', ends])
    async with theatre(lambda call: next(answers), root) as stage:
        outcome = await stage.run("mini_swe_agent", {"programs": programs("mini_swe_agent")})
    assert outcome.result.finished, outcome.result
    assert outcome.export.fates == ("refused", "live")
    assert outcome.export.ledger.discarded.keys() == {"refused"}
    assert answered(outcome.calls[1]) == 0


async def test_react_claude_code_and_mini_swe_agent_in_one_batch(root: Path) -> None:
    def row(agent: dict[str, Any], verifier: str, **sandbox: Any) -> dict[str, Any]:
        agent = {"timeout_s": 170, "model": {"max_tokens": 4096}, **agent}
        return {"name": "file", "agent": agent, "verifier": {"function": verifier}, "sandbox": sandbox}

    rows = [
        row({"name": "react", "tools": [{"name": "stateful_shell"}]}, "theatre:wrote", memory_mib=512),
        row({"name": "claude_code", "options": {"programs": programs("claude_code")}}, "theatre:wrote"),
        row({"name": "mini_swe_agent", "options": {"programs": programs("mini_swe_agent")}}, "theatre:wrote"),
    ]
    groups = await batch(sometimes(load("agents", "mini_swe_agent").ends_by), root, rows)
    episodes = [e for group in groups for e in group]
    assert [e.error for e in episodes] == [None] * 6
    numbers = of_agents(episodes)
    for name in ("react", "claude_code", "mini_swe_agent"):
        assert numbers[f"agent/{name}/episodes"] == 2
        assert numbers[f"agent/{name}/chains"] == numbers[f"agent/{name}/trainable"] == 1.0
    assert {e.result.reward for e in episodes} == {0.0, 1.0}
    assert {e.turns[0]["dialect"] for e in groups[1]} == {"anthropic"}


SDK = """
import asyncio, sys
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query

async def main():
    options = ClaudeAgentOptions(
        model=sys.argv[1], allowed_tools=["Bash"], permission_mode="bypassPermissions", max_turns=8)
    async for message in query(prompt=sys.argv[2], options=options):
        if isinstance(message, ResultMessage):
            print(message.result)

asyncio.run(main())
"""


async def test_claude_code_through_the_claude_agent_sdk(root: Path) -> None:
    claude = load("agents", "claude_code").recipe
    options = {
        "command": ["python", "{home}/sdk.py", "{model}", "{prompt}"],
        "files": {"sdk.py": SDK},
        "env": dict(claude.env),
        "programs": programs("claude_agent_sdk"),
    }
    async with theatre(play_of("claude_code"), root) as stage:
        outcome = await stage.run("command", options)
    assert outcome.result.finished, outcome.result
    assert outcome.result.transcript[-1]["content"] == "The file out.txt is there."
    assert outcome.files == {"out.txt": EXPECTED}
    assert outcome.chains == ["main"]
    assert outcome.export.fates == ("live",) * 3
