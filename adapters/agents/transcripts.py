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
        role, id = _at(event, "message", "role"), _at(event, "message", "id")
        if event.get("type") == "result":
            failed = event.get("is_error") or event.get("subtype") != "success"
            error = str(event.get("result") or event.get("subtype")) if failed else None
            info = {"turns": event.get("num_turns"), "result": event.get("subtype")}
        elif role is not None and event.get("parent_tool_use_id") is None:
            for block in _blocks(_at(event, "message", "content")):
                if block.get("type") == "tool_result":
                    messages.append(_result(block.get("tool_use_id"), _flat(block.get("content"))))
                elif role == "assistant":
                    if not messages or id != last or messages[-1]["role"] != "assistant":
                        messages.append(_said(""))
                    last = id
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
        kind, item = event.get("type"), event.get("item")
        if kind == "turn.completed":
            error, turns = None, turns + 1
        elif kind in ("turn.failed", "error"):
            error = str(_at(event, "error", "message") or event.get("message"))
        elif kind == "item.completed" and _at(item, "type") == "agent_message":
            messages.append(_said(str(_at(item, "text"))))
        elif kind == "item.completed" and _at(item, "type") == "command_execution":
            id, output = _at(item, "id"), _at(item, "aggregated_output")
            call = _call(id, "shell", {"command": _at(item, "command")})
            messages += [{**_said(""), "tool_calls": [call]}, _result(id, _flat(output))]
    return Told(tuple(messages), error, {"turns": turns})


def mini_trajectory(output: str) -> Told:
    """The trajectory file of mini-swe-agent."""
    trajectory = next(_objects(output), {})
    known = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")
    messages = [
        {name: message[name] for name in known if message.get(name) is not None}
        for message in _blocks(trajectory.get("messages"))
        if message.get("role") != "exit"
    ]
    status = _at(trajectory, "info", "exit_status") or "it wrote no trajectory"
    info = {"turns": _at(trajectory, "info", "model_stats", "api_calls"), "result": status}
    return Told(tuple(messages), None if status == "Submitted" else str(status), info)


def opencode_events(output: str) -> Told:
    """Events of ``opencode run --format json``."""
    messages: list[dict[str, Json]] = []
    error: str | None = NO_RESULT
    turns = 0
    for event in _objects(output):
        part = event.get("part")
        if event.get("type") == "text":
            messages.append(_said(str(_at(part, "text"))))
        elif event.get("type") == "tool_use":
            id = _at(part, "callID")
            call = _call(id, _at(part, "tool"), _at(part, "state", "input"))
            result = _result(id, _flat(_at(part, "state", "output")))
            messages += [{**_said(""), "tool_calls": [call]}, result]
        elif event.get("type") == "step_finish":
            error, turns = None, turns + 1
        elif event.get("type") == "error":
            error = json.dumps(event.get("error"), ensure_ascii=False)
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


def _at(value: Json, *path: str) -> Json:
    """What stands at a path of keys; None where there is nothing."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _said(content: str) -> dict[str, Json]:
    return {"role": "assistant", "content": content}


def _result(id: Json, content: str) -> dict[str, Json]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def _call(id: Json, name: Json, arguments: Json) -> dict[str, Json]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _blocks(content: Json) -> list[dict[str, Any]]:
    """Content blocks, of a text too."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []


def _flat(content: Json) -> str:
    return "".join(str(b.get("text", "")) for b in _blocks(content))


def _add_block(message: dict[str, Json], block: Mapping[str, Any]) -> None:
    if block.get("type") == "text":
        message["content"] += str(block.get("text", ""))
    elif block.get("type") == "thinking":
        message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking", ""))
    elif block.get("type") == "tool_use":
        message.setdefault("tool_calls", []).append(_call(block.get("id"), block.get("name"), block.get("input")))
