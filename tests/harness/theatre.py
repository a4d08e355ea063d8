"""A stage for harnesses: a gateway with a scripted model, a sandbox, and a small harness of our own."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import trio
from attrs import define, field, frozen

from uniagent.adapters.agents.check import script as check_script
from uniagent.adapters.agents.check import shell_call
from uniagent.adapters.agents.installs import STAMP
from uniagent.adapters.agents.rehearsal import Play, Stage, call_text, stage
from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.episode import Episode
from uniagent.engine.gateway.session import GatewaySession
from uniagent.engine.messages import ModelCall
from uniagent.engine.ports import AgentResult, Sandbox, SessionSampling
from uniagent.engine.providers import NodeProviders
from uniagent.engine.registry import load
from uniagent.engine.rollout.groups import run_groups
from uniagent.engine.session import SessionParts, run_session
from uniagent.engine.trajectory.types import Export
from uniagent.tasks.config import TaskConfigResolver

PROMPT = [{"role": "user", "content": "Create out.txt"}]

# A whole harness: asks for completions with one tool, runs the commands, sends the results back.
HARNESS = """
import json, os, subprocess, sys, urllib.error, urllib.request

def ask(messages):
    tool = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    tools = [{"type": "function", "function": {"name": "shell", "parameters": tool}}]
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    head = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["URL"] + "/chat/completions", body, head)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    try:
        answer = ask(messages)
    except urllib.error.HTTPError as refused:
        print("refused", refused.code, file=sys.stderr, flush=True)
        if "--stubborn" in sys.argv:
            continue
        sys.exit(1)
    messages.append(answer)
    if not answer.get("tool_calls"):
        print(answer["content"])
        sys.exit(int(os.environ.get("CODE", "0")))
    for call in answer["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
"""
OPTIONS: dict[str, Any] = {
    "command": ["python3", "-I", "-S", "{home}/harness.py", "{prompt}"],
    "env": {"URL": "{openai_base_url}", "KEY": "{api_key}"},
    "files": {"harness.py": HARNESS},
    "programs": sys.prefix,
}


@frozen
class Settings:
    """The ``agent`` section of a task, as agents read it."""

    name: str
    options: Mapping[str, Any] = field(factory=dict)


@frozen(eq=False)
class Outcome:
    """What one run left."""

    result: AgentResult
    files: Mapping[str, bytes]
    export: Export
    calls: list[ModelCall]
    session: GatewaySession

    @property
    def chains(self) -> list[str]:
        return [t.kind for t in self.export.trajectories]


@define(eq=False)
class Theatre:
    """Runs agents on a stage; ``look`` is called with the sandbox after the agent."""

    stage: Stage
    provider: LocalProvider
    sandbox: Mapping[str, Any]
    count: int = 0

    async def run(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        prompt: Any = PROMPT,
        limit_s: float = 120.0,
        look: Callable[[Sandbox], Any] | None = None,
        **sampling: Any,
    ) -> Outcome:
        """One session of the agent; it has ``limit_s`` seconds, as a task's ``agent.timeout_s`` would give it."""
        agent = load("agents", name)(Settings(name, options))
        self.count += 1
        sampling = {"max_tokens": 4096, **sampling}
        session = self.stage.gateway.open(f"s{self.count}", SessionSampling(**sampling))
        first = len(self.stage.calls)
        section = {**self.sandbox, "read_only": list(agent.read_only)}
        async with self.provider.open(section) as sandbox:
            with trio.move_on_after(limit_s) as limit:
                result = await agent.run(prompt, sandbox, session.endpoint())
            assert not limit.cancelled_caught, f"{name} outlived its time limit"
            if look is not None:
                await look(sandbox)
            files = {str(path): data for path, data in (await sandbox.files(sandbox.workdir)).items()}
        export = await self.stage.gateway.finish(session.id, 1.0)
        return Outcome(result, files, export, self.stage.calls[first:], session)


@asynccontextmanager
async def theatre(play: Play, root: Path, **sandbox: Any) -> AsyncIterator[Theatre]:
    async with stage(play) as staged, LocalProvider({"warm": 0, "root": str(root)}) as provider:
        yield Theatre(staged, provider, sandbox)


def answered(call: ModelCall) -> int:
    """How often the model has spoken in the conversation that this request goes on with."""
    return sum(m.role == "assistant" for m in call.messages)


def script(*texts: str) -> Play:
    """Answers by their place in the conversation."""
    return lambda call: texts[answered(call)]


def programs(name: str) -> str:
    """Folder of an installed harness; under CI a missing one is a failure."""
    folder = Path(os.environ.get("UNIAGENT_HARNESSES", "/nonexistent"), name)
    if not (folder / STAMP).exists():
        problem = f"{name} is not installed: run tests/harness/install.py DIR and set UNIAGENT_HARNESSES=DIR"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(problem)
    return str(folder)


def play_of(name: str) -> Play:
    """The model of ``uniagent harness check``: makes a file, looks at it with two calls at once, ends."""
    return check_script(load("agents", name).ends_by)


def shell(command: str, tool: str = "shell") -> str:
    return call_text(tool, {"command": command})


async def nothing_sleeps(sandbox: Sandbox) -> None:
    """No process ``sleep 1000`` or ``sleep 1001`` is left in the sandbox."""
    done = await sandbox.exec(["sh", "-c", "grep -lsaE '^sleep.100[01]' /proc/[0-9]*/cmdline; true"], timeout_s=30)
    assert done.output == b""


# ---------------------------------------------------------------- batches


async def wrote(attempt: Any, *, worth: float = 1.0) -> float:
    """A verifier: the file is there."""
    files = await attempt.sandbox.files(attempt.sandbox.workdir)
    return worth * (files.get(PurePosixPath("out.txt")) == b"hello\n")


def said(attempt: Any) -> bool:
    """Another: the agent's last words tell of it."""
    return "out.txt" in attempt.answer


def sometimes(ends_by: str | None = None) -> Play:
    """A model that gets the file right every other time, whatever tool it has."""
    count = itertools.count()

    def play(call: ModelCall) -> str:
        turn = answered(call)
        if not call.tools:
            return "A title"
        if turn == 0:
            word = "hello" if next(count) % 2 else "nothing"
            return "I make it.\n" + call_text(*shell_call(call.tools, f"echo {word} > out.txt"))
        if ends_by and "bash" in call.tool_names and turn == 1 and call.dialect == "chat" and len(call.tools) == 1:
            return "Done.\n" + call_text("bash", {"command": ends_by})
        return "See out.txt."

    return play


async def batch(play: Play, root: Path, rows: Sequence[Mapping[str, Any]], *, size: int = 2) -> list[list[Episode]]:
    """``size`` sessions of every row, all at once, as training runs them."""
    async with stage(play) as staged, trio.open_nursery() as nursery:
        providers = NodeProviders(nursery, {"local": {"warm": 0, "root": str(root)}})
        tasks = TaskConfigResolver([{"name": "file", "task": "function", "prompt": PROMPT}])
        parts = SessionParts(staged.gateway, tasks, providers, timeout_s=240)

        async def one(row: Mapping[str, Any], sample: int, replica: int) -> Episode:
            return await run_session(parts, row, name=f"{sample}-{replica}", sample=sample, replica=replica)

        groups = await run_groups(enumerate(rows), one, size=size, limit=size * len(rows))
        nursery.cancel_scope.cancel()
    return groups
