"""What messages a chat template accepts and what it does to them: questions put to it as small renders.

Knows texts only. A question that the template refuses to render is answered "no".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from uniagent.engine.gateway.chat_template import ChatTemplate, RenderError
from uniagent.engine.gateway.conversation import TOOL, Shape

Chat = list[dict[str, Any]]
IDS = ("abcd00001", "abcd00002")  # nine letters and digits: accepted everywhere


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(text: str, n: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": IDS[n], "name": "look_up"}


class Questions:
    """A template under questioning; ``shape`` is what is known so far and decides how calls are written."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.shape = Shape()
        self.shape = self._shape()

    def text(self, messages: Sequence[Mapping[str, Any]], tools: bool = False, generate: bool = False) -> str | None:
        """The render; None where the template refuses."""
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

    def calls(
        self, key: str, more: Mapping[str, Any] | None = None, ids: Sequence[str] = IDS[:1], name: str = "look_up"
    ) -> dict[str, Any]:
        value: Any = '{"key": "' + key + '"}' if self.shape.arguments == "text" else {"key": key}
        made = [{"id": i, "type": "function", "function": {"name": name, "arguments": value}} for i in ids]
        return said("", tool_calls=made, **(more or {}))

    def _shape(self) -> Shape:
        asked = user("Ask1")
        if "{'key'" in (self.text([asked, self.calls("Val1")]) or "{'key'") or not self.prints(
            [asked, self.calls("Val1"), result("Res1")], "Val1"
        ):
            self.shape = evolve(self.shape, arguments="text")
            if not self.prints([asked, self.calls("Val1"), result("Res1")], "Val1"):
                self.shape = Shape()
        one = [asked, self.calls("Val1"), result("Res1")]
        two = [asked, self.calls("Val1", ids=IDS), result("Res1"), result("Res2", 1)]
        tools = self.prints(one, "Ask1", "Res1", tools=True)
        calls = self.prints(one, "Ask1", "Val1", "Res1", tools=True)
        late = [asked, said("Say1"), system("Sys2"), user("Ask2")]
        return evolve(
            self.shape,
            reasoning=next((k for k in ("reasoning_content", "reasoning", "thinking") if self._keeps(k)), ""),
            system=self.prints([system("Sys1"), asked], "Sys1", "Ask1"),
            late_system=self.prints(late, "Say1", "Sys2", "Ask2"),
            alternate=not self.prints([asked, user("Ask2")], "Ask1", "Ask2"),
            after_tool=not tools or self.prints([*one, user("Ask2")], "Res1", "Ask2", tools=True),
            parallel=self.prints(two, *(["Val1", "Val1"] if calls else []), "Res1", "Res2", tools=True),
            tools=tools,
            calls=calls,
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

    def answers(self) -> dict[str, str]:
        """The table of ``uniagent template``: one line a question."""
        s, asked = self.shape, user("Ask1")
        one: Chat = [asked, self.calls("Val1"), result("Res1")]
        why = {s.reasoning: "Why1"} if s.reasoning else {}
        default = self.text([asked]) or ""
        return {
            "prints a first system message": _yes(s.system),
            "keeps a later system message in place": _yes(s.late_system),
            "writes a system text of its own": _yes("system" in default.partition("Ask1")[0].lower()),
            "accepts consecutive user messages": _yes(not s.alternate),
            "prints tool schemas": _yes(self.prints([asked], "look_up", tools=True)),
            "prints tool results": _yes(s.tools),
            "prints calls": _yes(s.calls),
            "several calls in one turn": _yes(s.parallel),
            "groups tool results": _yes(s.parallel and self._groups()),
            "user message right after a tool result": _yes(s.after_tool),
            "call arguments as": s.arguments,
            "call ids": s.call_ids,
            "prints call ids": _yes(IDS[0] in (self.text(one) or "")),
            "reads reasoning from": s.reasoning or "nowhere",
            "keeps reasoning of the same task": _yes(
                self.prints([asked, self.calls("Val1", why), result("Res1")], "Why1", tools=True)
            ),
            "keeps reasoning of earlier answers": _yes(
                self.prints([asked, said("Say1", **why), user("Ask2")], "Why1", "Say1")
            ),
            "trims user text": _yes(not self.prints([user("  Pad \n")], "  Pad \n")),
            "trims tool text": _yes(s.tools and not self.prints([*one[:2], result("  Pad \n")], "  Pad \n")),
            "prints the date (frozen)": _yes("strftime_now" in self.template.source),
        }

    def _groups(self) -> bool:
        """Whether two results stand in one turn: the second is not written where the first one ended."""
        two: Chat = [user("Ask1"), self.calls("Val1", ids=IDS), result("Res1"), result("Res2", 1)]
        first, both = self.text(two[:3], tools=True), self.text(two, tools=True)
        return first is not None and both is not None and not both.startswith(first)


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
