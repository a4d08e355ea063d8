"""Model text to reasoning, text and calls, incrementally, for any family that a ``Format`` describes.

Text and reasoning flow as they come, save what may still turn out to be a marker, or white space before one. A call is
held until it is whole: a client never gets a call that the model did not finish. Whether a stretch is a call depends on
the text alone, never on how it was cut: a marker that closes it counts when what it encloses can be read, so markers
inside arguments are text. Markers that are control tokens of the vocabulary count only when the model sampled them as
such.

What cannot be read is never lost silently: a closed call with a readable name is delivered with its raw arguments, one
without a name as text, one that the end of the answer cut off not at all; the ``problem`` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from uniagent.engine.messages import Delta
from uniagent.engine.ports import CONTROL_MARK, Json, Parsed, ParsedCall

Tools = Mapping[str, Mapping[str, Json]]  # tool name -> its parameters' JSON schema
CUT = "the answer ended inside a tool call"
NO_CALL = "text where a tool call was expected"


class Malformed(ValueError):
    """A region that holds no readable call. ``name`` and ``arguments`` are what could be read of it."""

    def __init__(self, why: str, name: str | None = None, arguments: str = "") -> None:
        super().__init__(why)
        self.name, self.arguments = name, arguments


@frozen
class Body:
    """What stands between the markers of a region. ``lenient``: the answer has ended, no better reading will come.
    ``marked`` gives a marker the form it has in ``text``."""

    text: str
    tools: Tools
    marked: Callable[[str], str]
    lenient: bool = False


@frozen
class Region:
    """Where a call stands: from ``open`` to the first of ``closes`` that makes it readable. ``keeps``: the closing text
    is part of the call. ``starts``: so is the opener, which counts only where no text came before it and there are
    tools; what it opens may turn out to be text."""

    open: str
    closes: tuple[str, ...]
    read: Callable[[Body], Sequence[ParsedCall]]
    keeps: bool = False
    starts: bool = False


@frozen
class Format:
    """How a family writes: reasoning between two markers, calls in regions, regions perhaps in a section, outside of
    whose calls there is no text. ``noise`` are markers to leave out, ``speaks`` such that end reasoning as well."""

    regions: tuple[Region, ...]
    thinks: tuple[tuple[str, str], ...] = ()
    sections: tuple[tuple[str, str], ...] = ()
    noise: tuple[str, ...] = ()
    speaks: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        ends = [m for r in self.regions for m in (r.open, *(() if r.keeps else r.closes))]
        pairs = [m for pair in (*self.thinks, *self.sections) for m in pair]
        return tuple(dict.fromkeys([*pairs, *ends, *self.noise, *self.speaks]))


class MarkerParser:
    """The parser of one generation. ``prefix`` is the generation prompt: reasoning is open when it opened it.
    ``control``: the control tokens that the text it is fed has marks before."""

    def __init__(
        self,
        format: Format,
        prefix: str = "",
        tools: Sequence[Mapping[str, Json]] = (),
        control: Sequence[str] = (),
    ) -> None:
        self._control = sorted(control, key=len, reverse=True)
        self._tools: Tools = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}
        marked = self._marked
        self._regions = {
            marked(r.open): _Open(r, len(marked(r.open)) * (not r.starts), [marked(c) for c in r.closes])
            for r in format.regions
            if tools or not r.starts
        }
        self._thinks = {marked(a): marked(b) for a, b in format.thinks}
        self._sections = {marked(a): marked(b) for a, b in format.sections}
        self._noise, self._speaks = [marked(n) for n in format.noise], [marked(n) for n in format.speaks]
        last = max(((prefix.rfind(m), a, m) for a, b in format.thinks for m in (a, b)), default=(-1, "", ""))
        self._think: str | None = marked(dict(format.thinks)[last[1]]) if last[0] >= 0 and last[1] == last[2] else None
        self._trim = last[0] >= 0  # newlines at the beginning of a stretch go
        self._section: str | None = None
        self._region: _Open | None = None
        self._buffer = ""
        self._called = False  # a call was begun
        self._scanned = 0  # of the buffer, already searched for the region's close
        self._space = ""  # white space that belongs to the text only if more text follows
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ParsedCall] = []
        self._problem: str | None = None

    def _marked(self, text: str) -> str:
        for token in self._control:
            text = text.replace(token, CONTROL_MARK + token)
        return text

    def feed(self, text: str) -> Sequence[Delta]:
        out: list[Delta] = []
        self._buffer += text
        while self._step(out):
            pass
        return out

    def finish(self) -> tuple[Sequence[Delta], Parsed]:
        out: list[Delta] = []
        while self._buffer:
            if self._region:
                self._settle(out)
            elif not self._step(out, final=True):
                break
        if self._space and self._think is None and not (self._calls or self._called):
            self._emit_text(self._space, out)
        return out, Parsed("".join(self._text), "".join(self._reasoning), tuple(self._calls), self._problem)

    # -- one step: True when there may be more to do

    def _step(self, out: list[Delta], final: bool = False) -> bool:
        if self._region:
            return self._try_close(out)
        markers = self._expected()
        at, found = _earliest(self._buffer, markers)
        unsure = len(self._buffer) - (0 if final else max((_overlap(self._buffer, m) for m in markers), default=0))
        if found is None or unsure <= at:  # a longer marker may begin there
            self._say(self._buffer[:unsure], out)
            self._buffer = self._buffer[unsure:]
            return False
        if at:  # what may be expected next depends on what was said
            self._say(self._buffer[:at], out)
            self._buffer = self._buffer[at:]
            return True
        if found in self._regions:
            self._region = self._regions[found]
            self._scanned = self._region.start
            self._called |= not self._region.region.starts
            return True
        self._buffer = self._buffer[len(found) :]
        if found == self._think or found in self._speaks:
            self._think, self._space, self._trim = None, "", True
        elif found in self._thinks:
            self._think, self._space, self._trim = self._thinks[found], "", True
        elif found in self._sections:
            self._section = self._sections[found]
        elif found == self._section:
            self._section = None
        return True

    def _expected(self) -> list[str]:
        regions = [m for m, o in self._regions.items() if not o.region.starts or not self._text]
        if self._think is not None:
            return [self._think, *regions, *self._speaks]
        pairs = [*self._thinks, *self._thinks.values(), *self._sections, *self._sections.values()]
        return [*pairs, *regions, *self._noise, *self._speaks]

    def _try_close(self, out: list[Delta]) -> bool:
        """Close the open region at the next marker that makes it readable."""
        opened = self._region
        assert opened is not None
        if self._think is not None:  # a call inside reasoning is reasoning, unless reasoning never ends
            at = self._buffer.find(self._think)
            if at >= 0:
                self._region = None
                self._say(self._buffer[:at], out)
                self._buffer = self._buffer[at:]
            return at >= 0
        while True:
            close = opened.next_close(self._buffer, self._scanned)
            if close is None:
                self._scanned = max(self._scanned, len(self._buffer) - opened.margin)
                return False
            self._scanned = close[0] + 1
            try:
                calls = opened.read(self._buffer, close, self._tools, self._marked)
            except Malformed:
                continue
            self._emit(calls, close[1], out)
            return True

    def _emit(self, calls: Sequence[ParsedCall], end: int, out: list[Delta]) -> None:
        for call in calls:
            index = len(self._calls)
            out.append(Delta(call_index=index, call_id=call.id, call_name=call.name, arguments=call.arguments))
            self._calls.append(call)
            self._problem = self._problem or call.problem
        self._buffer = self._buffer[end:]
        self._region = None

    def _settle(self, out: list[Delta]) -> None:
        """At the end of the answer: what the open region is after all."""
        opened = self._region
        assert opened is not None
        region, close = opened.region, opened.next_close(self._buffer, opened.start)
        thinking, self._think = self._think, None
        why = CUT
        if close is not None:
            try:
                calls = opened.read(self._buffer, close, self._tools, self._marked, lenient=True)
                self._emit(calls, close[1], out)
                return
            except Malformed as problem:
                if not region.keeps:  # else its close may be any bracket of an unfinished call
                    why = str(problem)
                if problem.name is not None and not thinking and not region.keeps:
                    self._emit([ParsedCall(problem.name, problem.arguments, why)], close[1], out)
                    return
        self._think, self._region, self._trim = thinking, None, False
        if not thinking and not region.starts:
            self._problem = self._problem or why
        if thinking or region.starts:
            said = len(self._buffer)
        else:  # closed, it is text; cut off, it is nothing
            said = close[1] if close is not None and not region.keeps else 0
        rest = self._buffer[said:] if said else ""
        self._say(self._buffer[:said], out)
        self._buffer = rest

    # -- text

    def _say(self, text: str, out: list[Delta]) -> None:
        """Text or reasoning, without white space next to markers."""
        if self._section is not None and self._think is None:
            if text.strip():
                self._problem = self._problem or NO_CALL
            return
        if self._trim:
            text = text.lstrip("\n")
            if not text:
                return
            self._trim = False
        text = self._space + text
        bare = text.rstrip()
        self._space, text = text[len(bare) :], bare
        if text:
            self._emit_text(text, out)

    def _emit_text(self, text: str, out: list[Delta]) -> None:
        text = text.replace(CONTROL_MARK, "")
        (self._text if self._think is None else self._reasoning).append(text)
        out.append(Delta(text=text) if self._think is None else Delta(reasoning=text))


@frozen
class _Open:
    """A region as it stands in the buffer: its body starts at ``start``."""

    region: Region
    start: int
    closes: list[str]

    @property
    def margin(self) -> int:
        """Characters at the end of the buffer in which a close may have begun."""
        return max(map(len, self.closes)) - 1

    def next_close(self, buffer: str, at: int) -> tuple[int, int] | None:
        """Where the next closing text begins and ends."""
        found, close = _earliest(buffer, self.closes, max(at, self.start))
        return (found, found + len(close)) if close is not None else None

    def read(
        self, buffer: str, close: tuple[int, int], tools: Tools, marked: Callable[[str], str], lenient: bool = False
    ) -> Sequence[ParsedCall]:
        text = buffer[self.start : close[1] if self.region.keeps else close[0]]
        return self.region.read(Body(text, tools, marked, lenient))


def _earliest(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str | None]:
    """The first marker in the text, the longest where several begin together."""
    found = [(at, -len(m), m) for m in markers if (at := text.find(m, start)) >= 0]
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
