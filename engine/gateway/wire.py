"""Request bodies as JSON, at the cost of what is new: one linear scan, then parsing of the bytes not seen before.

A conversation's next request repeats the last one's bytes up to its newest messages. ``Bodies`` keeps the last few
bodies of a session with the end of each message in them; the messages within the common prefix are given again as the
same objects, so that everything after can recognise them by identity. Invariant: the value equals ``json.loads`` of
the body, with lone surrogates replaced. Problem 400 for what is no JSON object; knows no dialect, only the name of its
message list.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import deque
from typing import Any, NoReturn

from attrs import define, field, frozen

from uniagent.engine.gateway.record import BASES, Items
from uniagent.engine.messages import Problem
from uniagent.engine.ports import Json

BLOCK = 1 << 16
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


@frozen(eq=False)
class _Seen:
    """A body taken apart: ``head`` and ``tail`` are the fields before and after the list, ``ends[i]`` the offset of
    the end of item i in the body's bytes; ``start`` is where the first item begins."""

    body: bytes
    start: int
    ends: list[int]
    items: Items
    head: dict[str, Json]
    tail: dict[str, Json]
    rest: bytes  # from the end of the last item


@frozen(eq=False)
class Match:
    """An earlier body, the bytes it shares, and how many are new."""

    seen: _Seen | None
    shared: int
    fresh: int


@define(eq=False)
class Bodies:
    """The last bodies of one session."""

    _seen: deque[_Seen] = field(factory=lambda: deque(maxlen=BASES))

    def match(self, body: bytes) -> Match:
        """The earlier body that this one shares most with."""
        best, shared = None, 0
        for seen in reversed(self._seen):
            same = common_bytes(seen.body, body)
            if same > shared:
                best, shared = seen, same
            if 2 * shared > len(body):
                break
        return Match(best, shared, len(body) - shared)

    def read(self, body: bytes, items: str, match: Match | None = None) -> dict[str, Json]:
        """The body as a JSON object; ``items`` is the key of its message list."""
        match = match or self.match(body)
        best, shared = match.seen, match.shared
        try:
            made = _again(best, body, shared, items) if best is not None and shared > best.start else None
            made = made or _first(body, items)
        except (ValueError, RecursionError) as problem:
            raise _refused(body, problem) from problem
        if made is None:
            return load(body)
        if best is not None and best in self._seen and 2 * shared > len(best.body):
            self._seen.remove(best)
        self._seen.append(made)
        return {**made.head, items: made.items, **made.tail}


def load(body: bytes) -> dict[str, Json]:
    """A whole body, with nothing to compare to."""
    try:
        value = _clean(json.loads(body.decode(), parse_constant=_no_constant))
    except (ValueError, RecursionError) as problem:
        raise _refused(body, problem) from problem
    if not isinstance(value, dict):
        raise Problem(400, "invalid_json", "the body must be a JSON object")
    return value


def common_bytes(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix."""
    low, most = 0, min(len(a), len(b))
    while low < most and a[low : low + BLOCK] == b[low : low + BLOCK]:
        low += BLOCK
    low, high = min(low, most), min(low + BLOCK, most)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _refused(body: bytes, problem: Exception) -> Problem:
    if isinstance(problem, RecursionError):
        return Problem(400, "invalid_json", "the body's JSON is nested too deeply")
    if isinstance(problem, UnicodeDecodeError):
        return Problem(400, "invalid_json", f"the body is not UTF-8: {problem.reason} at byte {problem.start}")
    return Problem(400, "invalid_json", f"the body is not valid JSON: {problem}")


def _clean(value: Json) -> Json:
    """Lone surrogates (half an emoji, escaped) become U+FFFD: no tokenizer takes them."""
    if isinstance(value, str):
        if value.isascii() or not _SURROGATE.search(value):
            return value
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value


# ---------------------------------------------------------------- a body in parts


def _first(body: bytes, items: str) -> _Seen | None:
    """Takes a whole body apart; None when it has no list of objects under that key, or has it twice."""
    text = body.decode()
    clean = _cleaner(text)
    wide = len(text) != len(body)
    fields: dict[str, Json] = {}
    at = _open(text)
    if text[(end := _space(text, at)) : end + 1] == "}":
        return None
    while True:
        key, at = _key(text, at)
        if key == items and text[at : at + 1] == "[" and items not in fields:
            found, ends, after = _list(text, at + 1, clean)
            if found is None:
                return None
            tail, end = _fields(text, after + 1, clean)
            if text[end:].strip(" \t\n\r") or items in tail or items in fields or tail.keys() & fields.keys():
                return None
            start = at + 1
            if wide:
                start, ends, after = _byte_offsets(text, [start, *ends, after])
            return _Seen(body, start, ends, Items(found), fields, tail, body[ends[-1] if ends else start :])
        value, at = _DECODER.raw_decode(text, at)
        fields[key] = clean(value)
        at = _space(text, at)
        if text[at : at + 1] != ",":
            return None
        at += 1


def _again(seen: _Seen, body: bytes, shared: int, items: str) -> _Seen | None:
    """Goes on behind the last item that lies in the shared prefix; None when the body must be read from its start."""
    kept = bisect_right(seen.ends, shared)
    start = seen.ends[kept - 1] if kept else seen.start
    text = body[start:].decode()
    clean = _cleaner(text)
    at = _space(text, 0)
    more = kept > 0 and text[at : at + 1] == ","
    if kept and not more and text[at : at + 1] != "]":
        return None
    found, ends, after = _list(text, at + more, clean, more)
    if found is None:
        return None
    if len(text) != len(body) - start:
        _, ends, _ = _byte_offsets(text, [0, *ends, after])
    ends = [start + e for e in ends]
    rest = body[ends[-1] if ends else start :]
    if rest == seen.rest:
        tail = seen.tail
    else:
        tail, end = _fields(text, after + 1, clean)
        if text[end:].strip(" \t\n\r") or items in tail or tail.keys() & seen.head.keys():
            return None
    listed = Items(seen.items[:kept] + found, seen.items, kept)
    return _Seen(body, seen.start, seen.ends[:kept] + ends, listed, seen.head, tail, rest)


def _cleaner(text: str) -> Any:
    return _clean if "\\ud" in text or "\\uD" in text else lambda value: value


def _space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _open(text: str) -> int:
    at = _space(text, 0)
    if text[at : at + 1] != "{":
        raise json.JSONDecodeError("the body must be a JSON object", text, at)
    return at + 1


def _key(text: str, at: int) -> tuple[str, int]:
    """A key and its colon; the offset of its value."""
    at = _space(text, at)
    if text[at : at + 1] != '"':
        raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
    key, at = _DECODER.raw_decode(text, at)
    at = _space(text, at)
    if text[at : at + 1] != ":":
        raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
    return key, _space(text, at + 1)


def _list(text: str, at: int, clean: Any, more: bool = False) -> tuple[list[Json] | None, list[int], int]:
    """Items up to the closing bracket, the offset of each one's end, and that of the bracket. None: not all objects.
    ``more``: a comma came before, so there must be one."""
    found: list[Json] = []
    ends: list[int] = []
    at = _space(text, at)
    if not more and text[at : at + 1] == "]":
        return found, ends, at
    while True:
        if text[at : at + 1] != "{":
            return None, ends, at
        value, at = _DECODER.raw_decode(text, at)
        found.append(clean(value))
        ends.append(at)
        at = _space(text, at)
        mark = text[at : at + 1]
        if mark == "]":
            return found, ends, at
        if mark != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at = _space(text, at + 1)


def _fields(text: str, at: int, clean: Any) -> tuple[dict[str, Json], int]:
    """The fields behind the list, and the offset behind the closing brace."""
    fields: dict[str, Json] = {}
    at = _space(text, at)
    while text[at : at + 1] == ",":
        key, at = _key(text, at + 1)
        value, at = _DECODER.raw_decode(text, at)
        fields[key] = clean(value)
        at = _space(text, at)
    if text[at : at + 1] != "}":
        raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    return fields, at + 1


def _byte_offsets(text: str, at: list[int]) -> tuple[int, list[int], int]:
    """Character offsets, ascending, as byte offsets: the first, those between, the last."""
    out, last, size = [], 0, 0
    for offset in at:
        size += len(text[last:offset].encode())
        last = offset
        out.append(size)
    return out[0], out[1:-1], out[-1]
