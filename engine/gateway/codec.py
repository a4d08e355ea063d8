"""String in, token out: what the engine must see next, and what its tokens say.

``delta`` encodes what came after an action (or everything, at the beginning) up to the first token to be sampled;
``decoder`` takes the sampled ids apart as they come. Sampled ids are never re-encoded: an action stands in every later
prompt as it was sampled, whatever the template would make of its text.

Invariants: no control token comes from content; benign content has exactly the ids of the plain template render; the
segments depend on nothing but the arguments. Knows no session, no socket, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from attrs import frozen

from uniagent.engine.gateway import conversation
from uniagent.engine.gateway.chat_template import ChatTemplate, RenderError
from uniagent.engine.gateway.conversation import as_chat
from uniagent.engine.gateway.decoder import Decoder, Pieces
from uniagent.engine.gateway.encoder import Encoder, Marks, marks_for, strings, transform
from uniagent.engine.gateway.glue import cut, stub
from uniagent.engine.gateway.template import TemplateStrategy, probe
from uniagent.engine.messages import Message, ModelCall, Problem
from uniagent.engine.ports import Ids, Json, Parser
from uniagent.engine.trajectory.types import Provenance, Sampled, Segment


class ActionNode(Protocol):
    """What the codec asks of an action in the turn tree."""

    @property
    def sampled(self) -> Sampled: ...
    @property
    def message(self) -> Message: ...
    @property
    def order(self) -> int: ...


class PendingMessage(Protocol):
    """A message after the anchor. ``moved``: it is the first n sampled tokens of an action of this session."""

    @property
    def message(self) -> Message: ...
    @property
    def moved(self) -> tuple[ActionNode, int] | None: ...


class ParserFactory(Protocol):
    """Makes one parser a generation. ``prefix`` is the generation prompt the model continues (it may open a think
    block), ``tools`` the tools of the request; ``markers`` are the control texts that the parser must see."""

    @property
    def markers(self) -> Sequence[str]: ...
    def __call__(self, prefix: str, tools: Sequence[Mapping[str, Json]]) -> Parser: ...


@frozen
class _Turn:
    """A model turn that glue is wanted after: its sampled ids as kept, and whether they end it."""

    message: Message
    ids: Ids
    closed: bool


class Codec:
    """One model's tokenizer, template and parser. Thread-safe, shared by all sessions. Raises Problem for messages the
    template cannot render; ``from_folder`` raises UserError for a model it cannot serve."""

    def __init__(
        self,
        encoder: Encoder,
        pieces: Pieces,
        template: ChatTemplate,
        strategy: TemplateStrategy,
        parser_factory: ParserFactory,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self.encoder, self.pieces, self.template, self.strategy = encoder, pieces, template, strategy
        self.parser_factory = parser_factory
        ends = [encoder.ids[t] for t in strategy.stops if t in encoder.ids]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*ends, *stop_ids]))
        self.vocab_size = encoder.vocab_size
        self._closing = frozenset(ends)

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        parser: str = "auto",
        now: datetime | None = None,
        options: Mapping[str, Json] | None = None,
    ) -> Codec:
        """The codec of a Hugging Face folder. ``now`` freezes the date that some templates print; ``options`` are
        template variables such as enable_thinking; ``parser`` a registered name."""
        from uniagent.engine.gateway.model_folder import load

        return load(Path(path), parser=parser, now=now, options=options)

    # -- in

    def delta(
        self, call: ModelCall, pending: Sequence[PendingMessage], anchor: ActionNode | None
    ) -> tuple[Segment, ...]:
        """The segments between the anchor's last kept token (or the beginning) and the first token to be sampled."""
        return tuple(self._delta(call, [p for p in pending if p.message.role != "tools"], anchor))

    def _delta(
        self, call: ModelCall, pending: Sequence[PendingMessage], anchor: ActionNode | None
    ) -> Iterator[Segment]:
        turn = self._turn(anchor) if anchor is not None else None
        group: list[Message] = []
        for p in pending:
            if p.moved is None:
                group.append(p.message)
                continue
            node, n = p.moved
            yield from self._between(call, turn, group)
            turn, group = self._turn(node, n), []
            yield Segment(Provenance.SAMPLED, turn.ids, node.order)
        yield from self._between(call, turn, group)

    def _turn(self, node: ActionNode, n: int | None = None) -> _Turn:
        sampled = node.sampled
        used = len(sampled.token_ids) if sampled.used is None else sampled.used
        n = used if n is None else min(n, used)
        return _Turn(node.message, sampled.token_ids[:n], sampled.closed and n == used)

    def _between(self, call: ModelCall, turn: _Turn | None, group: Sequence[Message]) -> Iterator[Segment]:
        """The glue and content between a model turn (None: the beginning) and the next one."""
        if turn is None and call.tools and not self.strategy.shape.tools:
            raise Problem(
                400, "tools_unsupported", "this model's chat template has no place for tools: leave `tools` out"
            )
        marks = marks_for(_texts(call, turn, group))
        try:
            end, text, content = self._rendered(call, turn, group, marks)
        except RenderError as problem:
            raise Problem(
                400, "template", f"the model's chat template cannot render these messages: {problem}"
            ) from problem
        if turn is None:
            ids, inside = self.encoder.encode(text, marks, content)
        else:  # encoded behind the end of turn, then cut there: the only place where cutting cannot change ids
            in_text = end in self.strategy.ends.openers
            whole = text if in_text else end + text
            shift = 0 if in_text else len(end)
            ids, inside = self.encoder.encode(whole, marks, [(a + shift, b + shift) for a, b in content])
            end_id = self.encoder.ids[end]
            if not in_text or (len(turn.ids) and turn.ids[-1] == end_id):
                ids, inside = ids[1:], inside[1:]
            if not turn.closed and not in_text:
                yield Segment(Provenance.REPAIR, np.array([end_id], np.int32))
        yield from _segments(ids, inside)

    def _rendered(
        self, call: ModelCall, turn: _Turn | None, group: Sequence[Message], marks: Marks
    ) -> tuple[str, str, list[tuple[int, int]]]:
        """The end of turn, the text after it (with breaks) and the spans of content in it (without)."""
        end, text = self._render(call, turn, group, marks, mark=None)
        for level in ("all", "messages"):
            try:
                _, marked = self._render(call, turn, group, marks, mark=level)
            except RenderError:
                continue
            bare, spans = _spans(marks.breaks.sub("", marked), marks)
            if bare == marks.breaks.sub("", text):
                return end, text, spans
        return end, text, self.encoder.between_markers(text, marks)  # a template that changes its content

    def _render(
        self, call: ModelCall, turn: _Turn | None, group: Sequence[Message], marks: Marks, mark: str | None
    ) -> tuple[str, str]:
        def change(text: str) -> str:
            return self.encoder.protect(text, marks)

        def enclose(text: str) -> str:
            core = text.strip()
            if not core:
                return change(text)
            start = text.index(core)
            protected = marks.start + change(core) + marks.end
            return text[:start] + protected + text[start + len(core) :]

        shape = self.strategy.shape
        known = turn.message.calls if turn else ()
        chat = [_changed(m, enclose if mark else change, change) for m in as_chat(group, shape, known)]
        if turn is None:
            listed = [transform(dict(t), enclose if mark == "all" else change) for t in call.tools]
            return "", self.template.render(chat, listed, generate=True)
        answered = [m["tool_call_id"] for m in chat[: _leading(chat)]]
        calls = [{"id": c.id, "name": change(c.name)} for c in turn.message.calls] if answered else []
        if answered and not calls:
            calls = [{"id": answered[0], "name": "tool"}]
        if answered:
            calls = [c if c["id"] else {**c, "id": answered[0]} for c in calls]
        head = stub(calls, marks.anchor, shape)
        tools = (conversation.TOOL,) if call.tools and shape.tools else ()
        glue = cut(self.template.render([*head, *chat], tools, generate=True), marks, self.strategy.ends)
        return glue.end, glue.text

    # -- out

    def call_id(self, session: str, turn: int, index: int, name: str) -> str:
        """The id of the index-th call of a turn in the form the model's template prints; deterministic."""
        return conversation.call_id(self.strategy.shape.call_ids, session, turn, index, name)

    def decoder(self, call: ModelCall, call_ids: Callable[[int, str], str]) -> Decoder:
        """A decoder of one generation; ``call_ids(index, name)`` gives ids to calls whose format carries none."""
        last = call.messages[-1].role if call.messages else "user"
        prompts = self.strategy.prompts
        prefix = prompts.get("tool" if last == "tool" else "user", "")
        parser = self.parser_factory(prefix, call.tools)
        return Decoder(
            self.pieces, parser, call_ids, stop=call.stop, stop_ids=frozenset(self.stop_ids), closing=self._closing
        )


def _leading(chat: Sequence[Mapping[str, Any]]) -> int:
    return next((n for n, m in enumerate(chat) if m["role"] != "tool"), len(chat))


def _changed(message: dict[str, Any], change: Callable[[str], str], keep: Callable[[str], str]) -> dict[str, Any]:
    """A chat dict with its content changed; roles stay, ids and names are only kept safe."""
    out: dict[str, Any] = {}
    for key, value in message.items():
        if key == "role":
            out[key] = value
        elif key in ("name", "tool_call_id"):
            out[key] = keep(value)
        elif key == "tool_calls":
            out[key] = [
                {
                    **c,
                    "id": keep(c["id"]),
                    "function": {
                        "name": keep(c["function"]["name"]),
                        "arguments": transform(c["function"]["arguments"], change),
                    },
                }
                for c in value
            ]
        else:
            out[key] = change(value)
    return out


def _texts(call: ModelCall, turn: _Turn | None, group: Sequence[Message]) -> Iterator[str]:
    for message in [*group, *([turn.message] if turn else [])]:
        yield from (message.text, message.reasoning)
        for c in message.calls:
            yield from strings([c.id or "", c.name, c.arguments])
    if turn is None:
        yield from strings(list(call.tools))


def _spans(text: str, marks: Marks) -> tuple[str, list[tuple[int, int]]]:
    """The text without start and end marks, and the spans they enclosed."""
    spans: list[tuple[int, int]] = []
    pieces, at, length, start = [], 0, 0, 0
    for m in marks.ends.finditer(text):
        pieces.append(text[at : m.start()])
        length += m.start() - at
        at = m.end()
        if m[0] == marks.start:
            start = length
        elif length > start:
            spans.append((start, length))
    return "".join([*pieces, text[at:]]), spans


def _segments(ids: Ids, inside: npt.NDArray[np.bool_]) -> Iterator[Segment]:
    """Runs of one provenance."""
    if not len(ids):
        return
    cuts = np.flatnonzero(np.diff(inside)) + 1
    for part, kind in zip(np.split(ids, cuts), np.split(inside, cuts), strict=True):
        yield Segment(Provenance.CONTENT if kind[0] else Provenance.TEMPLATE, part)
