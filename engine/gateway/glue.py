"""Where model turns end in a rendered text, and the stub conversation that shows what the template writes after one.

Glue is the text between the end of one model turn and the first token of the next. It is read off a render of a stub
(one user message and an answer whose words are the anchor mark) followed by the new messages, so that its cost does
not depend on the length of the conversation. Whether glue may be taken so is the probe's question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from uniagent.engine.gateway.chat_template import RenderError
from uniagent.engine.gateway.conversation import Shape
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


def stub(calls: Sequence[tuple[str, str]], mark: str, shape: Shape) -> list[dict[str, Any]]:
    """A conversation whose last message is an assistant turn that says ``mark``. ``calls`` are (id, name), safe, of the
    calls that the next messages answer."""
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls and shape.calls else mark}
    if calls:
        argument: Json = '{"key": "' + mark + '"}' if shape.arguments == "text" else {"key": mark}
        chosen = calls if shape.parallel else calls[-1:]
        answer["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": argument}} for id, name in chosen
        ]
    return [{"role": "user", "content": "U"}, answer]


def cut_turns(text: str, marks: Marks, ends: Ends) -> list[tuple[str | None, str]]:
    """The text before, between and after the turns that say the anchor mark, each with the end of turn before it. The
    opening words of a turn stay with the text before it; an end that opens the next turn stays in the text after it.
    Raises RenderError where a turn has no end."""
    out: list[tuple[str | None, str]] = []
    end, at = None, 0
    for m in marks.anchors.finditer(text):
        if m.start() < at:
            continue  # another call of the same turn
        out.append((end, text[at : m.start()]))
        found = ends.first(text, m.end())
        if found is None:
            raise RenderError("the template prints no end of turn after an assistant message")
        end = found[1]
        at = found[0] + (len(end) if end in ends.closers else 0)
    return [*out, (end, text[at:])]
