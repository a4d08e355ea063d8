"""The template probe: how a chat template behaves from turn to turn, asked once at start-up.

Renders small conversations and decides:
 * append     the glue after a model turn depends only on the messages that follow it, and nothing the template wrote
              between turns changes later: encode only the delta. What the template would rewrite *inside* old model
              turns (reasoning it drops, an empty think block) does not count: those tokens stay as sampled.
 * re-render  some glue moves (a tool list that stands before the last user message): render everything each turn.
 * refuse     neither is sound; ``why`` says what is missing.

The boundary is found as Uni-Agent's separator probe finds it: compare the renders of a history with and without the
next message; what follows the last end of turn is the boundary. Knows texts, not token ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from uniagent.engine.gateway.chat_template import ChatTemplate, RenderError
from uniagent.engine.gateway.conversation import TOOL, Shape
from uniagent.engine.gateway.encoder import marks_for
from uniagent.engine.gateway.glue import Ends, cut_turns, stub
from uniagent.engine.gateway.template_shape import IDS, Chat, Questions, result, said, system, user

Turns = Sequence[tuple[Chat, dict[str, Any]]]  # what comes in, and what the model then says


@frozen
class TemplateStrategy:
    """The probe's verdict.

    ``kind``: append | re-render | refuse. ``stops``: the control tokens a model samples to end its turn. ``prompts``:
    the generation prompt by the role of the last message. ``leads``: how a rendered model turn may begin, and the
    generation prompt it began with when it was sampled. ``answers``: one line a question.
    """

    kind: str
    why: str
    shape: Shape = field(factory=Shape)
    ends: Ends = field(factory=Ends)
    stops: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(factory=dict)
    leads: Mapping[str, str] = field(factory=dict)
    answers: Mapping[str, str] = field(factory=dict)

    def prompted(self, text: str) -> str:
        """Text that ends in the opening words of a rendered model turn, with the generation prompt in their place."""
        lead = max((lead for lead in self.leads if text.endswith(lead)), key=len, default=None)
        if lead is None:
            raise RenderError("where a model turn begins cannot be told in this render")
        return text[: len(text) - len(lead)] + self.leads[lead]


def probe(template: ChatTemplate, controls: re.Pattern[str]) -> TemplateStrategy:
    """The verdict on a template; ``controls`` matches the control tokens it may write."""
    try:
        template.render([user("Ask1")])
    except RenderError as problem:
        return TemplateStrategy("refuse", f"it does not render one user message: {problem}")
    ask = Questions(template)
    turns = _Turns(ask, controls)
    ends, stops = turns.ends()
    if not (ends.closers or ends.openers):
        why = "it writes no control token between an answer and the next turn"
        return TemplateStrategy("refuse", why, ask.shape, answers=ask.answers())
    found = ((name, turns.trouble(chat, ends)) for name, chat in turns.scenarios().items())
    trouble = [f"{name}: {what}" for name, what in found if what]
    leads = turns.leads()
    kind = "append" if not trouble else "re-render" if leads else "refuse"
    if kind == "refuse":
        trouble.append("where a model turn begins cannot be found either")
    return TemplateStrategy(
        kind,
        "; ".join(trouble) or "the glue between turns never changes",
        ask.shape,
        ends,
        stops,
        turns.prompts(),
        leads,
        ask.answers(),
    )


class _Turns:
    """Questions about where turns end and begin, and whether what stands between them stays as it was."""

    def __init__(self, ask: Questions, controls: re.Pattern[str]) -> None:
        self.ask, self.controls = ask, controls
        self.marks = marks_for([])

    def ends(self) -> tuple[Ends, tuple[str, ...]]:
        """The tokens that end a turn, and those of them that a model samples."""
        ask, mark, asked = self.ask, self.marks.anchor, user("Ask1")
        last = self._after(ask.text([asked, said(mark)]))[:1]
        history = self._after(ask.text([asked, said(mark), user("Ask2")]), "Ask2")[:1]
        before = (ask.text([asked]) or "").partition("Ask1")[0]
        calls = ask.calls(mark) if ask.shape.calls else {**ask.calls("Val1"), "content": mark}
        done = ask.text([asked, calls], tools=True) or ""
        if last or not history or history[0] not in before:
            stops = [*last, *(self._after(done)[-1:] if ask.shape.tools else [])]
            closers = _unique([*history, *stops])
            within = self._within()
            return Ends(closers=closers), _unique([s for s in stops or history if s not in within]) or closers
        openers = [history[0]]
        if ask.shape.tools:
            then = ask.text([asked, calls, result("Res1")], tools=True) or ""
            more = then[_common(done, then) :].partition("Res1")[0]
            openers += [m[0] for m in self.controls.finditer(more)][:1]
        return Ends(openers=_unique(openers)), _unique(openers)

    def _after(self, text: str | None, until: str = "") -> list[str]:
        """Control tokens after the anchor mark, up to ``until``."""
        if text is None or self.marks.anchor not in text:
            return []
        tail = text[text.rindex(self.marks.anchor) + 1 :]
        tail = tail[: tail.index(until)] if until and until in tail else tail
        return [m[0] for m in self.controls.finditer(tail)]

    def _within(self) -> set[str]:
        """Control tokens between the reasoning and the words of one turn: they do not end it."""
        ask, key = self.ask, self.ask.shape.reasoning
        if not key:
            return set()
        why = {key: self.marks.anchor}
        texts = [ask.text([user("Ask1"), turn]) or "" for turn in (said("Say1", **why), ask.calls("Say1", why))]
        return {token for text in texts if "Say1" in text for token in self._after(text, "Say1")}

    def _heads(self) -> dict[str, Chat]:
        heads: dict[str, Chat] = {"user": [user("Ask1")]}
        if self.ask.shape.tools:
            heads["tool"] = [user("Ask1"), self.ask.calls("Val1"), result("Res1")]
        return heads

    def prompts(self) -> dict[str, str]:
        out = {}
        for role, chat in self._heads().items():
            bare, full = self.ask.text(chat, role == "tool"), self.ask.text(chat, role == "tool", generate=True)
            out[role] = full[len(bare) :] if bare is not None and full is not None and full.startswith(bare) else ""
        return out

    def leads(self) -> dict[str, str]:
        """How a rendered model turn may begin: the text before the first of its own words."""
        out, prompts, mark = {}, self.prompts(), self.marks.anchor
        answers = [said(mark)]
        if self.ask.shape.tools:
            answers.append(self.ask.calls(mark, name=mark))
        for role, head in self._heads().items():
            for answer in answers:
                bare, full = self.ask.text(head, tools=True), self.ask.text([*head, answer], tools=True)
                if bare is not None and full is not None and full.startswith(bare) and mark in full:
                    out[full[len(bare) : full.index(mark)]] = prompts[role]
        return out

    def scenarios(self) -> dict[str, Turns]:
        ask, mark = self.ask, self.marks.anchor
        why = {ask.shape.reasoning: "Why"} if ask.shape.reasoning else {}
        first: Chat = [*([system("Sys1")] if ask.shape.system else []), user("Ask1")]
        plain, thought = said(mark), said(mark, **why)
        if not ask.prints([user("Ask1"), thought, user("Ask2")], mark):
            thought = plain  # a template that prints reasoning in place of the words
        out: dict[str, Turns] = {
            "next user message": [(first, plain), ([user("Ask2")], thought), ([user("Ask3")], plain)],
        }
        if not ask.shape.tools:
            return out
        once: Chat = [result("Res1")]
        spoken = {"content": "" if ask.shape.calls else mark}
        call, thoughtful = {**ask.calls(mark), **spoken}, {**ask.calls(mark, why), **spoken}
        out["tool results"] = [(first, call), (once, thoughtful), (once, call), (once, plain)]
        out["user message after tools"] = [
            (first, thoughtful), (once, thought), ([user("Ask2")], call), (once, plain)
        ]  # fmt: skip
        if ask.shape.parallel:
            both: Chat = [result("Res1"), result("Res2", 1)]
            several = {**ask.calls(mark, ids=IDS), **spoken}
            out["parallel results"] = [(first, several), (both, call), (once, plain)]
        return out

    def trouble(self, turns: Turns, ends: Ends) -> str | None:
        """Where the glue of a conversation, taken turn by turn, is not what the whole conversation has: a sentence."""
        tools = any(m["role"] == "tool" for chat, _ in turns for m in chat)
        listed = (TOOL,) if tools else ()
        render = self.ask.template.render
        seen: list[str] = []  # the glue of each turn, up to its generation prompt
        chat: Chat = []
        try:
            for n, (new, answer) in enumerate(turns):
                full, bare = (render([*chat, *new], listed, generate) for generate in (True, False))
                prompt = len(full) - len(bare) if full.startswith(bare) else 0
                pieces = [text for _, text in cut_turns(full, self.marks, ends)]
                if len(pieces) != n + 1:
                    return f"turn {n + 1} of the rendered conversation cannot be found"
                for i, (was, now) in enumerate(zip(seen, pieces, strict=False)):
                    if not now.startswith(was):
                        return f"what stands before turn {i + 1} changes when turn {n + 1} comes"
                if n and self._alone(turns[n - 1][1], new, ends, listed) != pieces[-1]:
                    return f"what stands before turn {n + 1} depends on more than the messages in it"
                seen.append(pieces[-1][: len(pieces[-1]) - prompt])
                chat += [*new, answer]
        except RenderError as problem:
            return f"it refuses: {problem}"
        return None

    def _alone(self, answer: Mapping[str, Any], new: Chat, ends: Ends, tools: Sequence[Mapping[str, Any]]) -> str:
        """The glue as the codec takes it: from a stub of the turn before."""
        answered = [(c["id"], "look_up") for c in answer.get("tool_calls", ()) if new[0]["role"] == "tool"]
        head = stub(answered, self.marks.anchor, self.ask.shape)
        return cut_turns(self.ask.template.render([*head, *new], tools, True), self.marks, ends)[-1][1]


def _unique(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _common(a: str, b: str) -> int:
    """Length of the common prefix."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
