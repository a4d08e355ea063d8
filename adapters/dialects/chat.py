"""OpenAI chat completions: wire JSON to ModelCall and replies to wire JSON.

Accepts what harnesses send: null for absent, content as parts, ``developer``, ``reasoning_content`` or ``reasoning``,
legacy ``functions``, custom tools, unknown fields. ``logprobs`` and ``logit_bias`` are refused: the first are in the
session's record, the second would change the distribution that is trained. Usage counts a prompt once for all n
choices.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from uniagent.adapters.dialects.common import (
    Memo,
    Unit,
    bad,
    count,
    freeform_input,
    freeform_tool,
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
from uniagent.engine.messages import Call, Delta, Message, ModelCall, Problem, Reply
from uniagent.engine.ports import Json

MAX_N = 128
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


@frozen
class Chat:
    """``clock`` gives the unix time that answers carry."""

    clock: Callable[[], float] = time.time
    name: str = "chat"
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
        _refuse(body)
        tools = _tools(body, memo)
        choice, offered = _tool_choice(body, tools)
        n = get(body, "n", int)
        if n is not None and not 1 <= n <= MAX_N:
            raise bad(f"n must be between 1 and {MAX_N}, got {n}")
        limits = [v for v in (count(body, "max_completion_tokens"), count(body, "max_tokens")) if v is not None]
        asked = sampling(body)
        for key in ("response_format", "parallel_tool_calls", "reasoning_effort", "tool_choice"):
            if body.get(key) is not None:
                asked[key] = body[key]
        return ModelCall(
            messages=split(wires, _units, memo),
            tools=offered,
            dialect=self.name,
            stream=bool(get(body, "stream", bool)),
            n=n or 1,
            max_tokens=min(limits) if limits else None,
            stop=stops(body, "stop"),
            tool_choice=choice,
            parallel=get(body, "parallel_tool_calls", bool) is not False,
            json_by=wants_json(get(body, "response_format", dict), "response_format"),
            asked=asked,
            model=get(body, "model", str) or "",
            raw=body,
        )

    def reply(self, call: ModelCall, replies: Sequence[Reply]) -> Json:
        freeform = _freeform(call)
        choices = [
            {"index": i, "message": _message(r, freeform), "finish_reason": r.finish, "logprobs": None}
            for i, r in enumerate(replies)
        ]
        head = {"id": f"chatcmpl-{replies[0].id}", "object": "chat.completion", "created": int(self.clock())}
        return {**head, "model": call.model, "choices": choices, "usage": _usage(replies)}

    def events(self, call: ModelCall) -> ChatEvents:
        return ChatEvents(call, int(self.clock()), _freeform(call))

    def sent(self, call: ModelCall, replies: Sequence[Reply], memo: Memo) -> None:
        """Nothing refers to an earlier answer here."""

    def error(self, problem: Problem) -> tuple[int, Json]:
        kind = ERROR_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
        return problem.status, {
            "error": {"message": problem.message, "type": kind, "param": None, "code": problem.kind}
        }


# ---------------------------------------------------------------- requests


def _refuse(body: Mapping[str, Any]) -> None:
    if get(body, "logprobs", bool) or get(body, "top_logprobs", int):
        raise bad("logprobs are not sent to clients: leave logprobs out, they are in the session's trajectories")
    if get(body, "logit_bias", dict):
        raise bad("logit_bias would change the distribution that is recorded: leave it out")
    if get(body, "audio", dict) or any(m != "text" for m in get(body, "modalities", list) or ()):
        raise bad('only text is generated: leave audio out and set modalities to ["text"]')


def _tools(body: Mapping[str, Any], memo: Memo | None) -> tuple[Mapping[str, Json], ...]:
    wires = get(body, "tools", list) or [
        {"type": "function", "function": f} for f in get(body, "functions", list) or ()
    ]
    if memo is not None and memo.tools[0] == wires:
        return memo.tools[1]  # type: ignore[no-any-return]
    tools = tuple(_tool(t, f"tools[{i}].") for i, t in enumerate(wires))
    if memo is not None:
        memo.tools = (wires, tools)
    return tools


def _tool(wire: Any, where: str) -> Mapping[str, Json]:
    if not isinstance(wire, dict):
        raise bad(f"{where[:-1]} must be an object, got {shown(wire)}")
    kind = wire.get("type", "function")
    if kind == "custom":
        custom = need(wire, "custom", dict, where)
        return freeform_tool(need(custom, "name", str, where), get(custom, "description", str, where))
    if kind != "function":
        raise bad(f"{where}type must be function or custom, got {shown(kind)}")
    function = need(wire, "function", dict, where)
    tool = function_tool(
        need(function, "name", str, where), get(function, "description", str, where), get(function, "parameters", dict)
    )
    if function.get("strict") is not None:
        tool["function"]["strict"] = function["strict"]
    return tool


def _freeform(call: ModelCall) -> frozenset[str]:
    """Names of custom tools, whose calls go out as custom calls."""
    tools = call.raw.get("tools") if isinstance(call.raw, dict) else None
    return frozenset(t["custom"]["name"] for t in tools or () if t.get("type") == "custom")


def _tool_choice(body: Mapping[str, Any], tools: tuple[Mapping[str, Json], ...]) -> tuple[str, Any]:
    """The choice, and the tools that are offered: none at all for ``none``, so that none can be called."""
    choice = body.get("tool_choice") if body.get("tool_choice") is not None else body.get("function_call")
    if choice is None or choice in ("auto", "required"):
        return choice or "auto", tools
    if choice == "none":
        return "none", ()
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            return "auto", tools
        inner = choice.get("function") or choice.get("custom") or choice
        if isinstance(inner, dict) and "name" in inner:
            return named_tool(inner["name"], tools), tools
    raise bad(f"tool_choice must be auto, none, required or name a function, got {shown(choice)}")


def _units(wires: Sequence[Json], start: int) -> Iterator[Unit]:
    for i in range(start, len(wires)):
        yield i, (_tree_message(wires[i], f"messages[{i}]"),)


def _tree_message(wire: Any, where: str) -> Message:
    if not isinstance(wire, dict):
        raise bad(f"{where} must be an object, got {shown(wire)}")
    role = wire.get("role")
    if role not in ROLES:
        raise bad(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}")
    if role == "assistant":
        text = text_of(wire.get("content"), f"{where}.content", join="")
        reasoning = get(wire, "reasoning_content", str) or get(wire, "reasoning", str) or ""
        return Message("assistant", text, _calls(wire, where), reasoning)
    text = text_of(wire.get("content"), f"{where}.content")
    if role in ("tool", "function"):
        return Message("tool", text, answers=get(wire, "tool_call_id", str, f"{where}."))
    return Message("system" if role == "developer" else role, text)


def _calls(wire: Mapping[str, Any], where: str) -> tuple[Call, ...]:
    listed = get(wire, "tool_calls", list, f"{where}.") or ()
    legacy = get(wire, "function_call", dict, f"{where}.")
    calls = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(listed)]
    return tuple(calls) if legacy is None else (*calls, _call({"function": legacy}, f"{where}.function_call"))


def _call(wire: Any, where: str) -> Call:
    if not isinstance(wire, dict):
        raise bad(f"{where} must be an object, got {shown(wire)}")
    identity = get(wire, "id", str, f"{where}.")
    custom = get(wire, "custom", dict, f"{where}.")
    if custom is not None:
        return Call(identity, need(custom, "name", str, where), {"input": get(custom, "input", str, where) or ""})
    function = need(wire, "function", dict, f"{where}.")
    arguments = get(function, "arguments", (str, dict), f"{where}.function.")
    return Call(identity, need(function, "name", str, f"{where}.function."), "" if arguments is None else arguments)


# ---------------------------------------------------------------- answers


def _message(reply: Reply, freeform: frozenset[str]) -> dict[str, Json]:
    message: dict[str, Json] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    message["refusal"] = None
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_wire_call(c, freeform) for c in reply.calls]
    return message


def _wire_call(call: Call, freeform: frozenset[str]) -> dict[str, Json]:
    if call.name in freeform:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": freeform_input(call.arguments)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": written(call.arguments)}}


def _usage(replies: Sequence[Reply]) -> dict[str, Json]:
    usages = [r.usage for r in replies]
    prompt, completion = usages[0].prompt_tokens, sum(u.completion_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(u.cached_tokens for u in usages)},
        "completion_tokens_details": {"reasoning_tokens": sum(u.reasoning_tokens for u in usages)},
    }


@define(eq=False)
class ChatEvents:
    """Chunks of one answer; the first chunk of a choice has its role, the last its finish reason."""

    call: ModelCall
    created: int
    freeform: frozenset[str]
    _head: str = ""
    _held: dict[tuple[int, int], str] = field(factory=dict)  # custom calls go out whole

    def start(self, reply_id: str, prompt_tokens: int) -> bytes:
        head = {"id": f"chatcmpl-{reply_id}", "object": "chat.completion.chunk", "created": self.created}
        self._head = json.dumps({**head, "model": self.call.model}, separators=(",", ":"))[:-1]
        begin = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(choice, begin) for choice in range(self.call.n))

    def _chunk(self, choice: int, delta: Json, finish: str | None = None) -> bytes:
        body = json.dumps(
            [{"index": choice, "delta": delta, "finish_reason": finish, "logprobs": None}], separators=(",", ":")
        )
        usage = ',"usage":null' if self._usage_wanted else ""
        return f'data: {self._head},"choices":{body}{usage}}}\n\n'.encode()

    @property
    def _usage_wanted(self) -> bool:
        options = self.call.raw.get("stream_options") if isinstance(self.call.raw, dict) else None
        return bool(isinstance(options, dict) and options.get("include_usage"))

    def delta(self, delta: Delta) -> bytes:
        if delta.call_index is None:
            key, piece = ("reasoning_content", delta.reasoning) if delta.reasoning else ("content", delta.text)
            return self._chunk(delta.choice, {key: piece}) if piece else b""
        if delta.call_name is not None and delta.call_name in self.freeform:
            self._held[delta.choice, delta.call_index] = ""
        if (delta.choice, delta.call_index) in self._held:
            return b""
        call: dict[str, Json] = {"index": delta.call_index}
        if delta.call_name is not None:
            call |= {"id": delta.call_id, "type": "function"}
            call["function"] = {"name": delta.call_name, "arguments": delta.arguments}
        else:
            call["function"] = {"arguments": delta.arguments}
        return self._chunk(delta.choice, {"tool_calls": [call]})

    def ping(self) -> bytes:
        return b": keep-alive\n\n"

    def finish(self, replies: Sequence[Reply]) -> bytes:
        out = []
        for choice, index in sorted(self._held):
            whole = _wire_call(replies[choice].calls[index], self.freeform)
            out.append(self._chunk(choice, {"tool_calls": [{"index": index, **whole}]}))
        out += [self._chunk(i, {}, r.finish) for i, r in enumerate(replies)]
        if self._usage_wanted:
            usage = json.dumps(_usage(replies), separators=(",", ":"))
            out.append(f'data: {self._head},"choices":[],"usage":{usage}}}\n\n'.encode())
        return b"".join([*out, b"data: [DONE]\n\n"])

    def error(self, problem: Problem) -> bytes:
        return sse(Chat().error(problem)[1])
