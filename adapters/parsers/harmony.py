"""gpt-oss: messages with headers (channel, recipient) instead of markers around calls.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}

The generation prompt ends in ``<|start|>assistant``, so an answer begins inside a header. Analysis is reasoning, final
and commentary are text; a message to ``functions.NAME`` is a call, which is whole when its JSON is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from uniagent.adapters.parsers.machine import CUT
from uniagent.engine.messages import Delta
from uniagent.engine.ports import CONTROL_MARK, Json, Parsed, ParsedCall

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


class HarmonyParser:
    """The parser of one generation; see MarkerParser for the arguments."""

    def __init__(self, prefix: str = "", tools: Sequence[Mapping[str, Json]] = (), control: Sequence[str] = ()) -> None:
        self._control = frozenset(control)
        self._ends = [self._marked(m) for m in _ENDS]
        self._message = self._marked("<|message|>")
        self._buffer = ""
        self._header: str | None = None  # of the message whose body is being read; None: in a header
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ParsedCall] = []
        self._problem: str | None = None

    def _marked(self, marker: str) -> str:
        return CONTROL_MARK + marker if marker in self._control else marker

    def feed(self, text: str) -> Sequence[Delta]:
        self._buffer += text
        out: list[Delta] = []
        while self._step(out):
            pass
        return out

    def finish(self) -> tuple[Sequence[Delta], Parsed]:
        out: list[Delta] = []
        if self._header is not None:
            self._body(self._buffer, out, last=True)
        elif self._buffer.strip() and (self._text or self._reasoning or self._calls or "<|" in self._buffer):
            self._problem = self._problem or "the answer ended inside a message header"
        elif self._buffer.strip():
            self._say(self._buffer, out)
        return out, Parsed("".join(self._text), "".join(self._reasoning), tuple(self._calls), self._problem)

    def _step(self, out: list[Delta]) -> bool:
        if self._header is None:
            at = self._buffer.find(self._message)
            if at < 0:
                return False
            # a header that was never followed by a message is skipped: the last start counts
            self._header = self._buffer[:at].rsplit(self._marked("<|start|>"), 1)[-1].replace(CONTROL_MARK, "")
            self._buffer = self._buffer[at + len(self._message) :]
            return True
        found = [(at, len(m)) for m in self._ends if (at := self._buffer.find(m)) >= 0]
        if found and self._recipient is not None and not self._control and not _is_json(self._buffer[: min(found)[0]]):
            later = [(m.start(), len(m[0])) for m in re.finditer("|".join(map(re.escape, self._ends)), self._buffer)]
            found = [(at, n) for at, n in later if _is_json(self._buffer[:at])][:1]
        if found:
            at, length = min(found)
            self._body(self._buffer[:at], out, last=False)
            self._buffer = self._buffer[at + length :]
            self._header = None
            return True
        if " to=" not in self._header:
            keep = max((_overlap(self._buffer, m) for m in self._ends), default=0)
            said, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
            self._say(said, out)
        return False

    @property
    def _recipient(self) -> str | None:
        found = re.search(r"to=functions\.([^\s<]+)", self._header or "")
        return found[1] if found else None

    def _body(self, text: str, out: list[Delta], *, last: bool) -> None:
        name = self._recipient
        if name is None:
            if " to=" in (self._header or ""):
                self._problem = self._problem or f"a message to no function: {(self._header or '').strip()}"
            else:
                self._say(text, out)
            return
        arguments = text.replace(CONTROL_MARK, "").strip()
        problem = None if _is_json(arguments) else "the arguments are no JSON object"
        if problem and last:  # cut off: no call
            self._problem = self._problem or CUT
            return
        self._problem = self._problem or problem
        out.append(Delta(call_index=len(self._calls), call_name=name, arguments=arguments))
        self._calls.append(ParsedCall(name, arguments, problem))

    def _say(self, text: str, out: list[Delta]) -> None:
        text = text.replace(CONTROL_MARK, "")
        if not text:
            return
        thinking = "analysis" in (self._header or "")
        (self._reasoning if thinking else self._text).append(text)
        out.append(Delta(reasoning=text) if thinking else Delta(text=text))


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text.replace(CONTROL_MARK, "")), dict)
    except ValueError:
        return False


def _overlap(text: str, marker: str) -> int:
    for n in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:n]):
            return n
    return 0
