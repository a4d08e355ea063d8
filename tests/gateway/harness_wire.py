"""The client side of each wire dialect: a harness in common form, and how it writes requests and reads answers.

A conversation is a list of items: ``Said`` by the user or the system, ``Answered`` by the model, ``Result`` of a call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from attrs import evolve, field, frozen
from gateway_kit import Client, sse

RUN_SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}}}


@frozen
class Call:
    id: str | None
    name: str
    arguments: str


@frozen
class Said:
    text: str
    role: str = "user"


@frozen
class Result:
    id: str | None
    text: str


@frozen
class Answered:
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish: str = ""
    usage: tuple[int, int] = (0, 0)
    id: str = ""


Item = Said | Result | Answered


@frozen
class Style:
    """How a harness writes what it sends back."""

    parts: bool = False  # content as lists of parts
    nulls: bool = False  # null and empty optional fields
    cache: bool = False  # a moving cache_control
    reasoning: str = "kept"  # kept | trimmed | dropped
    objects: bool = False  # arguments re-serialised


class Wire(Protocol):
    path: str

    def body(self, items: Sequence[Item], tools: Sequence[str], style: Style, **options: Any) -> dict[str, Any]: ...
    def read(self, body: Any) -> Answered: ...
    def read_stream(self, text: str) -> Answered: ...
    def read_part(self, got: str) -> Answered: ...


def thought(answer: Answered, style: Style) -> str:
    return {"kept": answer.reasoning, "trimmed": answer.reasoning.strip(), "dropped": ""}[style.reasoning]


def arguments(call: Call, style: Style) -> str:
    if not style.objects:
        return call.arguments
    try:
        return json.dumps(json.loads(call.arguments), separators=(",", ":"), ensure_ascii=False)
    except ValueError:
        return call.arguments


class ChatWire:
    path = "/v1/chat/completions"

    def body(self, items: Sequence[Item], tools: Sequence[str], style: Style, **options: Any) -> dict[str, Any]:
        messages = [self._message(item, style) for item in items]
        if style.cache and messages and messages[-1].get("content"):
            messages[-1] = {**messages[-1], "content": self._parts(messages[-1]["content"], cache=True)}
        body: dict[str, Any] = {"model": "m", "messages": messages, **options}
        if tools:
            body["tools"] = [{"type": "function", "function": {"name": t, "parameters": RUN_SCHEMA}} for t in tools]
        if "max" in body:
            body["max_completion_tokens"] = body.pop("max")
        return body

    def _parts(self, content: Any, *, cache: bool = False) -> Any:
        if not isinstance(content, str):
            return content
        part: dict[str, Any] = {"type": "text", "text": content}
        return [{**part, "cache_control": {"type": "ephemeral"}} if cache else part]

    def _message(self, item: Item, style: Style) -> dict[str, Any]:
        content: Any = self._parts(item.text) if style.parts and item.text else item.text
        if isinstance(item, Said):
            return {"role": item.role, "content": content, **({"name": None} if style.nulls else {})}
        if isinstance(item, Result):
            return {"role": "tool", "tool_call_id": item.id, "content": content}
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if style.nulls:
            message |= {"refusal": None, "audio": None, "function_call": None, "annotations": []}
            message.setdefault("tool_calls", None)
        if thought(item, style):
            message["reasoning_content"] = thought(item, style)
        if item.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": arguments(c, style)}}
                for c in item.calls
            ]
        return message

    def read(self, body: Any) -> Answered:
        choice = body["choices"][0]
        message = choice["message"]
        calls = [
            Call(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()
        ]
        usage = body["usage"]
        return Answered(
            message["content"] or "",
            message.get("reasoning_content") or "",
            tuple(calls),
            choice["finish_reason"],
            (usage["prompt_tokens"], usage["completion_tokens"]),
            body["id"],
        )

    def read_stream(self, text: str) -> Answered:
        out, usage = Answered(), (0, 0)
        calls: list[Call] = []
        events = sse(text)
        assert events[-1][1] == "[DONE]"
        for _, chunk in events[:-1]:
            if chunk.get("usage"):
                usage = (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
            for choice in chunk["choices"]:
                delta = choice["delta"]
                out = evolve(
                    out,
                    id=chunk["id"],
                    text=out.text + (delta.get("content") or ""),
                    reasoning=out.reasoning + (delta.get("reasoning_content") or ""),
                    finish=choice["finish_reason"] or out.finish,
                )
                for piece in delta.get("tool_calls") or ():
                    if piece["index"] == len(calls):
                        calls.append(Call(piece["id"], piece["function"]["name"], ""))
                    at = calls[piece["index"]]
                    calls[piece["index"]] = evolve(at, arguments=at.arguments + piece["function"].get("arguments", ""))
        return evolve(out, calls=tuple(calls), usage=usage)

    def read_part(self, got: str) -> Answered:
        """The text and the calls of the whole events that came before a connection broke."""
        deltas = [choice["delta"] for _, chunk in whole_events(got) for choice in chunk["choices"]]
        calls = [c for d in deltas for c in d.get("tool_calls") or ()]
        return Answered(
            "".join(d.get("content") or "" for d in deltas),
            calls=tuple(Call(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls),
        )


class AnthropicWire:
    path = "/v1/messages"

    def body(self, items: Sequence[Item], tools: Sequence[str], style: Style, **options: Any) -> dict[str, Any]:
        system = [i.text for i in items if isinstance(i, Said) and i.role == "system"]
        messages: list[dict[str, Any]] = []
        for item in items:
            if isinstance(item, Said) and item.role == "system":
                continue
            message = self._message(item, style)
            if isinstance(item, Result) and messages and messages[-1]["role"] == "user" and self._results(messages[-1]):
                messages[-1] = {"role": "user", "content": [*messages[-1]["content"], *message["content"]]}
            else:
                messages.append(message)
        if style.cache and messages:
            content = messages[-1]["content"]
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            messages[-1] = {
                **messages[-1],
                "content": [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}],
            }
        body: dict[str, Any] = {"model": "m", "max_tokens": 1000, "messages": messages, "thinking": {"type": "enabled"}}
        if system:
            body["system"] = [{"type": "text", "text": t} for t in system]
        if tools:
            body["tools"] = [{"name": t, "input_schema": RUN_SCHEMA} for t in tools]
        body |= options
        if "max" in body:
            body["max_tokens"] = body.pop("max")
        if "stop" in body:
            body["stop_sequences"] = body.pop("stop")
        return body

    def _results(self, message: dict[str, Any]) -> bool:
        content = message["content"]
        return isinstance(content, list) and content[-1]["type"] == "tool_result"

    def _message(self, item: Item, style: Style) -> dict[str, Any]:
        if isinstance(item, Said):
            return {"role": "user", "content": [{"type": "text", "text": item.text}] if style.parts else item.text}
        if isinstance(item, Result):
            content: Any = [{"type": "text", "text": item.text}] if style.parts else item.text
            return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": item.id, "content": content}]}
        blocks: list[dict[str, Any]] = []
        if thought(item, style):
            blocks.append({"type": "thinking", "thinking": thought(item, style), "signature": "s"})
        if item.text:
            blocks.append({"type": "text", "text": item.text, **({"citations": None} if style.nulls else {})})
        for c in item.calls:
            try:
                value = json.loads(c.arguments or "{}")
            except ValueError:
                value = None
            given = value if isinstance(value, dict) else {"__unparsedToolInput": {"raw": c.arguments}}
            if style.objects:
                given = dict(sorted(given.items()))
            blocks.append({"type": "tool_use", "id": c.id, "name": c.name, "input": given})
        plain = len(blocks) == 1 and blocks[0]["type"] == "text" and not (style.parts or style.nulls)
        return {"role": "assistant", "content": item.text if plain else blocks}

    def read(self, body: Any) -> Answered:
        blocks = body["content"]
        usage = body["usage"]
        return Answered(
            "".join(b["text"] for b in blocks if b["type"] == "text"),
            "".join(b["thinking"] for b in blocks if b["type"] == "thinking"),
            tuple(Call(b["id"], b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"),
            body["stop_reason"],
            (usage["input_tokens"], usage["output_tokens"]),
            body["id"],
        )

    def read_stream(self, text: str) -> Answered:
        blocks: list[dict[str, Any]] = []
        message: dict[str, Any] = {}
        names = [event for event, data in sse(text)]
        assert names[0] == "message_start"
        assert names[-1] == "message_stop"
        for event, data in sse(text):
            assert event == data["type"]
            if event == "message_start":
                message = data["message"]
            elif event == "content_block_start":
                assert data["index"] == len(blocks)
                blocks.append({**data["content_block"], "json": ""})
            elif event == "content_block_delta":
                delta = data["delta"]
                assert data["index"] == len(blocks) - 1
                for key, name in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                    if key in delta:
                        blocks[-1][name] = blocks[-1].get(name, "") + delta[key]
            elif event == "message_delta":
                message |= data["delta"]
                message["usage"] = data["usage"]
        calls = tuple(Call(b["id"], b["name"], b["json"]) for b in blocks if b["type"] == "tool_use")
        whole = self.read({**message, "content": [b for b in blocks if b["type"] != "tool_use"]})
        return evolve(whole, calls=calls)

    def read_part(self, got: str) -> Answered:
        events = whole_events(got)
        deltas = [d for e, d in events if e == "content_block_delta"]
        begun = {d["index"]: d["content_block"] for e, d in events if e == "content_block_start"}
        over = [d["index"] for e, d in events if e == "content_block_stop" and begun[d["index"]]["type"] == "tool_use"]

        def written(index: int) -> str:
            return "".join(d["delta"].get("partial_json", "") for d in deltas if d["index"] == index)

        return Answered(
            "".join(d["delta"].get("text", "") for d in deltas),
            calls=tuple(Call(begun[i]["id"], begun[i]["name"], written(i)) for i in over),
        )


class ResponsesWire:
    path = "/v1/responses"

    def body(self, items: Sequence[Item], tools: Sequence[str], style: Style, **options: Any) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": "m",
            "input": [w for i in items for w in self._items(i, style)],
            "store": False,
        }
        if tools:
            body["tools"] = [{"type": "function", "name": t, "parameters": RUN_SCHEMA} for t in tools]
        body |= options
        if "max" in body:
            body["max_output_tokens"] = body.pop("max")
        return body

    def _items(self, item: Item, style: Style) -> list[dict[str, Any]]:
        if isinstance(item, Said):
            content: Any = [{"type": "input_text", "text": item.text}] if style.parts else item.text
            return [{"type": "message", "role": item.role, "content": content}]
        if isinstance(item, Result):
            return [{"type": "function_call_output", "call_id": item.id, "output": item.text}]
        out: list[dict[str, Any]] = []
        if thought(item, style):
            text = thought(item, style)
            out.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]})
        if item.text:
            part = {"type": "output_text", "text": item.text, "annotations": []}
            out.append({"type": "message", "role": "assistant", "content": [part]})
        for c in item.calls:
            call = {"type": "function_call", "call_id": c.id, "name": c.name, "arguments": arguments(c, style)}
            out.append({**call, **({"id": None, "status": None} if style.nulls else {})})
        return out

    def read(self, body: Any) -> Answered:
        items = body["output"]
        usage = body["usage"]
        cut = (body["incomplete_details"] or {}).get("reason")
        return Answered(
            "".join(p["text"] for i in items if i["type"] == "message" for p in i["content"]),
            "".join(p["text"] for i in items if i["type"] == "reasoning" for p in i["content"]),
            tuple(Call(i["call_id"], i["name"], i["arguments"]) for i in items if i["type"] == "function_call"),
            cut or body["status"],
            (usage["input_tokens"], usage["output_tokens"]),
            body["id"],
        )

    def read_stream(self, text: str) -> Answered:
        """What the deltas add up to, checked against the items, and these against the final response."""
        events = sse(text)
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        assert events[0][0] == "response.created"
        assert events[-1][0] in ("response.completed", "response.incomplete")
        final = events[-1][1]["response"]
        deltas: dict[str, str] = {}
        done: list[Any] = []
        for event, data in events:
            assert event == data["type"]
            if event.endswith(".delta"):
                assert data["output_index"] == len(done)
                deltas[data["item_id"]] = deltas.get(data["item_id"], "") + data["delta"]
            elif event == "response.output_item.done":
                item = data["item"]
                whole = item.get("arguments", item.get("input"))
                if whole is None:
                    whole = "".join(p["text"] for p in item["content"])
                assert deltas.get(item["id"], "") == whole
                done.append(item)
        assert done == final["output"]
        assert len({i["id"] for i in done}) == len(done)
        return self.read(final)

    def read_part(self, got: str) -> Answered:
        events = whole_events(got)
        done = [d["item"] for e, d in events if e == "response.output_item.done"]
        return Answered(
            "".join(d["delta"] for e, d in events if e == "response.output_text.delta"),
            calls=tuple(Call(i["call_id"], i["name"], i["arguments"]) for i in done if i["type"] == "function_call"),
        )


def whole_events(got: str) -> list[tuple[str | None, Any]]:
    """Events in raw HTTP, chunk headers and all; a half event at the end does not count."""
    lines = [line for line in got.replace("\r\n", "\n").split("\n") if line.startswith(("event: ", "data: "))]
    out, event = [], None
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
            continue
        try:
            out.append((event, json.loads(value)))
        except ValueError:
            break
    return out


WIRES: dict[str, Wire] = {"chat": ChatWire(), "anthropic": AnthropicWire(), "responses": ResponsesWire()}


@frozen
class Harness:
    """One harness talking to one session."""

    client: Client
    wire: Wire
    stream: bool = False
    tools: tuple[str, ...] = ("run",)
    style: Style = field(factory=Style)

    async def ask(self, items: Sequence[Item], *, style: Style | None = None, **options: Any) -> Answered:
        tools = options.pop("tools", self.tools)
        stream = options.pop("stream", self.stream)
        body = self.wire.body(items, tools, style or self.style, **options)
        if stream:
            body["stream"] = True
            if "messages" in body and isinstance(self.wire, ChatWire):
                body["stream_options"] = {"include_usage": True}
        answer = await self.client.post(self.wire.path, body)
        assert answer.status_code == 200, answer.text
        return self.wire.read_stream(answer.text) if stream else self.wire.read(answer.json())
