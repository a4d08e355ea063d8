"""OpenAI Responses: what goes out. Output items, the response object, and the event sequence of a stream.

Ids are ``resp_REPLY``, ``rs_REPLY``, ``msg_REPLY``, ``fc_REPLY_n``: the same in every event, in the final object and in
an answer that is not streamed. Items of a stream stand in the order in which they came.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from uniagent.adapters.dialects.common import freeform_input, written
from uniagent.engine.messages import Call, Delta, ModelCall, Problem, Reply
from uniagent.engine.ports import Json


def make_items(call: ModelCall | None, reply: Reply) -> list[dict[str, Json]]:
    """The finished items of an answer: reasoning, text, calls. ``call`` None: as functions without a namespace."""
    items = []
    if reply.reasoning:
        items.append(reasoning_item(call, reply.id, reply.reasoning))
    if reply.text or not (reply.reasoning or reply.calls):
        items.append(message_item(reply.id, 0, reply.text, "completed" if reply.finish != "length" else "incomplete"))
    items += [call_item(call, reply.id, i, c) for i, c in enumerate(reply.calls)]
    return items


def reasoning_item(call: ModelCall | None, reply_id: str, text: str) -> dict[str, Json]:
    item: dict[str, Json] = {"id": f"rs_{reply_id}", "type": "reasoning", "summary": []}
    item["content"] = [{"type": "reasoning_text", "text": text}] if text else []
    include = _raw(call).get("include")
    wanted = isinstance(include, list) and "reasoning.encrypted_content" in include
    item["encrypted_content"] = base64.b64encode(text.encode()).decode() if wanted else None
    return item


def message_item(reply_id: str, index: int, text: str, status: str) -> dict[str, Json]:
    """The index-th text of an answer; there are several only where text came after calls."""
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    item_id = f"msg_{reply_id}_{index}" if index else f"msg_{reply_id}"
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def call_item(call: ModelCall | None, reply_id: str, index: int, c: Call, status: str = "completed") -> dict[str, Json]:
    """A call as the client declared its tool: a function, a function of a namespace, or free text."""
    kinds = declared(call)
    kind, namespace = kinds.get(c.name, ("function", None))
    item: dict[str, Json] = {"id": f"fc_{reply_id}_{index}", "call_id": c.id, "name": c.name, "status": status}
    if kind == "custom":
        item |= {"type": "custom_tool_call", "input": freeform_input(c.arguments) if status == "completed" else ""}
    else:
        item |= {"type": "function_call", "arguments": written(c.arguments)}
    return item if namespace is None else {**item, "namespace": namespace}


def declared(call: ModelCall | None) -> dict[str, tuple[str, str | None]]:
    """Each tool's kind and namespace; the first of a name counts, as for the model."""
    kinds: dict[str, tuple[str, str | None]] = {}
    tools: list[tuple[str | None, Any]] = [(None, t) for t in _raw(call).get("tools") or ()]
    while tools:
        namespace, tool = tools.pop(0)
        if tool.get("type") == "namespace":
            tools[:0] = [(tool.get("name"), t) for t in tool.get("tools") or ()]
        elif tool.get("type") in ("function", "custom"):
            name = tool.get("name") or (tool.get("function") or {}).get("name")
            kinds.setdefault(str(name), (tool["type"], namespace))
    return kinds


def response_object(
    call: ModelCall, reply_id: str, created: int, items: Sequence[Json], reply: Reply | None, status: str | None = None
) -> dict[str, Json]:
    """``reply`` None: still in progress. What the request set is given back as it was set."""
    raw = _raw(call)
    cut = reply is not None and reply.finish == "length"
    usage = None
    if reply is not None:
        u = reply.usage
        usage = {
            "input_tokens": u.prompt_tokens,
            "input_tokens_details": {"cached_tokens": u.cached_tokens},
            "output_tokens": u.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": u.reasoning_tokens},
            "total_tokens": u.prompt_tokens + u.completion_tokens,
        }
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": created,
        "status": status or ("in_progress" if reply is None else "incomplete" if cut else "completed"),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": raw.get("instructions"),
        "max_output_tokens": raw.get("max_output_tokens"),
        "metadata": raw.get("metadata") or {},
        "model": call.model,
        "output": list(items),
        "parallel_tool_calls": raw.get("parallel_tool_calls") is not False,
        "previous_response_id": raw.get("previous_response_id"),
        "reasoning": raw.get("reasoning"),
        "store": raw.get("store") is not False,
        "temperature": raw.get("temperature"),
        "text": raw.get("text") or {"format": {"type": "text"}},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": raw.get("tools") or [],
        "top_p": raw.get("top_p"),
        "truncation": raw.get("truncation") or "disabled",
        "usage": usage,
        "user": raw.get("user"),
    }


def _raw(call: ModelCall | None) -> Mapping[str, Any]:
    return call.raw if call is not None and isinstance(call.raw, dict) else {}


@define(eq=False)
class ResponsesEvents:
    """Events of one answer, numbered."""

    call: ModelCall
    created: int
    _kinds: dict[str, tuple[str, str | None]] = field(init=False)
    _id: str = ""
    _number: int = 0
    _items: list[dict[str, Json]] = field(factory=list)  # finished
    _open: str | None = None  # reasoning | text | the call that is being written
    _current: Call = field(factory=lambda: Call(None, "", ""))
    _pieces: list[str] = field(factory=list)  # of the open item
    _calls: int = 0
    _texts: int = 0

    def __attrs_post_init__(self) -> None:
        self._kinds = declared(self.call)

    def _event(self, kind: str, **fields: Json) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()

    def start(self, reply_id: str, prompt_tokens: int) -> bytes:
        self._id = reply_id
        response = response_object(self.call, reply_id, self.created, (), None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        if delta.reasoning:
            return self._reasoning(delta.reasoning)
        if delta.call_index is not None:
            return self._arguments(delta)
        return self._text(delta.text) if delta.text else b""

    def _at(self) -> dict[str, Json]:
        return {"output_index": len(self._items)}

    def _reasoning(self, text: str) -> bytes:
        out = b""
        item_id = f"rs_{self._id}"
        if self._open != "reasoning":
            out = self._close("completed")
            self._open = "reasoning"
            out += self._event("response.output_item.added", **self._at(), item=reasoning_item(self.call, self._id, ""))
        self._pieces.append(text)
        return out + self._event(
            "response.reasoning_text.delta", item_id=item_id, **self._at(), content_index=0, delta=text
        )

    def _text(self, text: str) -> bytes:
        out = b""
        if self._open != "text":
            out = self._close("completed")
            self._open = "text"
            item = {**message_item(self._id, self._texts, "", "in_progress"), "content": []}
            out += self._event("response.output_item.added", **self._at(), item=item)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            out += self._event(
                "response.content_part.added", item_id=item["id"], **self._at(), content_index=0, part=part
            )
        self._pieces.append(text)
        item_id = message_item(self._id, self._texts, "", "")["id"]
        return out + self._event(
            "response.output_text.delta", item_id=item_id, **self._at(), content_index=0, delta=text, logprobs=[]
        )

    def _arguments(self, delta: Delta) -> bytes:
        out = b""
        if delta.call_name is not None:
            out = self._close("completed")
            self._open = "call"
            self._current = Call(delta.call_id, delta.call_name, "")
            item = call_item(self.call, self._id, self._calls, self._current, "in_progress")
            out += self._event("response.output_item.added", **self._at(), item=item)
        if delta.arguments:
            self._pieces.append(delta.arguments)
            if self._kinds.get(self._current.name, ("function", None))[0] == "function":
                out += self._event(
                    "response.function_call_arguments.delta",
                    item_id=f"fc_{self._id}_{self._calls}",
                    **self._at(),
                    delta=delta.arguments,
                )
        return out

    def _close(self, status: str) -> bytes:
        """Ends the open item; free-text input goes out whole, when all of it is known."""
        if self._open is None:
            return b""
        whole, opened = "".join(self._pieces), self._open
        self._pieces, self._open = [], None
        if opened == "reasoning":
            item = reasoning_item(self.call, self._id, whole)
            out = self._event(
                "response.reasoning_text.done", item_id=item["id"], **self._at(), content_index=0, text=whole
            )
        elif opened == "text":
            item = message_item(self._id, self._texts, whole, status)
            self._texts += 1
            at = {"item_id": item["id"], **self._at(), "content_index": 0}
            out = self._event("response.output_text.done", **at, text=whole, logprobs=[])
            out += self._event("response.content_part.done", **at, part=item["content"][0])
        else:
            item = call_item(self.call, self._id, self._calls, Call(self._current.id, self._current.name, whole))
            self._calls += 1
            at = {"item_id": item["id"], **self._at()}
            if item["type"] == "custom_tool_call":
                out = self._event("response.custom_tool_call_input.delta", **at, delta=item["input"])
                out += self._event("response.custom_tool_call_input.done", **at, input=item["input"])
            else:
                name, arguments = item["name"], item["arguments"]
                out = self._event("response.function_call_arguments.done", **at, name=name, arguments=arguments)
        out += self._event("response.output_item.done", **self._at(), item=item)
        self._items.append(item)
        return out

    def ping(self) -> bytes:
        return b": keep-alive\n\n"

    def finish(self, replies: Sequence[Reply]) -> bytes:
        reply = replies[0]
        cut = reply.finish == "length"
        out = self._close("incomplete" if cut else "completed")
        if not self._items:  # an empty answer is an empty message
            out += self._text("") + self._close("incomplete" if cut else "completed")
        response = response_object(self.call, self._id, self.created, self._items, reply)
        return out + self._event("response.incomplete" if cut else "response.completed", response=response)

    def error(self, problem: Problem) -> bytes:
        response = response_object(self.call, self._id, self.created, self._items, None, "failed")
        response["error"] = {"code": "server_error", "message": problem.message}
        return self._event("response.failed", response=response)
