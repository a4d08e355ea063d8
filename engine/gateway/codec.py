"""String in, token out: what the engine must see next, and what its tokens say.

``delta`` encodes what came after an action (or everything, at the beginning) up to the first token to be sampled;
``decoder`` takes the sampled ids apart as they come. Sampled ids are never re-encoded: an action stands in every later
prompt as it was sampled, whatever the template would make of its text.

Invariants: no control token comes from content; benign content has exactly the ids of the plain template render; the
segments depend on nothing but the arguments. Knows no session, no socket, no engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from uniagent.engine.gateway import conversation, rendering
from uniagent.engine.gateway.chat_template import ChatTemplate, RenderError
from uniagent.engine.gateway.conversation import as_chat
from uniagent.engine.gateway.decoder import Decoder, TokenBytes
from uniagent.engine.gateway.encoder import Encoder, Marks, Unencodable, marks_for, strings
from uniagent.engine.gateway.glue import stub
from uniagent.engine.gateway.opening import opening
from uniagent.engine.gateway.rendering import Piece
from uniagent.engine.gateway.template import TemplateStrategy
from uniagent.engine.messages import Message, ModelCall, Problem
from uniagent.engine.ports import Ids, Json, Parsed, Parser
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
    """Makes one parser a generation. ``markers`` are the texts that the parser must see; ``prefix`` is the generation
    prompt the model continues (it may open a think block), ``tools`` the tools of the request, ``control`` the markers
    that are tokens of the vocabulary, and so stand behind a CONTROL_MARK."""

    @property
    def markers(self) -> Sequence[str]: ...
    def __call__(self, prefix: str, tools: Sequence[Mapping[str, Json]], control: Sequence[str]) -> Parser: ...


class Break(Exception):
    """The template now writes what the engine has already seen in another way: the prompt cannot go on from the anchor.
    Begin a new chain: ``delta`` with the whole request pending, its actions as moved, and no anchor."""


@frozen
class _Turn:
    """A model turn that stands as sampled: its ids as kept, and whether they end it."""

    message: Message
    ids: Ids
    closed: bool
    order: int
    opening: Ids | None

    def said(self) -> Iterator[Segment]:
        """The turn where it stands."""
        if self.opening is not None:
            yield Segment(Provenance.TEMPLATE, self.opening)
        yield Segment(Provenance.SAMPLED, self.ids, self.order)


class Codec:
    """One model's tokenizer, template and parser. Thread-safe, shared by all sessions. ``stop_ids`` end a generation;
    ``strategy`` is the probe's verdict. ``from_folder`` raises UserError for a model it cannot serve."""

    def __init__(
        self,
        encoder: Encoder,
        token_bytes: TokenBytes,
        template: ChatTemplate,
        strategy: TemplateStrategy,
        parser_factory: ParserFactory,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self.encoder, self.token_bytes, self.template, self.strategy = encoder, token_bytes, template, strategy
        self.parser_factory = parser_factory
        ends = [encoder.ids[t] for t in strategy.stops if t in encoder.ids]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*ends, *stop_ids]))
        self.vocab_size = encoder.vocab_size
        self.template_source = template.source
        self._closing, self._control = frozenset(ends), token_bytes.control
        self._openings: dict[tuple[str | None, str], Ids | None] = {}

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
        """The segments between the anchor's last kept token (or the beginning) and the first token to be sampled.
        Raises Problem for messages that the template cannot render, and Break (re-render only)."""
        pending = [p for p in pending if p.message.role != "tools"]
        tool_talk = call.tools or any(p.message.role == "tool" for p in pending)
        if tool_talk and not self.strategy.shape.tools:
            raise Problem(400, "tools_unsupported", "this model's chat template has no place for tools: leave them out")
        steps = self._rerendered if self.strategy.kind == "re-render" else self._appended
        try:
            return tuple(steps(call, pending, _turn(anchor) if anchor is not None else None))
        except RenderError as problem:
            message = f"the model's chat template cannot render these messages: {problem}"
            raise Problem(400, "template", message) from problem
        except Unencodable as problem:
            raise Problem(400, "unencodable", str(problem)) from problem

    def _appended(self, call: ModelCall, pending: Sequence[PendingMessage], turn: _Turn | None) -> Iterator[Segment]:
        """The glue after each model turn, from a stub of that turn and the messages up to the next one."""
        group: list[Message] = []
        for p in [*pending, None]:
            if p is not None and p.moved is None:
                group.append(p.message)
                continue
            yield from self._encoded(self._after(call, turn, group), turn)
            if p is not None and p.moved is not None:
                turn, group = _turn(*p.moved), []
                yield from turn.said()

    def _after(self, call: ModelCall, turn: _Turn | None, group: Sequence[Message]) -> tuple[Piece, Marks]:
        """What the template writes between a model turn (None: the beginning) and the next one."""
        shape, tools = self.strategy.shape, call.tools
        marks = marks_for(_texts([*group, *([turn.message] if turn else [])], () if turn else tools))
        chat = as_chat(group, shape, turn.message.calls if turn else ())
        head: list[dict[str, Json]] = []
        if turn is not None:
            calls = conversation.answered(chat, turn.message.calls, shape)
            safe = [(self.encoder.protect(id, marks), self.encoder.protect(name, marks)) for id, name in calls]
            head, tools = stub(safe, marks.anchor, shape), (conversation.TOOL,) if tools else ()
        return self._pieces(marks, [*head, *chat], tools, own=len(head))[0], marks

    def _pieces(
        self, marks: Marks, chat: rendering.Chat, tools: Sequence[Mapping[str, Json]], own: int = 0
    ) -> list[Piece]:
        return rendering.pieces(self.template, self.encoder, self.strategy.ends, marks, chat, tools, own)

    def _rerendered(self, call: ModelCall, pending: Sequence[PendingMessage], turn: _Turn | None) -> Iterator[Segment]:
        """The whole conversation, its model turns replaced by what was sampled; what was seen must stand unchanged."""
        shape, asked = self.strategy.shape, [m for m in call.messages if m.role != "tools"]
        old = asked[: len(asked) - len(pending)] if turn is not None else []
        messages = [*old, *(p.message for p in pending)]
        marks = marks_for(_texts(messages, call.tools))
        marked = [m.role == "assistant" for m in old] + [p.moved is not None for p in pending]
        chat = as_chat(messages, shape, mark=marks.anchor, marked=marked)
        found = self._spliced(marks, chat, call.tools, sum(marked))
        turns = [_turn(*p.moved) for p in pending if p.moved is not None]
        if turn is not None:
            chat = as_chat(old[:-1], shape, mark=marks.anchor, marked=marked)
            before = self._spliced(marks, chat, call.tools, sum(marked[: len(old) - 1]))
            for was, now in zip(before, found, strict=False):
                if was.text != now.text:
                    raise Break(f"the template changes what stood before an earlier answer: {_difference(was, now)}")
            found, turns = found[len(before) :], [turn, *turns]
        else:
            yield from self._encoded((found[0], marks), None)
            found = found[1:]
            yield from itertools.chain.from_iterable(t.said() for t in turns[:1])
        for n, piece in enumerate(found):
            yield from self._encoded((piece, marks), turns[n])
            yield from itertools.chain.from_iterable(t.said() for t in turns[n + 1 : n + 2])

    def _spliced(
        self, marks: Marks, chat: rendering.Chat, tools: Sequence[Mapping[str, Json]], turns: int
    ) -> list[Piece]:
        """What stands around model turns, each piece ending in a generation prompt, not in a turn's opening words."""
        found = self._pieces(marks, chat, tools)
        if len(found) != turns + 1:
            raise RenderError(f"it prints {len(found) - 1} of {turns} earlier answers")
        return [*(Piece(p.end, self.strategy.prompted(p.text), p.content) for p in found[:-1]), found[-1]]

    def _encoded(self, piece_and_marks: tuple[Piece, Marks], turn: _Turn | None) -> Iterator[Segment]:
        """Encoded together with the end of turn before it, and cut there: the only place where cutting cannot change
        ids. A turn that was never ended gets its end as a repair."""
        piece, marks = piece_and_marks
        if turn is None or piece.end is None:
            yield from _segments(*self.encoder.encode(piece.text, marks, piece.content))
            return
        opens = piece.end in self.strategy.ends.openers  # and then it stands in the text already
        shift = 0 if opens else len(piece.end)
        spans = [(a + shift, b + shift) for a, b in piece.content]
        ids, inside = self.encoder.encode(piece.text if opens else piece.end + piece.text, marks, spans)
        end = self.encoder.ids[piece.end]
        if not turn.closed and not opens:
            yield Segment(Provenance.REPAIR, np.array([end], np.int32))
        drop = int(not opens or (len(turn.ids) > 0 and int(turn.ids[-1]) == end))
        yield from _segments(ids[drop:], inside[drop:])

    def opening(self, call: ModelCall) -> Ids:
        """The tokens that begin the call which ``tool_choice`` demands, to be put before the first sampled one. Problem
        where this model's template has none that would make one."""
        name, role = None if call.tool_choice == "required" else call.tool_choice, _last_role(call)
        if (name, role) not in self._openings:
            if len(self._openings) > 1000:
                self._openings.clear()
            self._openings[name, role] = self._opening(name, role)
        found = self._openings[name, role]
        if found is None:
            why = "this model cannot be made to call a tool: set tool_choice to auto, or ask for the call in the prompt"
            raise Problem(400, "tool_choice_unsupported", why)
        return found

    def _opening(self, name: str | None, role: str) -> Ids | None:
        closers = [m for m in self.parser_factory.markers if "think" in m and "/" in m]
        if name is not None and self.encoder.pattern.search(name):
            return None

        def last(text: str) -> int:
            return max((m.end() for m in self.encoder.pattern.finditer(text)), default=0)

        def encoded(text: str) -> Ids:
            return self.encoder.encode(text, marks_for([text]))[0]

        def read(prompt: str, text: str) -> Parsed:
            tool: Json = {"type": "function", "function": {"name": name or "look_up", "parameters": {}}}
            parser = self.parser_factory(prompt, (tool,), self._control)
            parser.feed(self.token_bytes.text(encoded(text).tolist()))
            return parser.finish()[1]

        text = opening(self.template, self.strategy, last, read, name, role, closers)
        return None if text is None else encoded(text)

    # -- out

    def call_id(self, session: str, turn: int, index: int, name: str) -> str:
        """The id of the index-th call of a turn in the form the model's template prints; deterministic."""
        return conversation.call_id(self.strategy.shape.call_ids, session, turn, index, name)

    def decoder(self, call: ModelCall, call_ids: Callable[[int, str], str]) -> Decoder:
        """A decoder of one generation; ``call_ids(index, name)`` gives ids to calls whose format carries none."""
        prefix = self.strategy.prompts.get(_last_role(call), "")
        parser = self.parser_factory(prefix, call.tools, self._control)
        stop_ids = frozenset(self.stop_ids)
        most = None if call.parallel else 1
        return Decoder(
            self.token_bytes, parser, call_ids, stop=call.stop, stop_ids=stop_ids, closing=self._closing, calls=most
        )


def _last_role(call: ModelCall) -> str:
    """Of the message that the model answers, as far as generation prompts differ."""
    return "tool" if call.messages and call.messages[-1].role == "tool" else "user"


def _turn(node: ActionNode, n: int | None = None) -> _Turn:
    sampled = node.sampled
    used = len(sampled.token_ids) if sampled.used is None else sampled.used
    n = used if n is None else min(n, used)
    message = node.message
    if n < used:  # the beginning of a cut stream: the calls that came through
        message = evolve(message, calls=message.calls[: sum(end <= n for end in sampled.call_ends)])
    return _Turn(message, sampled.token_ids[:n], sampled.closed and n == used, node.order, sampled.opening)


def _texts(messages: Sequence[Message], tools: Sequence[Mapping[str, Json]]) -> Iterator[str]:
    for message in messages:
        yield from (message.text, message.reasoning)
        for c in message.calls:
            yield from strings([c.id or "", c.name, c.arguments])
    yield from strings(list(tools))


def _segments(ids: Ids, inside: npt.NDArray[np.bool_]) -> Iterator[Segment]:
    """Runs of one provenance."""
    if not len(ids):
        return
    edges = [0, *(np.flatnonzero(inside[1:] != inside[:-1]) + 1).tolist(), len(ids)]
    for start, end in itertools.pairwise(edges):
        yield Segment(Provenance.CONTENT if inside[start] else Provenance.TEMPLATE, ids[start:end])


def _difference(was: Piece, now: Piece) -> str:
    at = next((n for n, (a, b) in enumerate(zip(was.text, now.text, strict=False)) if a != b), 0)
    return f"it was {was.text[at : at + 40]!r} and is {now.text[at : at + 40]!r}"
