"""Sampled ids to what the client sees, incrementally: text, reasoning, calls; UTF-8 and stop strings on the way.

Ids become text at token boundaries (a character split over tokens is one unit), stop strings hold back whole units and
cut between them: the text a client gets is exactly the text of the ids that are kept. Special tokens are silent unless
the parser asks for them. Feeding ids one by one or all at once gives the same answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import evolve, frozen

from uniagent.engine.messages import Call, Delta
from uniagent.engine.ports import CONTROL_MARK, Ids, Parser

STRETCHES = 64  # of one answer's reasoning that are looked for

# the printable stand-ins of bytes in byte-level vocabularies (GPT-2's table)
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(b): b for b in _PRINTABLE} | {
    chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in set(_PRINTABLE))
}


class TokenBytes:
    """The bytes of each token id. ``added`` maps added tokens' ids to their text; ``silent`` ids have none; ``marked``
    ids are the control tokens that the parser wants CONTROL_MARK before."""

    def __init__(
        self,
        token: Callable[[int], str | None],
        *,
        byte_level: bool,
        added: Mapping[int, str],
        silent: frozenset[int] = frozenset(),
        marked: frozenset[int] = frozenset(),
    ) -> None:
        self._token, self._byte_level, self.marked = token, byte_level, marked
        self._known: dict[int, bytes] = dict.fromkeys(silent, b"")
        for id, text in added.items():
            if id in marked:
                self._known[id] = (CONTROL_MARK + text).encode()
            elif id not in silent:
                self._known[id] = text.encode() if byte_level else self._bytes(text)

    @property
    def control(self) -> tuple[str, ...]:
        """The texts of the marked tokens."""
        return tuple(self._known[i].decode().removeprefix(CONTROL_MARK) for i in sorted(self.marked))

    def text(self, ids: Sequence[int]) -> str:
        """The text of whole ids, with the marks that a parser wants."""
        return b"".join([self[i] for i in ids]).decode("utf-8", "replace")

    def __getitem__(self, id: int) -> bytes:
        found = self._known.get(id)
        if found is None:
            found = self._known[id] = self._bytes(self._token(id) or "")
        return found

    def _bytes(self, token: str) -> bytes:
        if self._byte_level:
            if all(c in _BYTES for c in token):
                return bytes(_BYTES[c] for c in token)
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


@frozen
class Decoded:
    """A whole answer. ``finish`` is stop | length | tool_calls; ``used`` tokens are kept (fewer than were sampled when
    a stop string cut them); ``closed``: the last one ends the turn; ``problem``: why a call could not be parsed;
    ``reasoning_tokens`` wrote the reasoning; ``deltas`` are the last ones, which ``feed`` has not given yet."""

    text: str
    reasoning: str
    calls: tuple[Call, ...]
    finish: str
    used: int
    closed: bool
    problem: str | None = None
    reasoning_tokens: int = 0
    deltas: tuple[Delta, ...] = ()


class Decoder:
    """Of one generation. ``stopped`` turns true when a stop string matched, or when a call came after the first
    ``calls``: the gateway then aborts the generation."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        parser: Parser,
        call_ids: Callable[[int, str], str],
        *,
        stop: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
        closing: frozenset[int] = frozenset(),
        calls: int | None = None,
    ) -> None:
        self._calls, self._good = calls, 0  # tokens released when the last thing was said that counts
        self._bytes_of, self._parser, self._call_ids = token_bytes, parser, call_ids
        self._stop = tuple(s for s in stop if s)
        self._stop_ids, self._closing = stop_ids, closing
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending, self._half = 0, ""  # tokens of an unfinished character, and text completed within them
        self._held: list[tuple[int, str]] = []  # units not yet released: (tokens, text)
        self._released = 0  # tokens released
        self._fed: list[int] = []
        self._ended: int | None = None  # the stop id that ended the turn
        self._ids: dict[int, str] = {}  # call index -> id
        self.stopped = False
        self.matched: str | None = None  # the stop string that ended it

    def feed(self, ids: Ids) -> list[Delta]:
        """The deltas these ids complete. Ids after a stop are ignored."""
        if self.stopped or self._ended is not None:
            return []
        if self._calls is not None and len(ids) > 1:
            return [delta for n in range(len(ids)) for delta in self.feed(ids[n : n + 1])]
        kept = np.asarray(ids).tolist()
        for n, id in enumerate(kept):
            if id in self._stop_ids:
                self._ended, kept = id, kept[:n]
                break
        self._fed += kept
        if not self._stop:
            self._released += len(kept)
            return self._parse(self._all(kept))
        out: list[str] = []
        for id in kept:
            self._take(id, out)
            if self.stopped:
                break
        return self._parse("".join(out))

    def _all(self, ids: Sequence[int]) -> str:
        before = self._utf8.getstate()
        text = self._utf8.decode(b"".join([self._bytes_of[i] for i in ids]))
        if CONTROL_MARK in text and text.count(CONTROL_MARK) != sum(i in self._bytes_of.marked for i in ids):
            self._utf8.setstate(before)  # the model spelled a mark itself
            return "".join(self._text_of(i) for i in ids)
        return text

    def _text_of(self, id: int) -> str:
        text = self._utf8.decode(self._bytes_of[id])
        return text if id in self._bytes_of.marked else text.replace(CONTROL_MARK, "\ufffd")

    def _take(self, id: int, out: list[str]) -> None:
        self._pending += 1
        self._half += self._text_of(id)
        if not self._utf8.getstate()[0]:  # else in the middle of a character
            text, self._half = self._half, ""
            self._unit(text, out)

    def _unit(self, text: str, out: list[str]) -> None:
        unit, self._pending = (self._pending, text), 0
        self._held.append(unit)
        whole = "".join(t for _, t in self._held)
        found = [(at, s) for s in self._stop if (at := whole.find(s)) >= 0]
        if found:
            at, self.matched = min(found)
            self.stopped = True
            self._release(at, out)
            return
        self._release(len(whole) - max(_overlap(whole, s) for s in self._stop), out)

    def _release(self, until: int, out: list[str]) -> None:
        """Let whole units go whose text ends at or before ``until``."""
        end = 0
        while self._held and end + len(self._held[0][1]) <= until:
            tokens, text = self._held.pop(0)
            end += len(text)
            self._released += tokens
            out.append(text)

    def begin(self, ids: Ids) -> None:
        """Ids put before the answer, which belong to it: the beginning of a call."""
        self._parser.feed(self._bytes_of.text(ids.tolist()))

    def _parse(self, text: str) -> list[Delta]:
        return self._allowed(self._parser.feed(text)) if text else []

    def _allowed(self, deltas: Sequence[Delta]) -> list[Delta]:
        """The deltas up to the first call too many; the answer then ends where the last one that counts did."""
        for n, delta in enumerate(deltas):
            if self._calls is not None and (delta.call_index or 0) >= self._calls:
                self.stopped, self._released = True, self._good
                return [self._with_id(d) for d in deltas[:n]]
        self._good = self._released if deltas else self._good
        return [self._with_id(d) for d in deltas]

    def _with_id(self, delta: Delta) -> Delta:
        if delta.call_index is None:
            return delta
        if delta.call_name is None:
            return delta
        id = delta.call_id or self._call_ids(delta.call_index, delta.call_name)
        if id in self._ids.values():
            id = self._call_ids(delta.call_index, delta.call_name)
        self._ids[delta.call_index] = id
        return evolve(delta, call_id=id)

    def finish(self, finish: str) -> Decoded:
        """The whole answer; ``finish`` is the engine's word: stop, length or aborted."""
        out: list[str] = []
        if not self.stopped:
            rest = self._half + self._utf8.decode(b"", final=True)
            if not self._stop:
                out.append(rest)
            elif self._pending:
                self._unit(rest, out)
            if not self.stopped:
                self._release(1 << 60, out)
        deltas = self._parse("".join(out))
        last, parsed = self._parser.finish()
        deltas += self._allowed(last) if not (self.stopped and self._calls is not None) else []
        calls = tuple(
            Call(self._ids[n], c.name, c.arguments) for n, c in enumerate(parsed.calls[: self._calls]) if n in self._ids
        )
        ended = self._ended is not None and not self.stopped
        cut = finish == "length" and not self.stopped and not ended
        return Decoded(
            text=parsed.text,
            reasoning=parsed.reasoning,
            calls=calls,
            finish="length" if cut else "tool_calls" if calls else "stop",
            used=self._released + ended,
            closed=ended and self._ended in self._closing,
            problem=parsed.problem,
            reasoning_tokens=_written([self._bytes_of[i] for i in self._fed], parsed.reasoning),
            deltas=tuple(deltas),
        )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins the stop string."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


def _written(tokens: Sequence[bytes], said: str) -> int:
    """How many tokens wrote the text ``said``: it stands in their bytes in a few stretches, in this order."""
    if not said:
        return 0
    raw, edges = b"".join(tokens), np.cumsum([0, *map(len, tokens)])
    left, at, count, counted = said.encode(), 0, 0, 0
    for _ in range(STRETCHES):
        size = _longest(raw, left, at)
        start = raw.find(left[:size], at)
        at = start + size
        first, end = int(np.searchsorted(edges, start, "right")) - 1, int(np.searchsorted(edges, at))
        count += max(0, end - max(first, counted)) if size else 0
        counted, left = max(end, counted), left[max(size, 1) :]
        if not left:
            break
    return count


def _longest(raw: bytes, text: bytes, at: int) -> int:
    """Length of the longest beginning of a text that stands in ``raw`` behind ``at``."""
    if raw.find(text, at) >= 0:
        return len(text)
    low, high = 0, len(text) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if raw.find(text[:middle], at) >= 0:
            low = middle
        else:
            high = middle - 1
    return low
