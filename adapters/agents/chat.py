"""Messages between their chat form (what tasks and transcripts hold) and the common form that models are asked in."""

from __future__ import annotations

from uniagent.adapters.dialects.chat import Chat
from uniagent.engine.errors import UserError
from uniagent.engine.messages import Message, Problem
from uniagent.engine.ports import Json, Messages


def from_chat(messages: Messages) -> tuple[Message, ...]:
    """Raises UserError for what is no chat message."""
    try:
        return Chat().parse({"messages": [dict(m) for m in messages]}).messages
    except Problem as problem:
        raise UserError(f"the prompt is no list of chat messages: {problem.message}") from problem


def as_chat(message: Message) -> dict[str, Json]:
    """One message in chat form; arguments as they were sampled."""
    chat: dict[str, Json] = {"role": message.role, "content": message.text}
    if message.reasoning:
        chat["reasoning_content"] = message.reasoning
    if message.calls:
        chat["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.calls
        ]
    if message.answers is not None:
        chat["tool_call_id"] = message.answers
    return chat
