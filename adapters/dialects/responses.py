"""OpenAI Responses: wire items to ModelCall and replies to items.

Accepts what Codex, the Agents SDK and the AI SDK send: developer messages, reasoning items with or without content,
namespaces of tools, free-text (custom) tools, hosted tools (accepted, not offered to the model: nothing here can run
them), unknown items. Items of one answer come back one by one and are joined. ``previous_response_id`` and
``item_reference`` work within a session for its last ``KEPT`` responses. ``encrypted_content`` carries the reasoning
itself, so that clients that send only that back lose nothing.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from uniagent.adapters.dialects.common import (
    Memo,
    Unit,
    bad,
    count,
    freeform_tool,
    function_tool,
    get,
    named_tool,
    need,
    sampling,
    shown,
    split,
    text_of,
    wants_json,
)
from uniagent.adapters.dialects.responses_events import ResponsesEvents, make_items, response_object
from uniagent.engine.messages import Call, Message, ModelCall, Problem, Reply
from uniagent.engine.ports import Json

KEPT = 256  # responses of a session that can be referred to
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
PLAIN = ("text", "input_text", "output_text")


@define(eq=False)
class ResponsesMemo(Memo):
    """``answered`` holds the last responses by id, as (tree messages of the request, the reply)."""

    answered: dict[str, tuple[tuple[Message, ...], Reply]] = field(factory=dict)

    def remember(self, response_id: str, messages: tuple[Message, ...], reply: Reply) -> None:
        self.answered[response_id] = (messages, reply)
        if len(self.answered) > KEPT:
            del self.answered[next(iter(self.answered))]


@frozen
class Responses:
    """``clock`` gives the unix time that answers carry."""

    clock: Callable[[], float] = time.time
    name: str = "responses"
    items: str = "input"

    def memo(self) -> ResponsesMemo:
        return ResponsesMemo()

    def parse(self, body: Json, memo: ResponsesMemo | None = None) -> ModelCall:
        """Problem 400 for what cannot be honoured, 404 for a response that is not known."""
        if not isinstance(body, dict):
            raise bad(f"the body must be a JSON object, got {shown(body)}")
        memo = memo if memo is not None else ResponsesMemo()
        before = _before(body, memo)
        wires = get(body, "input", (str, list))
        items = [{"role": "user", "content": wires}] if isinstance(wires, str) else wires or []
        said = (*before, *split(items, _Units(memo), memo))
        if not said:
            raise bad("input is empty: it needs at least one message, call or output")
        _refuse(body)
        instructions = get(body, "instructions", str)
        head = (Message("system", instructions),) if instructions else ()
        tools = _tools(body, memo)
        choice, offered = _tool_choice(body, tools)
        asked = sampling(body)
        for key in ("reasoning", "text", "parallel_tool_calls", "tool_choice"):
            if body.get(key) is not None:
                asked[key] = body[key]
        return ModelCall(
            messages=(*head, *said),
            tools=offered,
            dialect=self.name,
            stream=bool(get(body, "stream", bool)),
            max_tokens=count(body, "max_output_tokens"),
            tool_choice=choice,
            parallel=get(body, "parallel_tool_calls", bool) is not False,
            json_by=wants_json(get(get(body, "text", dict) or {}, "format", dict, "text."), "text.format"),
            asked=asked,
            model=get(body, "model", str) or "",
            raw=body,
        )

    def reply(self, call: ModelCall, replies: Sequence[Reply]) -> Json:
        reply = replies[0]
        return response_object(call, reply.id, int(self.clock()), make_items(call, reply), reply)

    def events(self, call: ModelCall) -> ResponsesEvents:
        return ResponsesEvents(call, int(self.clock()))

    def sent(self, call: ModelCall, replies: Sequence[Reply], memo: ResponsesMemo) -> None:
        """Remembers a response that later requests may refer to."""
        if not (isinstance(call.raw, dict) and call.raw.get("store") is False):
            system = call.messages[0].role == "system" and bool(call.raw.get("instructions"))
            memo.remember(f"resp_{replies[0].id}", call.messages[system:], replies[0])

    def error(self, problem: Problem) -> tuple[int, Json]:
        kind = ERROR_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
        return problem.status, {
            "error": {"message": problem.message, "type": kind, "param": None, "code": problem.kind}
        }


# ---------------------------------------------------------------- requests


def _before(body: Mapping[str, Any], memo: ResponsesMemo) -> tuple[Message, ...]:
    """What the response that this request goes on from was asked and answered."""
    previous = get(body, "previous_response_id", str)
    if previous is None:
        return ()
    if previous not in memo.answered:
        raise Problem(
            404,
            "previous_response_not_found",
            f"response {previous!r} is not among this session's last {KEPT} stored ones: send the whole input instead",
        )
    messages, reply = memo.answered[previous]
    return (*messages, reply.message())


def _refuse(body: Mapping[str, Any]) -> None:
    if get(body, "background", bool):
        raise bad("background responses are not kept: leave background out")
    if body.get("conversation") is not None:
        raise bad("conversations are not stored: leave conversation out and send the whole input")
    if body.get("prompt") is not None:
        raise bad("stored prompts do not exist here: leave prompt out and send instructions and input")
    if get(body, "top_logprobs", int):
        raise bad("logprobs are not sent to clients: leave top_logprobs out, they are in the session's trajectories")


def _tools(body: Mapping[str, Any], memo: ResponsesMemo) -> tuple[Mapping[str, Json], ...]:
    wires = get(body, "tools", list) or []
    if memo.tools[0] != wires:
        memo.tools = (wires, tuple(tool for i, w in enumerate(wires) for tool in _tool(w, f"tools[{i}].")))
    return memo.tools[1]  # type: ignore[no-any-return]


def _tool(wire: Any, where: str) -> Iterator[Mapping[str, Json]]:
    """The tools in common form that one entry stands for: none for one that only the API's own servers run."""
    if not isinstance(wire, dict):
        raise bad(f"{where[:-1]} must be an object, got {shown(wire)}")
    kind = need(wire, "type", str, where)
    if kind == "function":
        inner = get(wire, "function", dict, where) or wire  # some clients nest it as in chat completions
        name, about = need(inner, "name", str, where), get(inner, "description", str, where)
        tool = function_tool(name, about, get(inner, "parameters", dict, where))
        if inner.get("strict") is not None:
            tool["function"]["strict"] = inner["strict"]
        yield tool
    elif kind == "custom":
        yield freeform_tool(need(wire, "name", str, where), get(wire, "description", str, where))
    elif kind == "namespace":
        for i, inner in enumerate(need(wire, "tools", list, where)):
            yield from _tool(inner, f"{where}tools[{i}].")


def _tool_choice(
    body: Mapping[str, Any], tools: tuple[Mapping[str, Json], ...]
) -> tuple[str, tuple[Mapping[str, Json], ...]]:
    """The choice, and the tools that are offered: none at all for ``none``, so that none can be called."""
    choice = get(body, "tool_choice", (str, dict))
    if choice is None or choice in ("auto", "required"):
        return choice or "auto", tools
    if choice == "none":
        return "none", ()
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            return "auto", tools
        return named_tool(choice.get("name") or choice.get("type"), tools), tools
    raise bad(f"tool_choice must be auto, none, required or name a function, got {shown(choice)}")


@define
class _Part:
    """What is joined of one answer so far; ``rank`` grows: reasoning, text, calls."""

    rank: int = 0
    reply: str | None = None
    text: list[str] = field(factory=list)
    reasoning: list[str] = field(factory=list)
    calls: list[Call] = field(factory=list)

    def message(self) -> Message:
        return Message("assistant", "".join(self.text), tuple(self.calls), "".join(self.reasoning))


@frozen
class _Units:
    """Items to tree messages; those of one answer are joined. An answer has one reasoning, one text and then calls;
    where items still carry the ids we gave them, these say what belongs together."""

    memo: ResponsesMemo

    def __call__(self, wires: Sequence[Json], start: int) -> Iterator[Unit]:
        part, since = None, start
        for i in range(start, len(wires)):
            item, where = wires[i], f"input[{i}]"
            if not isinstance(item, dict):
                raise bad(f"{where} must be an object, got {shown(item)}")
            kind = get(item, "type", str, f"{where}.") or "message"
            if kind == "item_reference":
                item = self._referred(item, where)
                kind = item["type"]
            rank = _rank(item, kind)
            if part is not None and (rank is None or not _joins(part, item, rank)):
                yield since, (part.message(),)
                part = None
            if rank is not None:
                if part is None:
                    part, since = _Part(), i
                _join(part, item, kind, rank, where)
                continue
            message = _context(item, kind, where)
            if message is not None:
                yield i, (message,)
        if part is not None:
            yield since, (part.message(),)

    def _referred(self, item: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        wanted = need(item, "id", str, f"{where}.")
        entry = self.memo.answered.get(f"resp_{_reply_of(wanted)}")
        for found in make_items(None, entry[1]) if entry is not None else ():
            if found["id"] == wanted:
                return found
        raise Problem(
            404, "item_not_found", f"{where} refers to {wanted!r}, which is not stored: send the item itself instead"
        )


def _reply_of(item_id: Any) -> str | None:
    """The reply that an item of ours belongs to: ids are ``kind_REPLY`` and ``kind_REPLY_n``."""
    parts = item_id.split("_") if isinstance(item_id, str) else []
    return parts[1] if len(parts) in (2, 3) else None


def _rank(item: Mapping[str, Any], kind: str) -> int | None:
    """Of an item of the model: 0 reasoning, 1 text, 2 a call; None for anything else."""
    if kind == "reasoning":
        return 0
    if kind == "message":
        return 1 if item.get("role") == "assistant" else None
    return 2 if kind.endswith("_call") else None


def _joins(part: _Part, item: Mapping[str, Any], rank: int) -> bool:
    mine = _reply_of(item.get("id"))
    if mine is not None and part.reply is not None:
        return mine == part.reply
    return rank > part.rank or rank == 2 == part.rank


def _join(part: _Part, item: Mapping[str, Any], kind: str, rank: int, where: str) -> None:
    part.rank = max(part.rank, rank)
    part.reply = part.reply or _reply_of(item.get("id"))
    if kind == "reasoning":
        part.reasoning.append(_reasoning(item, where))
    elif kind == "message":
        part.text.append(text_of(item.get("content"), f"{where}.content", join=""))
    else:
        part.calls.append(_call(item, kind, where))


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    text = text_of(item.get("content"), f"{where}.content", join="") or text_of(
        item.get("summary"), f"{where}.summary", join=""
    )
    sealed = item.get("encrypted_content")
    if text or not isinstance(sealed, str):
        return text
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""  # not ours


def _call(item: Mapping[str, Any], kind: str, where: str) -> Call:
    identity = get(item, "call_id", str, f"{where}.") or get(item, "id", str, f"{where}.")
    if kind == "custom_tool_call":
        return Call(identity, need(item, "name", str, f"{where}."), {"input": get(item, "input", str) or ""})
    if kind == "function_call":
        arguments = get(item, "arguments", (str, dict), f"{where}.")
        return Call(identity, need(item, "name", str, f"{where}."), "" if arguments is None else arguments)
    value = item.get("action", item.get("arguments", item.get("input")))
    return Call(identity, kind.removesuffix("_call"), value if isinstance(value, str | dict) else {})


def _context(item: Mapping[str, Any], kind: str, where: str) -> Message | None:
    """A message or a call's output; None for items that say nothing to the model."""
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise bad(f"{where}.role must be user, assistant, system or developer, got {shown(role)}")
        text = text_of(item.get("content"), f"{where}.content")
        return Message("user" if role == "user" else "system", text)
    if kind.endswith("_output"):
        output = item.get("output")
        text = text_of([output] if isinstance(output, dict) else output, f"{where}.output")
        return Message("tool", text, answers=get(item, "call_id", str, f"{where}."))
    return None
