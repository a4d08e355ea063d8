"""What of the conversation a white-box agent shows the model: all of it, old tool results trimmed, or a summary.

A view is made from the whole history, which is kept as it happened. Every change of an earlier message starts a new
branch of the trajectory, so views change seldom and in blocks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from attrs import define, evolve, field, frozen

from uniagent.engine.config import key
from uniagent.engine.errors import UserError
from uniagent.engine.messages import Message, Usage

LEFT_OUT = "(old result left out)"
SUMMARISE = (
    "The conversation is getting long. Write a summary for yourself that lets you go on without the rest: what was "
    "asked, what was done and found, what is left to do. Call no tool."
)
GO_ON = "Summary of the work so far:\n{}\n\nGo on from here."

Ask = Callable[[Sequence[Message]], Awaitable[str]]


@frozen
class ContextOptions:
    """Keys of ``agent.options.context``."""

    kind: str = key("all", "all, trim (old tool results) or summarise", choices=("all", "trim", "summarise"))
    keep: int = key(8, "trim: the newest tool results that stay; cut back to these once there are twice as many",
                    at_least=1)  # fmt: skip
    tokens: int = key(0, "summarise: when a request and its answer are longer than this", at_least=0)


class Context(Protocol):
    """One episode's view. ``ask`` makes a request of its own, outside the conversation."""

    async def view(self, history: Sequence[Message], usage: Usage | None, ask: Ask) -> Sequence[Message]: ...


class All:
    """Everything."""

    async def view(self, history: Sequence[Message], usage: Usage | None, ask: Ask) -> Sequence[Message]:
        return history


@define
class Trim:
    """Old tool results are replaced by a note."""

    keep: int
    _cut: int = 0  # tool results left out so far, from the oldest

    async def view(self, history: Sequence[Message], usage: Usage | None, ask: Ask) -> Sequence[Message]:
        results = [i for i, m in enumerate(history) if m.role == "tool"]
        if len(results) - self._cut >= 2 * self.keep:
            self._cut = len(results) - self.keep
        old = frozenset(results[: self._cut])
        return [evolve(m, text=LEFT_OUT) if i in old else m for i, m in enumerate(history)]


@define
class Summarise:
    """The start of the conversation, a summary, and what came after it."""

    tokens: int
    _start: int = 0  # the first message after the summary
    _summary: Message | None = None
    _opening: list[Message] = field(factory=list)

    async def view(self, history: Sequence[Message], usage: Usage | None, ask: Ask) -> Sequence[Message]:
        shown = self._shown(history)
        if usage is None or usage.prompt_tokens + usage.completion_tokens <= self.tokens:
            return shown
        summary = await ask([*shown, Message("user", SUMMARISE)])
        self._opening = self._opening or _opening(history)
        self._summary, self._start = Message("user", GO_ON.format(summary)), len(history)
        return self._shown(history)

    def _shown(self, history: Sequence[Message]) -> Sequence[Message]:
        if self._summary is None:
            return history
        return [*self._opening, self._summary, *history[self._start :]]


def _opening(history: Sequence[Message]) -> list[Message]:
    """The messages before the first answer: system and task."""
    answered = next((i for i, m in enumerate(history) if m.role == "assistant"), len(history))
    return list(history[:answered])


def make_context(options: ContextOptions) -> Context:
    """Raises UserError for summarise without a length."""
    if options.kind == "summarise" and not options.tokens:
        raise UserError("agent react: context.kind = 'summarise' needs context.tokens, the length it summarises at")
    contexts: dict[str, Context] = {"all": All(), "trim": Trim(options.keep), "summarise": Summarise(options.tokens)}
    return contexts[options.kind]
