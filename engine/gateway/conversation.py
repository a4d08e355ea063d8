"""Tree messages as a chat template wants them: dicts in chat-completions form, bent to what this template accepts.

``Shape`` is what the probe found out. Pure functions; knows no tokenizer.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from uniagent.engine.messages import Call, Message
from uniagent.engine.ports import Json

LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks it up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


@frozen
class Shape:
    """What a template accepts. ``reasoning`` is the key it prints the reasoning of an assistant message from."""

    arguments: str = "object"  # object | text
    reasoning: str = ""
    system: bool = True  # it prints a first system message
    late_system: bool = True  # it prints a system message where it stands, later on
    alternate: bool = False  # consecutive user messages are refused
    after_tool: bool = True  # a user message may follow a tool result
    parallel: bool = True  # several calls in one assistant message
    tools: bool = True  # it prints tool results
    calls: bool = True  # it prints calls
    call_ids: str = "call"  # call | functions (functions.name:i) | nine (nine letters and digits)


def call_id(form: str, session: str, turn: int, index: int, name: str) -> str:
    """The id of a call in the form the template prints; a function of its arguments."""
    if form == "functions":
        return f"functions.{name}:{turn + index}"
    digest = hashlib.blake2b(f"{turn}.{index}".encode(), key=hashlib.blake2b(session.encode()).digest()).digest()
    return nine_letters(digest) if form == "nine" else f"call_{digest[:12].hex()}"


def nine_letters(digest: bytes) -> str:
    number = int.from_bytes(digest[:16], "big")
    return "".join(LETTERS[number // len(LETTERS) ** k % len(LETTERS)] for k in range(9))


def as_chat(
    messages: Sequence[Message],
    shape: Shape,
    known: Sequence[Call] = (),
    *,
    mark: str = "",
    marked: Sequence[bool] = (),
) -> list[dict[str, Any]]:
    """Chat dicts of the messages; ``known`` are the calls that leading tool results answer; a ``marked`` assistant
    message says ``mark`` instead of its own words."""
    out: list[dict[str, Any]] = []
    calls, position = list(known), 0
    for n, message in enumerate(messages):
        if message.role == "assistant":
            calls, position = list(message.calls), 0
            hidden = n < len(marked) and marked[n]
            out.append(_assistant(_hidden(message, mark, shape) if hidden else message, shape))
        elif message.role == "tool":
            call = next((c for c in calls if c.id and c.id == message.answers), None)
            call = call or (calls[position] if position < len(calls) else Call(message.answers, "tool", {}))
            position += 1
            out.append({"role": "tool", "content": message.text, "tool_call_id": _id(call, shape), "name": call.name})
        else:
            out.append(_said(message, shape, first=not out and not known))
    return _mended(out, shape)


def _hidden(message: Message, mark: str, shape: Shape) -> Message:
    calls = tuple(Call(c.id, mark, {"key": mark}) for c in message.calls)
    return Message("assistant", "" if calls and shape.calls else mark, calls)


def _said(message: Message, shape: Shape, *, first: bool) -> dict[str, Any]:
    role = "system" if message.role in ("system", "developer") else "user"
    if role == "system" and not (shape.system if first else shape.late_system):
        role = "user"
    return {"role": role, "content": message.text}


def _assistant(message: Message, shape: Shape) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": message.text}
    if message.reasoning and shape.reasoning:
        out[shape.reasoning] = message.reasoning
    if message.calls:
        out["tool_calls"] = [
            {"id": _id(c, shape), "type": "function", "function": {"name": c.name, "arguments": _arguments(c, shape)}}
            for c in message.calls
        ]
    return out


def _arguments(call: Call, shape: Shape) -> Json:
    if shape.arguments == "text":
        return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    value = call.value
    return value if value is not None else call.arguments


def _id(call: Call, shape: Shape) -> str:
    if shape.call_ids == "nine" and not re.fullmatch("[0-9A-Za-z]{9}", call.id or ""):
        return nine_letters(hashlib.blake2b((call.id or call.name).encode("utf-8", "replace")).digest())
    return call.id or "call_0"


def _mended(messages: list[dict[str, Any]], shape: Shape) -> list[dict[str, Any]]:
    """Where a template wants users and assistants to alternate, consecutive user texts become one; where it wants an
    answer after tool results, a user text after one joins the last result."""
    if not shape.alternate and shape.after_tool:
        return messages
    out: list[dict[str, Any]] = []
    for message in messages:
        joins = (
            out
            and message["role"] == "user"
            and (
                (shape.alternate and out[-1]["role"] == "user") or (not shape.after_tool and out[-1]["role"] == "tool")
            )
        )
        if joins:
            out[-1] = {**out[-1], "content": out[-1]["content"] + "\n\n" + message["content"]}
        else:
            out.append(message)
    return out


def answered(chat: Sequence[Mapping[str, Any]], calls: Sequence[Call], shape: Shape) -> list[tuple[str, str]]:
    """(id, name) of the calls that leading tool results answer; made up where the model made none."""
    results = list(itertools.takewhile(lambda m: m["role"] == "tool", chat))
    if not results:
        return []
    return [(_id(c, shape), c.name) for c in calls] or [(r["tool_call_id"], r["name"]) for r in results]
