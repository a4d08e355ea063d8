"""What external harnesses print, read as chat messages. One function a format; none raises on what it is given.

A line that is no JSON (a warning, a cut) is passed over: a transcript is for people and for verifiers that look at the
last words. What was sampled is on the gateway's record, exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

from uniagent.engine.ports import Json

NO_RESULT = "it gave no result"


@frozen
class Told:
    """What a harness's output says: its conversation as chat messages, why it failed (None: it did not), counters."""

    messages: tuple[Mapping[str, Json], ...] = ()
    error: str | None = None
    info: Mapping[str, Json] = field(factory=dict)


def text(output: str) -> Told:
    """Output that is the agent's answer as it stands."""
    return Told((_said(output.strip()),))


def claude_events(output: str) -> Told:
    """Events of Claude Code (JSON lines) and Qwen Code (one JSON list), with content as in the Anthropic dialect. Those
    of subagents are left out."""
    messages: list[dict[str, Json]] = []
    error: str | None = NO_RESULT
    info: dict[str, Json] = {}
    last = None
    for event in _objects(output):
        message = event.get("message")
        if event.get("type") == "result":
            failed = event.get("is_error") or event.get("subtype") != "success"
            error = str(event.get("result") or event.get("subtype")) if failed else None
            info = {"turns": event.get("num_turns"), "result": event.get("subtype")}
        elif isinstance(message, Mapping) and event.get("parent_tool_use_id") is None:
            for block in _blocks(message.get("content")):
                if block.get("type") == "tool_result":
                    messages.append(_result(block.get("tool_use_id"), _flat(block.get("content"))))
                elif message.get("role") == "assistant":
                    if last != message.get("id") or messages[-1]["role"] != "assistant":
                        messages.append(_said(""))
                    last = message.get("id")
                    _add_block(messages[-1], block)
                else:
                    messages.append({"role": "user", "content": str(block.get("text", ""))})
    return Told(tuple(messages), error, info)


def codex_events(output: str) -> Told:
    """Events of ``codex exec --json``."""
    messages: list[dict[str, Json]] = []
    error: str | None = NO_RESULT
    turns = 0
    for event in _objects(output):
        kind, item = event.get("type"), event.get("item") or {}
        if kind == "turn.completed":
            error, turns = None, turns + 1
        elif kind in ("turn.failed", "error"):
            error = str((event.get("error") or event).get("message"))
        elif kind == "item.completed" and item.get("type") == "agent_message":
            messages.append(_said(str(item.get("text", ""))))
        elif kind == "item.completed" and item.get("type") == "command_execution":
            id = item.get("id")
            call = _call(id, "shell", {"command": item.get("command")})
            messages += [{**_said(""), "tool_calls": [call]}, _result(id, str(item.get("aggregated_output", "")))]
    return Told(tuple(messages), error, {"turns": turns})


def mini_trajectory(output: str) -> Told:
    """The trajectory file of mini-swe-agent."""
    trajectory = next(_objects(output), {})
    known = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")
    messages = [
        {name: message[name] for name in known if message.get(name) is not None}
        for message in trajectory.get("messages", [])
        if message.get("role") != "exit"
    ]
    about = trajectory.get("info", {})
    status = about.get("exit_status") or "it wrote no trajectory"
    info = {"turns": about.get("model_stats", {}).get("api_calls"), "result": status}
    return Told(tuple(messages), None if status == "Submitted" else str(status), info)


def opencode_events(output: str) -> Told:
    """Events of ``opencode run --format json``."""
    messages: list[dict[str, Json]] = []
    error: str | None = NO_RESULT
    turns = 0
    for event in _objects(output):
        part = event.get("part") or {}
        if event.get("type") == "text":
            messages.append(_said(str(part.get("text", ""))))
        elif event.get("type") == "tool_use":
            state = part.get("state") or {}
            call = _call(part.get("callID"), part.get("tool"), state.get("input"))
            messages += [{**_said(""), "tool_calls": [call]}, _result(part.get("callID"), _flat(state.get("output")))]
    return Told(tuple(messages), error, {"turns": turns})


# ---------------------------------------------------------------- pieces


def _objects(output: str) -> Iterator[dict[str, Any]]:
    """Every JSON object of the output: the whole of it, the items of a list, or one a line."""
    try:
        values = [json.loads(output)]
    except ValueError:
        values = [_loaded(line) for line in output.splitlines()]
    for value in values:
        yield from (v for v in (value if isinstance(value, list) else [value]) if isinstance(v, dict))


def _loaded(line: str) -> Json:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _said(content: str) -> dict[str, Json]:
    return {"role": "assistant", "content": content}


def _result(id: Json, content: str) -> dict[str, Json]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def _call(id: Json, name: Json, arguments: Json) -> dict[str, Json]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _blocks(content: Json) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [b for b in content or [] if isinstance(b, dict)]


def _flat(content: Json) -> str:
    return "".join(str(b.get("text", "")) for b in _blocks(content))


def _add_block(message: dict[str, Json], block: Mapping[str, Any]) -> None:
    if block.get("type") == "text":
        message["content"] += block.get("text", "")
    elif block.get("type") == "thinking":
        message["reasoning_content"] = message.get("reasoning_content", "") + block.get("thinking", "")
    elif block.get("type") == "tool_use":
        message.setdefault("tool_calls", []).append(_call(block.get("id"), block.get("name"), block.get("input")))
