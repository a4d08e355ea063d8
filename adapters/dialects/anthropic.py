"""Anthropic Messages: wire JSON to ModelCall and replies to wire JSON.

Accepts what Claude Code and the SDKs send: ``system`` as text or blocks, system messages inside the list, moving
``cache_control``, thinking blocks with signatures, tool results in any order and mixed with text, server tools,
unknown fields. The per-request billing line that Claude Code puts into the system blocks is left out: it would break
every prefix. Tools that only Anthropic's servers can run are not offered to the model.

``input_tokens`` leaves out what was cached, which ``cache_read_input_tokens`` counts; in a stream that is known only at
its end, so ``message_start`` counts the whole prompt as not cached, and ``message_delta`` has both again. Arguments
that are not a JSON object go out whole, under the key that Claude Code itself uses for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from uniagent.adapters.dialects.common import (
    Memo,
    Unit,
    bad,
    count,
    function_tool,
    get,
    named_tool,
    need,
    sampling,
    shown,
    split,
    sse,
    stops,
    text_of,
    wants_json,
    written,
)
from uniagent.engine.messages import Call, Delta, Message, ModelCall, Problem, Reply, Usage
from uniagent.engine.ports import Json

BILLING = "x-anthropic-billing-header:"
UNPARSED = "__unparsedToolInput"
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@frozen
class Anthropic:
    name: str = "anthropic"
    items: str = "messages"

    def memo(self) -> Memo:
        return Memo()

    def parse(self, body: Json, memo: Memo | None = None) -> ModelCall:
        """Problem 400 for what cannot be honoured."""
        if not isinstance(body, dict):
            raise bad(f"the body must be a JSON object, got {shown(body)}")
        wires = need(body, "messages", list)
        if not wires:
            raise bad("messages is empty: it needs at least one message")
        tools = _tools(body, memo)
        choice, offered = _tool_choice(body, tools)
        asked = sampling(body)
        for key in ("tool_choice", "thinking", "output_config", "output_format"):
            if body.get(key) is not None:
                asked[key] = body[key]
        return ModelCall(
            messages=(*_system(body), *split(wires, _units, memo)),
            tools=offered,
            dialect=self.name,
            stream=bool(get(body, "stream", bool)),
            max_tokens=count(body, "max_tokens"),
            stop=stops(body, "stop_sequences"),
            tool_choice=choice,
            parallel=(body.get("tool_choice") or {}).get("disable_parallel_tool_use") is not True,
            json_by=_json_by(body),
            asked=asked,
            model=get(body, "model", str) or "",
            raw=body,
        )

    def reply(self, call: ModelCall, replies: Sequence[Reply]) -> Json:
        reply = replies[0]
        content: list[Json] = []
        if reply.reasoning and _thinks(call):
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": _signature(reply.id)})
        if reply.text:
            content.append({"type": "text", "text": reply.text})
        content += [{"type": "tool_use", "id": c.id, "name": c.name, "input": _input(c)} for c in reply.calls]
        return {**_head(call, reply.id), "content": content, **_stop(reply), "usage": _usage(reply.usage)}

    def events(self, call: ModelCall) -> AnthropicEvents:
        return AnthropicEvents(call)

    def sent(self, call: ModelCall, replies: Sequence[Reply], memo: Memo) -> None:
        """Nothing refers to an earlier answer here."""

    def error(self, problem: Problem) -> tuple[int, Json]:
        kind = ERROR_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
        return problem.status, {"type": "error", "error": {"type": kind, "message": problem.message}}


# ---------------------------------------------------------------- requests


def _system(body: Mapping[str, Any]) -> tuple[Message, ...]:
    system = get(body, "system", (str, list))
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    kept = [b for b in blocks if not (isinstance(b, dict) and str(b.get("text", "")).startswith(BILLING))]
    text = text_of(kept, "system")
    return (Message("system", text),) if text else ()


def _tools(body: Mapping[str, Any], memo: Memo | None) -> tuple[Mapping[str, Json], ...]:
    wires = get(body, "tools", list) or []
    if memo is not None and memo.tools[0] == wires:
        return memo.tools[1]  # type: ignore[no-any-return]
    tools = tuple(t for t in (_tool(w, f"tools[{i}].") for i, w in enumerate(wires)) if t is not None)
    if memo is not None:
        memo.tools = (wires, tools)
    return tools


def _tool(wire: Any, where: str) -> Mapping[str, Json] | None:
    """A tool in common form; None for one that only the API's own servers run."""
    if not isinstance(wire, dict):
        raise bad(f"{where[:-1]} must be an object, got {shown(wire)}")
    kind = get(wire, "type", str, where)
    schema = get(wire, "input_schema", dict, where)
    if schema is None and kind not in (None, "custom", "function"):
        return None
    return function_tool(need(wire, "name", str, where), get(wire, "description", str, where), schema)


def _tool_choice(
    body: Mapping[str, Any], tools: tuple[Mapping[str, Json], ...]
) -> tuple[str, tuple[Mapping[str, Json], ...]]:
    """The choice, and the tools that are offered: none at all for ``none``, so that none can be called."""
    choice = get(body, "tool_choice", dict)
    kind = "auto" if choice is None else choice.get("type")
    if kind == "none":
        return "none", ()
    if kind == "tool" and choice is not None:
        return named_tool(choice.get("name"), tools, "tool_choice.name"), tools
    if kind in ("auto", "any"):
        return ("required" if kind == "any" else "auto"), tools
    raise bad(f"tool_choice.type must be auto, any, tool or none, got {shown(kind)}")


def _json_by(body: Mapping[str, Any]) -> str | None:
    inner = get(get(body, "output_config", dict) or {}, "format", dict, "output_config.")
    return wants_json(get(body, "output_format", dict), "output_format") or wants_json(inner, "output_config.format")


def _units(wires: Sequence[Json], start: int) -> Iterator[Unit]:
    for i in range(start, len(wires)):
        yield i, tuple(_tree_messages(wires[i], f"messages[{i}]"))


def _tree_messages(wire: Any, where: str) -> Iterator[Message]:
    if not isinstance(wire, dict):
        raise bad(f"{where} must be an object, got {shown(wire)}")
    role = wire.get("role")
    if role not in ("user", "assistant", "system"):
        raise bad(f"{where}.role must be user, assistant or system, got {shown(role)}")
    content = get(wire, "content", (str, list), f"{where}.")
    blocks: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    for i, block in enumerate(blocks):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise bad(f"{where}.content[{i}] must be an object with a type, got {shown(block)}")
    if role == "assistant":
        yield _assistant(blocks, where)
        return
    run: list[Any] = []
    for i, block in enumerate(blocks):
        if block["type"] != "tool_result":
            run.append(block)
            continue
        if run:
            yield Message(role, text_of(run, f"{where}.content"))
            run = []
        at = f"{where}.content[{i}]"
        text = text_of(block.get("content"), f"{at}.content")
        yield Message("tool", text, answers=get(block, "tool_use_id", str, f"{at}."))
    if run or not blocks:
        yield Message(role, text_of(run, f"{where}.content"))


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> Message:
    texts = [b for b in blocks if b["type"] not in ("tool_use", "thinking", "redacted_thinking")]
    calls = []
    for i, b in enumerate(blocks):
        if b["type"] == "tool_use":
            at = f"{where}.content[{i}]."
            calls.append(Call(get(b, "id", str, at), need(b, "name", str, at), _sampled_arguments(b.get("input"))))
    reasoning = "".join(get(b, "thinking", str) or "" for b in blocks if b["type"] == "thinking")
    return Message("assistant", text_of(texts, f"{where}.content", join=""), tuple(calls), reasoning)


def _sampled_arguments(value: Any) -> Any:
    """The raw text again where a client says that it could not parse it."""
    if isinstance(value, dict) and len(value) == 1 and isinstance(value.get(UNPARSED), dict):
        raw = value[UNPARSED].get("raw")
        if isinstance(raw, str):
            return raw
    return {} if value is None else value


# ---------------------------------------------------------------- answers


def _head(call: ModelCall, reply_id: str) -> dict[str, Json]:
    return {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": call.model}


def _usage(usage: Usage) -> dict[str, Json]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(reply: Reply) -> dict[str, Json]:
    if reply.finish == "stop" and reply.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return {"stop_reason": FINISH.get(reply.finish, "end_turn"), "stop_sequence": None}


def _thinks(call: ModelCall) -> bool:
    """Whether the client asked for thinking blocks; others may not know them."""
    thinking = call.raw.get("thinking") if isinstance(call.raw, dict) else None
    return isinstance(thinking, dict) and thinking.get("type") != "disabled"


def _signature(reply_id: str) -> str:
    return f"uniagent-{reply_id}"


def _input(call: Call) -> Json:
    value = call.value
    return value if value is not None else {UNPARSED: {"raw": written(call.arguments)}}


@define(eq=False)
class AnthropicEvents:
    """Events of one answer: content blocks in the order in which they come."""

    call: ModelCall
    _thinks: bool = field(init=False)
    _id: str = ""
    _index: int = -1
    _open: str | None = None  # thinking | text | the index of a call

    def __attrs_post_init__(self) -> None:
        self._thinks = _thinks(self.call)

    def start(self, reply_id: str, prompt_tokens: int) -> bytes:
        self._id = reply_id
        message = {
            **_head(self.call, reply_id),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(prompt_tokens, 0)),
        }
        return _event("message_start", message=message)

    def delta(self, delta: Delta) -> bytes:
        if delta.reasoning:
            if not self._thinks:
                return b""
            begin = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return begin + self._piece(type="thinking_delta", thinking=delta.reasoning)
        if delta.call_index is None:
            if not delta.text:
                return b""
            return self._begin("text", {"type": "text", "text": ""}) + self._piece(type="text_delta", text=delta.text)
        block: Json = {"type": "tool_use", "id": delta.call_id, "name": delta.call_name, "input": {}}
        begin = self._begin(f"call {delta.call_index}", block)
        return begin + (self._piece(type="input_json_delta", partial_json=delta.arguments) if delta.arguments else b"")

    def _begin(self, kind: str, block: Json) -> bytes:
        if self._open == kind:
            return b""
        end = self._end()
        self._open = kind
        self._index += 1
        return end + _event("content_block_start", index=self._index, content_block=block)

    def _piece(self, **delta: Json) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        signed = (
            self._piece(type="signature_delta", signature=_signature(self._id)) if self._open == "thinking" else b""
        )
        self._open = None
        return signed + _event("content_block_stop", index=self._index)

    def ping(self) -> bytes:
        return _event("ping")

    def finish(self, replies: Sequence[Reply]) -> bytes:
        reply = replies[0]
        last = _event("message_delta", delta=_stop(reply), usage=_usage(reply.usage))
        return b"".join([self._end(), last, _event("message_stop")])

    def error(self, problem: Problem) -> bytes:
        return sse(Anthropic().error(problem)[1], "error")


def _event(kind: str, **fields: Json) -> bytes:
    head = f"event: {kind}\ndata: "
    return head.encode() + json.dumps({"type": kind, **fields}, separators=(",", ":")).encode() + b"\n\n"
