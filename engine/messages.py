"""The common form of what harnesses say and what the model answers, whatever the wire dialect.

``ModelCall`` is one request, ``Reply`` one answer as it is sent. Pure values: no sockets, no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

if TYPE_CHECKING:
    from uniagent.engine.ports import Json


@frozen
class Call:
    """A tool call. ``arguments`` is the raw text as sampled, or the object a client made of it."""

    id: str | None
    name: str
    arguments: Any

    @property
    def value(self) -> dict[str, Any] | None:
        """The arguments as an object; None when they are not one."""
        try:
            value = json.loads(self.arguments or "{}") if isinstance(self.arguments, str) else self.arguments
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


@frozen
class Message:
    """One tree message: role is system | user | assistant | tool; a tool message answers one call, by id."""

    role: str
    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    answers: str | None = None


@frozen
class ModelCall:
    """One request in common form.

    ``tools`` are in chat-completions form (``{"type": "function", "function": {...}}``). The sampling fields are
    what the harness asked for; in training only a lower ``max_tokens`` counts. ``raw`` is the body as it came.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Json], ...] = ()
    dialect: str = "chat"
    stream: bool = False
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    tool_choice: str = "auto"  # auto | none | required | the name of a tool
    parallel: bool = True  # several calls in one answer are allowed
    json_by: str | None = None  # the key by which the client demands JSON of a certain form; None: it does not
    asked: Mapping[str, Json] = field(factory=dict)  # temperature, top_p, top_k, seed, response_format, ...
    model: str = ""
    raw: Json = field(default=None, repr=False, eq=False)

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(t["function"]["name"] for t in self.tools)


@frozen
class Usage:
    """True token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@frozen
class Reply:
    """One answer as it is sent. ``finish`` is stop | length | tool_calls; ``problem`` the parse problem, if any;
    ``stop`` the stop string that ended it, if one did."""

    id: str
    text: str
    reasoning: str
    calls: tuple[Call, ...]
    finish: str
    usage: Usage
    problem: str | None = None
    stop: str | None = None

    def message(self) -> Message:
        return Message("assistant", self.text, self.calls, self.reasoning)


@frozen
class Delta:
    """A piece of a streamed answer: exactly one of the fields text, reasoning or call is set. A call's first delta
    has its id and name; later ones only more of its arguments. ``choice`` counts the siblings of n > 1."""

    text: str = ""
    reasoning: str = ""
    call_index: int | None = None
    call_id: str | None = None
    call_name: str | None = None
    arguments: str = ""
    choice: int = 0


class Problem(Exception):
    """A request that cannot be honoured: HTTP status, a stable kind, and a sentence that says what to change."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message
