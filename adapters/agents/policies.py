"""What a white-box agent does when things go wrong: one named policy a kind of trouble, each selectable and counted.

Pure: decides, does not act.
"""

from __future__ import annotations

from collections import Counter

from attrs import define, field, frozen

from uniagent.engine.config import key
from uniagent.engine.messages import Call


@frozen
class Policies:
    """``end`` stops the episode (unfinished, except for no_tool_call); ``observe`` tells the model and goes on."""

    no_tool_call: str = key(
        "end", "an answer without a call: end (it is done) or nudge (ask for a call)", choices=("end", "nudge")
    )
    malformed_call: str = key(
        "observe", "a call that cannot be read or does not fit the tool's schema", choices=("observe", "end")
    )
    unknown_tool: str = key("observe", "a call of a tool that there is not", choices=("observe", "end"))
    timeout: str = key("observe", "a tool that ran into its time limit", choices=("observe", "end"))
    length_limit: str = key(
        "end", "an answer cut off at max_tokens: end, or continue with what there is", choices=("end", "continue")
    )
    repeated_call: str = key(
        "allow", "the same call twice in a row: allow, observe (it is not run again) or end",
        choices=("allow", "observe", "end"),
    )  # fmt: skip


@define
class Troubles:
    """How often each kind came up in one episode, and what the policies say to do about it."""

    policies: Policies
    counts: Counter[str] = field(factory=Counter)
    last_call: tuple[str, object] | None = None

    def met(self, kind: str) -> str:
        """Count it, and give its policy; a kind without one (``tool_error``) is observed."""
        self.counts[kind] += 1
        return getattr(self.policies, kind, "observe")

    def repeated(self, call: Call) -> bool:
        """Whether this is the call before it once more."""
        same = call.name, call.value if call.value is not None else call.arguments
        before, self.last_call = self.last_call, same
        return same == before
