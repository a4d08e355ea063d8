"""The text between the end of one model turn and the first token of the next, as the chat template writes it.

The template is rendered over a stub that ends in an assistant turn (one user message and the anchor's answer, whose
words are an anchor mark) followed by the new messages; what comes after the stub's end of turn is the glue. So its
cost does not depend on the length of the conversation. Whether the glue may be taken so is the probe's question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from uniagent.engine.gateway.chat_template import ChatTemplate, RenderError
from uniagent.engine.gateway.conversation import TOOL, Shape
from uniagent.engine.gateway.encoder import Marks
from uniagent.engine.ports import Json


@frozen
class Ends:
    """Control tokens around the end of a model turn. ``closers`` belong to the turn; ``openers`` begin the next one and
    are what the model samples to end its own where there are no closers."""

    closers: tuple[str, ...] = ()
    openers: tuple[str, ...] = ()

    def first(self, text: str, start: int) -> tuple[int, str] | None:
        """Where the first of them stands at or after ``start``, and which."""
        found = [(text.find(e, start), e) for e in (*self.closers, *self.openers)]
        return min(((at, e) for at, e in found if at >= 0), default=None)


@frozen
class Glue:
    """``text`` follows the end of turn ``end``, which stands in the text when it is an opener."""

    end: str
    text: str


def stub(calls: Sequence[Mapping[str, Any]], mark: str, shape: Shape) -> list[dict[str, Any]]:
    """A conversation whose last message is an assistant turn that says ``mark``, in its calls when there are any.
    ``calls`` are (id, name) of the calls that the next messages answer."""
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else mark}
    if calls:
        argument: Json = '{"key": "' + mark + '"}' if shape.arguments == "text" else {"key": mark}
        chosen = calls if shape.parallel else calls[-1:]
        answer["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": argument}} for c in chosen
        ]
    return [{"role": "user", "content": "U"}, answer]


def after(template: ChatTemplate, head: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]], *,
          marks: Marks, ends: Ends, tools: bool, generate: bool = True) -> Glue:  # fmt: skip
    """The glue after the assistant turn that ends ``head`` (a stub, or a whole conversation). Raises RenderError."""
    text = template.render([*head, *messages], (TOOL,) if tools else (), generate)
    return cut(text, marks, ends)


def cut(text: str, marks: Marks, ends: Ends) -> Glue:
    """What follows the end of the last turn that says the anchor mark."""
    said = [m.end() for m in marks.anchors.finditer(text)]
    found = ends.first(text, said[-1]) if said else None
    if found is None:
        raise RenderError("the template prints no end of turn after an assistant message")
    at, end = found
    return Glue(end, text[at + len(end) :] if end in ends.closers else text[at:])
