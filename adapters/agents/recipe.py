"""What there is to know about an external harness, as data: how it is started, pointed at the gateway and read.

Commands, environment, files and stdin may hold the placeholders below; any other braces stay as they are. Knows no
particular harness.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import frozen

from uniagent.engine.config import key
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Messages

PLACEHOLDERS = {
    "base_url": "the session's endpoint, without /v1 (Anthropic clients add it)",
    "openai_base_url": "the same with /v1 (what OpenAI clients want)",
    "api_key": "the session's key",
    "model": "name of the model",
    "prompt": "the task's messages as one text",
    "prompt_file": "a file with that text",
    "home": "the run's own home directory",
    "workdir": "the sandbox's working directory",
    "programs": "folder of this harness's programs",
}
_PLACEHOLDER = re.compile("{(" + "|".join(PLACEHOLDERS) + ")}")


@frozen
class Recipe:
    """Keys of ``agent.options``. A named harness has them filled in, and what a task sets is laid on top: tables key
    by key, everything else replaced."""

    command: tuple[str, ...] = key((), "argv; a program without a slash is looked up in {programs}/bin, then in PATH")
    args: tuple[str, ...] = key((), "more arguments, put after the command's")
    stdin: str = key("", "text on its standard input")
    env: Mapping[str, str] = key(dict, "environment variables")
    files: Mapping[str, str] = key(dict, "written before it starts: path below its home -> text")
    programs: str = key("", "folder on this machine with its programs, which local sandboxes then see read-only")
    install: str = key("", "shell that installs it in the sandbox, run where the program is not there")
    ok: tuple[int, ...] = key((0,), "exit codes that mean it ended by its own decision")
    transcript: str = key("text", "how its output is read: a format's name, or module:attribute")
    transcript_file: str = key("", "file below its home that is read in place of its output")


def fill(text: str, values: Mapping[str, str]) -> str:
    """``text`` with every ``{name}`` of ``values`` replaced."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]], text)


def prompt_text(messages: Messages) -> str:
    """A task's messages as the one text that a command line takes: system and user texts, in order, as paragraphs.
    Raises UserError for what is no text and for messages of an assistant."""
    texts = []
    for message in messages:
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or any(p.get("type") != "text" for p in parts):
            raise UserError("an external harness takes a prompt of text alone: leave out images and other parts")
        if (role := message.get("role")) not in ("system", "developer", "user"):
            raise UserError(f"an external harness begins a conversation of its own: a {role!r} message cannot be in it")
        texts.append("".join(p["text"] for p in parts))
    return "\n\n".join(texts)
