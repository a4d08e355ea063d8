"""A stage for harnesses: a gateway with a scripted model, a sandbox, and a small harness of our own."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, field, frozen

from uniagent.adapters.agents.rehearsal import Play, Stage, call_text, stage
from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.gateway.session import GatewaySession
from uniagent.engine.messages import ModelCall
from uniagent.engine.ports import AgentResult, Sandbox, SessionSampling
from uniagent.engine.registry import load
from uniagent.engine.trajectory.types import Export

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


def shell(command: str, tool: str = "shell") -> str:
    return call_text(tool, {"command": command})
