"""What the wire dialects share: reading JSON fields with clear errors, and splitting wire messages to tree messages.

``Memo`` recognises the beginning that a conversation shares with an earlier request and splits only the rest. Tool
results take the order of the calls they answer, by id. Pure; knows no dialect's own names.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from uniagent.engine.gateway.record import BASES, common
from uniagent.engine.messages import Call, Message, Problem
from uniagent.engine.ports import Json

NO_PARAMETERS: Mapping[str, Json] = {"type": "object", "properties": {}}
SEED_MASK = (1 << 63) - 1


# ---------------------------------------------------------------- reading fields


def bad(message: str, kind: str = "invalid_request") -> Problem:
    """A request that says something we cannot take."""
    return Problem(400, kind, message)


def shown(value: Any) -> str:
    """A value for an error message, short."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def get(body: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str = "") -> Any:
    """A field that may be absent or null (both None); Problem when it has another type. Booleans are no numbers."""
    value = body.get(key)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if value is None or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
        return value
    names = " or ".join({str: "a string", int: "an integer", float: "a number", list: "a list", dict: "an object",
                         bool: "true or false"}[k] for k in kinds)  # fmt: skip
    raise bad(f"{where}{key} must be {names}, got {shown(value)}")


def need(body: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str = "") -> Any:
    """A field that must be there."""
    value = get(body, key, kind, where)
    if value is None:
        raise bad(f"{where}{key} is missing")
    return value


def count(body: Mapping[str, Any], key: str) -> int | None:
    """A positive number of tokens."""
    value = get(body, key, int)
    if value is not None and value < 1:
        raise bad(f"{key} must be at least 1, got {value}")
    return value  # type: ignore[no-any-return]


def sampling(body: Mapping[str, Any]) -> dict[str, Json]:
    """What the client asks of the sampler: recorded, and honoured only where the session trusts its client."""
    asked: dict[str, Json] = {}
    for key, low, high in (("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0)):
        value = get(body, key, (int, float))
        if value is not None:
            if not low <= value <= high:
                raise bad(f"{key} must be between {low:g} and {high:g}, got {shown(value)}")
            asked[key] = float(value)
    top_k = get(body, "top_k", int)
    if top_k is not None:
        asked["top_k"] = max(0, top_k)
    seed = get(body, "seed", int)
    if seed is not None:
        asked["seed"] = seed & SEED_MASK
    for key in ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p"):
        value = get(body, key, (int, float))
        if value:
            asked[key] = value
    return asked


def stops(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Stop strings; empty ones never match and are dropped."""
    value = body.get(key)
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(s, str) for s in listed):
        raise bad(f"{key} must be a string or a list of strings, got {shown(value)}")
    return tuple(s for s in listed if s)


def text_of(content: Any, where: str, join: str = "\n") -> str:
    """Text content: a string, or a list of parts whose texts are joined. Anything that is not text is refused."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad(f"{where} must be a string or a list of parts, got {shown(content)}")
    return join.join(t for t in (_part(p, f"{where}[{i}]") for i, p in enumerate(content)) if t is not None)


def _part(part: Any, where: str) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad(f"{where} must be an object with a type, got {shown(part)}")
    kind = part.get("type", "text")
    for key in ("text", "refusal", "thinking"):
        if isinstance(part.get(key), str):
            return str(part[key])
    source = part.get("source")
    if (
        kind == "document"
        and isinstance(source, dict)
        and isinstance(source.get("data"), str)
        and (source.get("type") == "text")
    ):
        return str(source["data"])
    if kind in ("image", "image_url", "input_image", "input_audio", "audio", "video", "file", "input_file", "document"):
        raise bad(
            f"{where} is {kind}: this model reads text only; leave it out or send its text", "unsupported_content"
        )
    if kind in ("text", "input_text", "output_text"):
        raise bad(f"{where}.text must be a string, got {shown(part.get('text'))}")
    return json.dumps({k: v for k, v in part.items() if k != "cache_control"}, ensure_ascii=False)


# ---------------------------------------------------------------- tools


def function_tool(name: str, description: str | None, parameters: Mapping[str, Json] | None) -> dict[str, Json]:
    """A tool in chat-completions form."""
    function: dict[str, Json] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else NO_PARAMETERS
    return {"type": "function", "function": function}


def freeform_tool(name: str, description: str | None) -> dict[str, Json]:
    """A tool that takes free text, as the model sees it: a function of one string."""
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_tool(name, description, schema)


def freeform_input(arguments: Any) -> str:
    """What the model wrote for a free-text tool; the raw arguments when they do not hold it."""
    value = Call(None, "", arguments).value
    if value is not None and isinstance(value.get("input"), str):
        return str(value["input"])
    return written(arguments)


def named_tool(name: Any, tools: Sequence[Mapping[str, Json]], key: str = "tool_choice") -> str:
    """A tool the client insists on; Problem when the model was not offered it."""
    names = [t["function"]["name"] for t in tools]
    if name not in names:
        raise bad(f"{key} names {shown(name)}, which is not among the tools: {', '.join(names) or 'none'}")
    return str(name)


def wants_json(form: Mapping[str, Any] | None, key: str) -> str | None:
    """The key, where the form of the answer that it gives is JSON; None for text. Problem for any other form."""
    kind = "text" if form is None else form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise bad(f"{key}.type must be text, json_object or json_schema, got {shown(kind)}")
    return None if kind == "text" else key


# ---------------------------------------------------------------- wire messages to tree messages

Unit = tuple[int, Sequence[Message]]  # the index of its first wire message, and its tree messages
Units = Callable[[Sequence[Json], int], Iterator[Unit]]  # splits wires[start:], one unit at a time


@frozen(eq=False)
class _Split:
    wires: Sequence[Json]
    messages: tuple[Message, ...]
    marks: list[tuple[int, int]]  # (wire, tree), ascending: positions where splitting can start again


@define(eq=False)
class Memo:
    """Of one session and dialect: how its last conversations were split."""

    tools: tuple[Any, Any] = (None, ())  # (as they came, in common form)
    _splits: deque[_Split] = field(factory=lambda: deque(maxlen=BASES))

    def split(self, wires: Sequence[Json], units: Units) -> tuple[Message, ...]:
        best, shared = None, 0
        for split in self._splits:
            same = common(split.wires, wires)
            if same > shared:
                best, shared = split, same
        if best is None:
            made = _split(wires, units, (), [], 0)
        else:
            known = bisect_left(best.marks, shared, key=lambda m: m[0])
            wire, tree = best.marks[known - 1] if known else (0, 0)
            made = _split(wires, units, best.messages[:tree], best.marks[: max(known - 1, 0)], wire)
            if 2 * shared >= len(best.wires):
                self._splits.remove(best)
        self._splits.append(made)
        return made.messages


def split(wires: Sequence[Json], units: Units, memo: Memo | None) -> tuple[Message, ...]:
    """Tree messages of a wire list; the part that ``memo`` has seen is not split again."""
    return memo.split(wires, units) if memo is not None else _split(wires, units, (), [], 0).messages


def _split(
    wires: Sequence[Json], units: Units, before: tuple[Message, ...], marks: list[tuple[int, int]], start: int
) -> _Split:
    done = list(before)
    results: list[Message] = []
    for wire, messages in units(wires, start):
        for message in messages:
            if message.role == "tool":
                results.append(message)
                continue
            done += in_call_order(results, done)
            results = []
            done.append(message)
        if not results and len(messages) == 1:
            marks.append((wire, len(done) - 1))
    done += in_call_order(results, done)
    return _Split(wires, tuple(done), marks or [(0, 0)])


def in_call_order(results: list[Message], before: Sequence[Message]) -> Iterable[Message]:
    """Tool results in the order of the calls they answer; those that answer none keep their order, last."""
    if len(results) < 2:
        return results
    calls = next((m.calls for m in reversed(before) if m.role == "assistant"), ())
    order = {call.id: i for i, call in enumerate(calls)}
    return sorted(results, key=lambda r: order.get(r.answers, len(order)))


# ---------------------------------------------------------------- answers


def written(arguments: Any) -> str:
    """A call's arguments as text: as they were sampled."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def sse(data: Json, event: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
