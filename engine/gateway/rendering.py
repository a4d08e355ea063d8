"""Chat messages to rendered text in which content is safe and known: the step between a template and its ids.

The conversation is rendered twice: once with content protected, which is the text, and once with every piece of content
enclosed in marks, which only says where content stands. Model turns whose words are the anchor mark cut the text into
pieces; what was sampled goes between them. Knows no ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from uniagent.engine.gateway.chat_template import ChatTemplate, RenderError
from uniagent.engine.gateway.encoder import Encoder, Marks, transform
from uniagent.engine.gateway.glue import Ends, cut_turns
from uniagent.engine.ports import Json

Chat = Sequence[Mapping[str, Any]]
Spans = list[tuple[int, int]]


@frozen
class Piece:
    """Text before, between or after model turns. ``end`` is the token that ended the turn before it, None at the
    beginning; ``text`` has breaks, ``content`` are spans of it without them."""

    end: str | None
    text: str
    content: Spans


def pieces(
    template: ChatTemplate,
    encoder: Encoder,
    ends: Ends,
    marks: Marks,
    chat: Chat,
    tools: Sequence[Mapping[str, Json]],
    own: int = 0,
) -> list[Piece]:
    """The pieces of a rendered conversation. The first ``own`` messages are ours, and the tools with them: a stub,
    whose own text is left out. Raises RenderError."""

    def render(said: Callable[[str], str], listed: Callable[[str], str]) -> list[tuple[str | None, str]]:
        changed = [*chat[:own], *(_changed(m, said, keep) for m in chat[own:])]
        schemas = tools if own else [transform(dict(t), listed) for t in tools]
        return cut_turns(template.render(changed, schemas, generate=True), marks, ends)[1 if own else 0 :]

    def keep(text: str) -> str:
        return encoder.protect(text, marks)

    def enclose(text: str) -> str:
        core = text.strip()
        if not core or marks.anchor in text:
            return keep(text)
        start = text.index(core)
        return text[:start] + marks.start + keep(core) + marks.end + text[start + len(core) :]

    plain = render(keep, keep)
    bare = [marks.breaks.sub("", text) for _, text in plain]
    for listed in (enclose, keep) if tools and not own else (keep,):
        try:
            found = [_spans(marks.breaks.sub("", text), marks) for _, text in render(enclose, listed)]
        except RenderError:
            continue
        if [text for text, _ in found] == bare:
            return [Piece(end, text, spans) for (end, text), (_, spans) in zip(plain, found, strict=True)]
    # a template that rewrites its content: all but control tokens counts as content
    return [Piece(end, text, encoder.between_markers(text, marks)) for end, text in plain]


def _changed(message: Mapping[str, Any], change: Callable[[str], str], keep: Callable[[str], str]) -> dict[str, Any]:
    """A chat dict with its content changed; roles stay, ids and names are only kept safe."""
    out: dict[str, Any] = {}
    for key, value in message.items():
        if key == "role":
            out[key] = value
        elif key in ("name", "tool_call_id"):
            out[key] = keep(value)
        elif key == "tool_calls":
            out[key] = [_changed_call(c, change, keep) for c in value]
        else:
            out[key] = change(value)
    return out


def _changed_call(call: Mapping[str, Any], change: Callable[[str], str], keep: Callable[[str], str]) -> dict[str, Any]:
    function = {"name": keep(call["function"]["name"]), "arguments": transform(call["function"]["arguments"], change)}
    return {"id": keep(call["id"]), "type": "function", "function": function}


def _spans(text: str, marks: Marks) -> tuple[str, Spans]:
    """The text without start and end marks, and the spans they enclosed."""
    spans: Spans = []
    parts, at, length, start = [], 0, 0, 0
    for m in marks.ends.finditer(text):
        parts.append(text[at : m.start()])
        length += m.start() - at
        at = m.end()
        if m[0] == marks.start:
            start = length
        elif length > start:
            spans.append((start, length))
    return "".join([*parts, text[at:]]), spans
