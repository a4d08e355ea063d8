"""What a harness does, found out by running it once against a scripted model: for whoever adds one.

The script writes a file, makes two calls at once, all with oddly spelt arguments, then ends. The report
says which dialect the harness speaks, what it sends and echoes, which calls it makes beside the conversation, and
whether the conversation stays one chain, which is what training needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import trio
from attrs import asdict, frozen

from uniagent.adapters.agents.command import AgentSettings
from uniagent.adapters.agents.rehearsal import Play, call_text, stage
from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.errors import UserError
from uniagent.engine.messages import Message, ModelCall, Problem
from uniagent.engine.ports import Agent, AgentResult, Json, SessionSampling
from uniagent.engine.registry import load
from uniagent.engine.trajectory.types import Export

PROMPT = "Create the file out.txt with the word héllo in it, then look at it."
MAKE, LOOK, LIST = "echo héllo > out.txt", "cat out.txt", "ls"
EXPECTED = "héllo\n".encode()
SHELL_NAMES = ("bash", "shell", "exec", "terminal")  # before other tools that take a command
COMMAND_KEYS = ("command", "cmd", "script", "code")


@frozen
class Report:
    """One run. ``sizes`` depend on the machine and the day; everything else on the harness's version alone."""

    harness: str
    packages: tuple[str, ...]
    finished: bool
    task_done: bool
    error: str | None
    dialect: str
    stream: bool
    fields: tuple[str, ...]  # of its request bodies, without messages and tools
    roles: tuple[str, ...]  # of the messages of its first request
    tools: tuple[str, ...]
    shell_tool: str | None
    echoes: Mapping[str, tuple[str, ...]]  # text, reasoning, arguments: how they came back
    tiers: Mapping[str, int]
    side_calls: int
    chains: Mapping[str, int]  # by kind
    one_chain: bool
    ledger: Mapping[str, Json]
    sizes: Mapping[str, int]
    info: Mapping[str, Json]

    def as_json(self) -> dict[str, Json]:
        value: dict[str, Json] = json.loads(json.dumps(asdict(self)))
        return value

    def lasting(self) -> dict[str, Json]:
        """What is the same on every machine and every day."""
        return {name: value for name, value in self.as_json().items() if name not in ("sizes", "info", "error")}


def script(ends_by: str | None = None) -> Play:
    """The scripted model. ``ends_by``: the shell command that ends a session, for a harness that an answer without a
    call does not end."""

    def play(call: ModelCall) -> str:
        if not call.tools:
            return "A file with a word"
        turns = sum(m.role == "assistant" for m in call.messages)
        if turns == 0:
            opening = (
                "<think>\n  First the file.\n</think>\n\n  I make the file.\n"  # white space that could be trimmed
            )
            return opening + _odd(*shell_call(call.tools, MAKE))
        if turns == 1:
            return "\n".join(_odd(*shell_call(call.tools, command)) for command in (LOOK, LIST))
        if ends_by is not None and turns == 2:
            return "It is there.\n" + call_text(*shell_call(call.tools, ends_by))
        return "The file out.txt is there."

    return play


def shell_call(tools: Sequence[Mapping[str, Json]], command: str) -> tuple[str, dict[str, Json]]:
    """The call that runs a shell command with one of these tools. Raises Problem when none looks as if it could."""
    likely = sorted(tools, key=lambda tool: not any(word in tool["function"]["name"].lower() for word in SHELL_NAMES))
    for tool in likely:
        function = tool["function"]
        schema = function.get("parameters") or {}
        properties = schema.get("properties") or {}
        key = next((k for k in COMMAND_KEYS if k in properties), None)
        if key is None:
            continue
        described = ["description"] if "description" in properties else []  # before the command, unlike most schemas
        required = dict.fromkeys([*described, *(name for name in schema.get("required") or [] if name != key)])
        listed = properties[key].get("type") == "array"
        arguments = {name: _some(properties.get(name) or {}) for name in required}
        return function["name"], {**arguments, key: ["bash", "-lc", command] if listed else command}
    names = ", ".join(tool["function"]["name"] for tool in tools)
    raise Problem(400, "no_shell", f"no tool runs a shell command ({' or '.join(COMMAND_KEYS)} in its schema): {names}")


def _some(schema: Mapping[str, Any]) -> Json:
    """A value that fits a schema's type."""
    if schema.get("enum"):
        return schema["enum"][0]
    return {"boolean": False, "number": 1, "integer": 1, "array": [], "object": {}}.get(schema.get("type", ""), "check")


def _odd(name: str, arguments: Mapping[str, Json]) -> str:
    """A call with escapes and white space that no serialiser writes."""
    pairs = ",  ".join(f'"{key}" :{json.dumps(value)}' for key, value in arguments.items())
    return call_text(name, "{ " + pairs + "}")


async def check(settings: AgentSettings, *, ends_by: str | None, isolation: str, timeout_s: float) -> Report:
    """Runs the agent once. Raises UserError for a harness that cannot be started."""
    factory = load("agents", settings.name)
    agent: Agent = factory(settings)
    ends_by = ends_by or getattr(factory, "ends_by", None)
    sandbox = {"isolation": isolation, "read_only": list(getattr(agent, "read_only", ()))}
    async with stage(script(ends_by)) as staged, LocalProvider({"warm": 0}) as provider:
        session = staged.gateway.open("check", SessionSampling(max_tokens=4096))
        async with provider.open(sandbox) as box:
            acted = AgentResult(False, info={"error": f"it did not end within {timeout_s:g} s"})
            with trio.move_on_after(timeout_s):
                acted = await agent.run([{"role": "user", "content": PROMPT}], box, session.endpoint())
            files = {str(path): data for path, data in (await box.files(box.workdir)).items()}
        export = await staged.gateway.finish(session.id)
    if not staged.calls:
        raise UserError(f"{settings.name} asked the model nothing: {json.dumps(dict(acted.info), indent=2)}")
    packages = getattr(factory, "packages", ())
    done = files.get("out.txt") == EXPECTED
    return _report(settings.name, packages, acted, done, staged.calls, session.turns, export)


def _report(
    name: str,
    packages: tuple[str, ...],
    acted: AgentResult,
    done: bool,
    calls: Sequence[ModelCall],
    turns: Sequence[Mapping[str, Any]],
    export: Export,
) -> Report:
    main = [call for call in calls if call.tools] or list(calls)
    first, last = main[0], main[-1]
    tiers = [a.tier for t in export.trajectories for a in t.actions if a.tier is not None and a.home]
    kinds = [t.kind for t in export.trajectories]
    fields = {key for call in calls for key in call.raw} - {"messages", "input", "tools"}
    try:
        shell_tool = shell_call(first.tools, "")[0]
    except Problem:
        shell_tool = None
    return Report(
        harness=name,
        packages=packages,
        finished=acted.finished,
        task_done=done,
        error=acted.info.get("error"),
        dialect=first.dialect,
        stream=first.stream,
        fields=tuple(sorted(fields)),
        roles=tuple(m.role for m in first.messages),
        tools=tuple(sorted(tool["function"]["name"] for tool in first.tools)),
        shell_tool=shell_tool,
        echoes=_echoes([t["reply"] for t in turns if t["reply"]["calls"]], last),
        tiers={tier: tiers.count(tier) for tier in sorted(set(tiers))},
        side_calls=export.fates.count("side_call"),
        chains={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        one_chain=kinds.count("main") == 1 and len(main) > 1 and set(export.fates) <= {"live", "side_call"}
        and not set(kinds) - {"main", "side"},
        ledger=asdict(export.ledger),
        sizes={
            "system_chars": sum(len(m.text) for m in first.messages if m.role == "system"),
            "tools_chars": len(json.dumps(first.tools)),
            "prompt_tokens": turns[0]["usage"]["prompt_tokens"],
        },
        info=acted.info,
    )  # fmt: skip


def _echoes(replies: Sequence[Mapping[str, Any]], last: ModelCall) -> dict[str, tuple[str, ...]]:
    """How answers with calls came back in the last request of the conversation."""
    found: dict[str, set[str]] = {"text": set(), "reasoning": set(), "arguments": set()}
    echoed = [m for m in last.messages if m.role == "assistant"]
    for reply, message in zip(replies, echoed, strict=False):
        found["text"].add(_compared(reply["text"], message.text))
        found["reasoning"].add(_compared(reply["reasoning"], message.reasoning))
        found["arguments"] |= _arguments(reply["calls"], message)
    return {name: tuple(sorted(ways - {"empty"})) for name, ways in found.items()}


def _compared(sent: str, back: str) -> str:
    if not sent and not back:
        return "empty"
    ways = {"": "dropped", sent.strip(): "trimmed", sent: "verbatim"}
    return ways.get(back, "changed")


def _arguments(sent: Sequence[Mapping[str, Any]], back: Message) -> set[str]:
    ways = set()
    for call, echo in zip(sent, back.calls, strict=False):
        value = json.loads(call["arguments"])
        if echo.arguments == call["arguments"]:
            ways.add("verbatim")
        elif echo.value != value:
            ways.add("changed")
        else:
            how = "re-serialised" if isinstance(echo.arguments, str) else "object"
            ways.add(how if list(echo.value or ()) == list(value) else f"{how}, keys reordered")
    return ways
