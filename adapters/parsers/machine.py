"""Model text to reasoning, text and calls, incrementally, for any family that a ``Format`` describes.

Text and reasoning flow as they come, save what may still turn out to be (white space before) a marker. A call is held
until it is whole: a client never gets a call that the model did not finish. Whether a stretch is a call depends on the
text alone, never on how it was cut: a marker that closes it counts when what it encloses can be read, so markers inside
arguments are text.

What cannot be read is never lost silently: a closed call with a readable name is delivered with its raw arguments, one
without a name as text, one that the end of the answer cut off not at all; the ``problem`` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from uniagent.engine.messages import Delta
from uniagent.engine.ports import Json, Parsed, ParsedCall

Tools = Mapping[str, Mapping[str, Json]]  # tool name -> its parameters' JSON schema
CUT = "the answer ended inside a tool call"


class Malformed(ValueError):
    """A region that holds no readable call. ``name`` and ``arguments`` are what could be read of it."""

    def __init__(self, why: str, name: str | None = None, arguments: str = "") -> None:
        super().__init__(why)
        self.name, self.arguments = name, arguments


@frozen
class Region:
    """Where calls stand: from ``open`` to the first ``close`` that makes it readable. ``read`` takes what they enclose
    and raises Malformed. ``close`` may be empty: then the region ends with the answer. ``starts``: the opener counts
    only at the beginning of the answer's text."""

    open: str
    close: str
    read: Callable[[str, Tools], Sequence[ParsedCall]]
    starts: bool = False


@frozen
class Format:
    """How a family writes: reasoning between two markers, calls in regions; ``noise`` are markers to leave out."""

    regions: tuple[Region, ...]
    think: tuple[str, str] | None = None
    noise: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        ends = [m for r in self.regions for m in (r.open, r.close)]
        return tuple(dict.fromkeys(m for m in [*(self.think or ()), *ends, *self.noise] if m))


class MarkerParser:
    """The parser of one generation. ``prefix`` is the generation prompt: reasoning is open when it opened it."""

    def __init__(self, format: Format, prefix: str = "", tools: Sequence[Mapping[str, Json]] = ()) -> None:
        self._format = format
        self._tools: Tools = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}
        self._think = format.think
        self._thinking = bool(self._think and prefix.rfind(self._think[0]) > prefix.rfind(self._think[1]))
        self._trim = self._thinking  # white space at the beginning of a stretch goes
        self._buffer = ""
        self._region: Region | None = None
        self._scanned = 0  # of the buffer, already searched for the region's close
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ParsedCall] = []
        self._problem: str | None = None
        self._space = ""  # white space that may belong to a marker

    def feed(self, text: str) -> Sequence[Delta]:
        out: list[Delta] = []
        self._buffer += text
        while self._step(out):
            pass
        return out

    def finish(self) -> tuple[Sequence[Delta], Parsed]:
        out: list[Delta] = []
        while self._region or self._buffer:
            self._close_or_give_up(out)
        if self._space and not self._thinking:
            self._say(self._space, out, keep=True)
        return out, Parsed("".join(self._text), "".join(self._reasoning), tuple(self._calls), self._problem)

    # -- one step: True when it got anywhere

    def _step(self, out: list[Delta], final: bool = False) -> bool:
        if self._region:
            return self._try_close(out)
        markers = self._expected()
        at, found = _earliest(self._buffer, markers)
        if found is None:
            keep = 0 if final else max((_overlap(self._buffer, m) for m in markers), default=0)
            self._say(self._buffer[: len(self._buffer) - keep], out)
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._say(self._buffer[:at], out)
        self._buffer = self._buffer[at:]
        region = next((r for r in self._format.regions if r.open == found), None)
        if region:
            self._space = ""
            self._region, self._scanned = region, len(region.open)
        else:
            self._buffer = self._buffer[len(found) :]
            self._mark(found)
        return True

    def _expected(self) -> list[str]:
        fresh = not (self._text or self._calls)
        regions = [r.open for r in self._format.regions if fresh or not r.starts]
        return [*(self._think or ()), *regions, *self._format.noise]

    def _mark(self, marker: str) -> None:
        if self._think and marker in self._think:
            self._thinking = marker == self._think[0]
            self._space, self._trim = "", True

    def _try_close(self, out: list[Delta]) -> bool:
        """Close the open region at the next marker that makes it readable."""
        region = self._region
        assert region is not None
        if self._thinking and self._think:  # a call inside reasoning is reasoning, unless reasoning never ends
            at = self._buffer.find(self._think[1])
            if at >= 0:
                self._region = None
                self._say(self._buffer[:at], out)
                self._buffer = self._buffer[at:]
            return at >= 0
        while region.close:
            at = self._buffer.find(region.close, max(self._scanned - len(region.close) + 1, len(region.open)))
            if at < 0:
                self._scanned = len(self._buffer)
                return False
            self._scanned = at + len(region.close)
            try:
                calls = region.read(self._buffer[len(region.open) : at], self._tools)
            except Malformed:
                continue
            self._emit(calls, self._scanned, out)
            return True
        return False

    def _emit(self, calls: Sequence[ParsedCall], end: int, out: list[Delta]) -> None:
        for call in calls:
            out.append(
                Delta(call_index=len(self._calls), call_id=call.id, call_name=call.name, arguments=call.arguments)
            )
            self._calls.append(call)
            self._problem = self._problem or call.problem
        self._buffer = self._buffer[end:]
        self._region, self._trim = None, True

    def _close_or_give_up(self, out: list[Delta]) -> None:
        """At the end of the answer: settle the open region, or say what is left."""
        region = self._region
        if region is None:
            self._step(out, final=True)
            return
        self._thinking, was_thinking = False, self._thinking
        at = self._buffer.find(region.close, len(region.open)) if region.close else len(self._buffer)
        body = self._buffer[len(region.open) : at if at >= 0 else len(self._buffer)]
        end = at + len(region.close)
        try:
            calls = region.read(body, self._tools) if at >= 0 else None
        except Malformed as problem:
            if was_thinking:
                calls = None
            elif problem.name is not None and region.close:
                self._emit([ParsedCall(problem.name, problem.arguments, str(problem))], end, out)
                return
            else:
                self._problem = self._problem or str(problem)
                self._region, self._trim = None, False
                self._say(self._buffer[:end], out)
                self._buffer = self._buffer[end:]
                return
        if calls is not None:
            self._emit(calls, end, out)
            return
        if was_thinking:
            self._thinking, self._region = True, None
            self._say(self._buffer, out)
        else:
            self._problem = self._problem or CUT
            self._region = None
        self._buffer = ""

    def _say(self, text: str, out: list[Delta], keep: bool = False) -> None:
        """Text or reasoning, without white space next to markers."""
        if self._trim:
            text = text.lstrip("\n")
            if not text:
                return
            self._trim = False
        if not keep:
            text = self._space + text
            bare = text.rstrip()
            self._space, text = text[len(bare) :], bare
        if text:
            (self._reasoning if self._thinking else self._text).append(text)
            out.append(Delta(reasoning=text) if self._thinking else Delta(text=text))


def _earliest(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """The first marker in the text, the longest where several begin together."""
    found = [(at, -len(m), m) for m in markers if (at := text.find(m)) >= 0]
    if not found:
        return -1, None
    at, _, marker = min(found)
    return at, marker


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of text that begins the marker."""
    for n in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:n]):
            return n
    return 0
