"""The template probe: how a chat template behaves from turn to turn, asked once at start-up.

Renders small conversations and decides:
 * append     the glue after a model turn depends only on the messages that follow it, and nothing the template wrote
              between turns changes later: encode only the delta. What the template would rewrite *inside* old model
              turns (reasoning it drops, an empty think block) does not count: those tokens stay as sampled.
 * re-render  some glue moves (a tool list that stands before the last user message): render everything each turn.
 * refuse     neither is sound; ``why`` says what is missing.
Also finds what messages the template accepts (``Shape``), the tokens that end a turn and the generation prompts.

The method for the boundary follows Uni-Agent's separator probe: compare renders of a history with and without the next
message; what follows the last end of turn is the boundary. Knows texts, not token ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from uniagent.engine.gateway.chat_template import ChatTemplate, RenderError
from uniagent.engine.gateway.conversation import TOOL, Shape
from uniagent.engine.gateway.encoder import marks_for
from uniagent.engine.gateway.glue import Ends, after, stub

Chat = list[dict[str, Any]]
IDS = ("abcd00001", "abcd00002")


@frozen
class TemplateStrategy:
    """The probe's verdict. ``prompts`` maps the role of the last message to the generation prompt after it; ``stops``
    are the control tokens a model samples to end its turn; ``answers`` one line a question."""

    kind: str
    why: str
    shape: Shape = field(factory=Shape)
    ends: Ends = field(factory=Ends)
    stops: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(factory=dict)
    answers: Mapping[str, str] = field(factory=dict)


def common(a: str, b: str) -> int:
    """Length of the common prefix."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(text: str, n: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": IDS[n], "name": "look_up"}


def probe(template: ChatTemplate, controls: re.Pattern[str]) -> TemplateStrategy:
    """The verdict on a template; ``controls`` matches the control tokens it may write."""
    return _Probe(template, controls).verdict()


class _Probe:
    def __init__(self, template: ChatTemplate, controls: re.Pattern[str]) -> None:
        self.template, self.controls = template, controls
        self.marks = marks_for([])
        self.shape = Shape()

    def text(self, messages: Sequence[Mapping[str, Any]], tools: bool = False, generate: bool = False) -> str | None:
        try:
            return self.template.render(messages, (TOOL,) if tools else (), generate)
        except RenderError:
            return None

    def prints(self, messages: Sequence[Mapping[str, Any]], *texts: str, tools: bool = False) -> bool:
        """Whether it renders and prints the texts in this order."""
        rendered, at = self.text(messages, tools), 0
        for wanted in texts:
            at = rendered.find(wanted, at) + 1 if rendered else 0
            if at == 0:
                return False
        return True

    def calls(self, key: str, more: Mapping[str, Any] | None = None, ids: Sequence[str] = IDS[:1]) -> dict[str, Any]:
        value: Any = '{"key": "' + key + '"}' if self.shape.arguments == "text" else {"key": key}
        made = [{"id": i, "type": "function", "function": {"name": "look_up", "arguments": value}} for i in ids]
        return said("", tool_calls=made, **(more or {}))

    # -- what it accepts

    def find_shape(self) -> Shape:
        asked = user("Ask1")
        if not self.prints([asked, self.calls("Val1"), result("Res1")], "Ask1", "Val1", "Res1") or "{'key'" in (
            self.text([asked, self.calls("Val1")]) or ""
        ):
            self.shape = evolve(self.shape, arguments="text")
        s = self.shape
        one = [asked, self.calls("Val1"), result("Res1")]
        two = [asked, self.calls("Val1", ids=IDS), result("Res1"), result("Res2", 1)]
        tools = self.prints(one, "Val1", "Res1", tools=True)
        reasoning = next((k for k in ("reasoning_content", "reasoning", "thinking") if self._keeps(k)), "")
        return evolve(
            s,
            arguments=s.arguments if tools else "object",
            reasoning=reasoning,
            system=self.prints([{"role": "system", "content": "Sys1"}, asked], "Sys1", "Ask1"),
            late_system=self.prints(
                [asked, said("Say1"), {"role": "system", "content": "Sys2"}, user("Ask2")], "Say1", "Sys2", "Ask2"
            ),
            alternate=not self.prints([asked, user("Ask2")], "Ask1", "Ask2"),
            after_tool=not tools or self.prints([*one, user("Ask2")], "Res1", "Ask2", tools=True),
            parallel=self.prints(two, "Val1", "Val1", "Res1", "Res2", tools=True),
            tools=tools,
            call_ids=self._call_ids(),
        )

    def _keeps(self, key: str) -> bool:
        return self.prints([user("Ask1"), said("Say1", **{key: "Why1"})], "Why1", "Say1") or self.prints(
            [user("Ask1"), self.calls("Val1", {key: "Why1"}), result("Res1")], "Why1", "Val1", tools=True
        )

    def _call_ids(self) -> str:
        other = ("call_0123456789ab",)
        asked, answer = user("Ask1"), {**result("Res1"), "tool_call_id": other[0]}
        nine = self.text([asked, self.calls("Val1"), result("Res1")])
        if nine is not None and self.text([asked, self.calls("Val1", ids=other), answer]) is None:
            return "nine"
        alone = self.text([asked, self.calls("Val1")]) or ""
        return "functions" if IDS[0] in alone and "look_up" not in alone else "call"

    # -- where turns end

    def markers(self, text: str | None, until: str = "") -> list[str]:
        """Control tokens after the anchor mark, up to ``until``."""
        if text is None or self.marks.anchor not in text:
            return []
        tail = text[text.rindex(self.marks.anchor) + 1 :]
        if until and until in tail:
            tail = tail[: tail.index(until)]
        return [m[0] for m in self.controls.finditer(tail)]

    def find_ends(self) -> tuple[Ends, tuple[str, ...]]:
        mark, asked = self.marks.anchor, user("Ask1")
        last = self.markers(self.text([asked, said(mark)]))[:1]
        history = self.markers(self.text([asked, said(mark), user("Ask2")]), "Ask2")[:1]
        before = (self.text([asked]) or "").partition("Ask1")[0]
        if not last and history and history[0] in before:
            openers = [history[0]]
            if self.shape.tools:
                done = self.text([asked, self.calls(mark)], tools=True) or ""
                then = self.text([asked, self.calls(mark), result("Res1")], tools=True) or ""
                more = then[common(done, then) :].partition("Res1")[0]
                openers += [m[0] for m in self.controls.finditer(more)][:1]
            ends = Ends(openers=tuple(dict.fromkeys(openers)))
            return ends, ends.openers
        stops = [*last]
        if self.shape.tools:
            stops += self.markers(self.text([asked, self.calls(mark)], tools=True))[-1:]
        closers = tuple(dict.fromkeys([*history, *stops]))
        return Ends(closers=closers), tuple(dict.fromkeys(stops or history))

    def prompts(self) -> dict[str, str]:
        out = {}
        chats: dict[str, Chat] = {"user": [user("Ask1")]}
        if self.shape.tools:
            chats["tool"] = [user("Ask1"), self.calls("Val1"), result("Res1")]
        for role, chat in chats.items():
            bare, full = self.text(chat, role == "tool"), self.text(chat, role == "tool", generate=True)
            out[role] = full[len(bare) :] if bare is not None and full is not None and full.startswith(bare) else ""
        return out

    # -- whether glue stays as it was

    def scenarios(self) -> dict[str, list[tuple[Chat, dict[str, Any]]]]:
        """Conversations as turns: what comes in, and what the assistant then says."""
        mark, why = self.marks.anchor, {self.shape.reasoning: "Why"} if self.shape.reasoning else {}
        system: Chat = [{"role": "system", "content": "Sys1"}] if self.shape.system else []
        plain, thought = said(mark), said(mark, **why)
        out = {
            "next user message": [([*system, user("Ask1")], plain), ([user("Ask2")], thought), ([user("Ask3")], plain)],
        }
        if not self.shape.tools:
            return out
        call, thoughtful = self.calls(mark), self.calls(mark, why)
        once: Chat = [result("Res1")]
        out["tool results"] = [([*system, user("Ask1")], call), (once, thoughtful), (once, call), (once, plain)]
        out["user message after tools"] = [
            ([*system, user("Ask1")], thoughtful), (once, thought), ([user("Ask2")], call), (once, plain)
        ]  # fmt: skip
        if self.shape.parallel:
            both: Chat = [result("Res1"), result("Res2", 1)]
            out["parallel results"] = [([user("Ask1")], self.calls(mark, ids=IDS)), (both, call), (once, plain)]
        return out

    def unstable(self, turns: Sequence[tuple[Chat, dict[str, Any]]], ends: Ends) -> str | None:
        """Where the glue of a conversation, taken turn by turn, is not what the whole conversation has: a sentence."""
        tools = any(m["role"] == "tool" for chat, _ in turns for m in chat)
        seen: list[str] = []  # the glue of each turn, up to its generation prompt
        chat: Chat = []
        for n, (new, answer) in enumerate(turns):
            full = self.template.render([*chat, *new], (TOOL,) if tools else (), True)
            bare = self.template.render([*chat, *new], (TOOL,) if tools else (), False)
            prompt = len(full) - len(bare) if full.startswith(bare) else 0
            pieces = self.pieces(full, ends)
            if len(pieces) != n + 1:
                return f"turn {n + 1} of the rendered conversation cannot be found"
            for i, (was, now) in enumerate(zip(seen, pieces, strict=False)):
                if not now.startswith(was):
                    return f"what stands before turn {i + 1} changes when turn {n + 1} comes"
            if n:
                calls = [{"id": c["id"], "name": "look_up"} for c in turns[n - 1][1].get("tool_calls", ())]
                calls = calls if new[0]["role"] == "tool" else []
                head = stub(calls, self.marks.anchor, self.shape)
                alone = after(self.template, head, new, marks=self.marks, ends=ends, tools=tools)
                if alone.text != pieces[-1]:
                    return f"what stands before turn {n + 1} depends on more than the messages in it"
            seen.append(pieces[-1][: len(pieces[-1]) - prompt])
            chat += [*new, answer]
        return None

    def pieces(self, text: str, ends: Ends) -> list[str]:
        """The text cut at the ends of turns: what precedes each assistant turn (its opening words included)."""
        out, at = [], 0
        for m in self.marks.anchors.finditer(text):
            if m.start() < at:
                continue  # another call of the same turn
            out.append(text[at : m.start()])
            found = ends.first(text, m.end())
            if found is None:
                return []
            at = found[0] + (len(found[1]) if found[1] in ends.closers else 0)
        return [*out, text[at:]]

    def verdict(self) -> TemplateStrategy:
        try:
            self.template.render([user("Ask1")])
        except RenderError as problem:
            return TemplateStrategy("refuse", f"it does not render one user message: {problem}")
        self.shape = self.find_shape()
        ends, stops = self.find_ends()
        if not (ends.closers or ends.openers):
            return TemplateStrategy("refuse", "it writes no control token between an answer and the next turn")
        found: dict[str, str] = {}
        for name, turns in self.scenarios().items():
            try:
                trouble = self.unstable(turns, ends)
            except RenderError as problem:
                trouble = f"it refuses: {problem}"
            if trouble:
                found[name] = trouble
        kind = "re-render" if found else "append"
        why = "; ".join(f"{name}: {trouble}" for name, trouble in found.items())
        return TemplateStrategy(
            kind, why or "glue between turns never changes", self.shape, ends, stops, self.prompts()
        )
