"""Text to ids such that content can never become a control token, and benign content is encoded as always.

Control tokens are those that steer the model: special tokens, ``<|…|>`` markers, and bracketed markers that the chat
template or the parser of the model's answers writes (``<tool_call>``, ``<think>``). Other added tokens are ordinary
vocabulary and stay what they are.

Content is *protected* before it is rendered: a break character goes into every piece that spells a control token, or
that could complete one with the text around it. A rendered text without breaks is encoded in one call, exactly as the
model's own library would; in one with breaks, the runs that hold them are encoded by a copy of the tokenizer that
knows no control tokens. Either way the control ids of the result are counted against the markers in the text.

Knows nothing of templates, messages or provenance beyond "these characters are content".
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from uniagent.engine.ports import Ids, Json

_PRIVATE = re.compile("[\ue000-\uf8ff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BAR = re.compile(r"<[|｜].*[|｜]>$", re.DOTALL)
_BRACKETED = re.compile(r"[<\[]\S*[>\]]$")


class Unencodable(ValueError):
    """Text that cannot be made safe: it uses every private character there is."""


def control_tokens(added: Iterable[tuple[str, bool]], written: str) -> frozenset[str]:
    """The added tokens, given as (text, special), that steer the model. ``written``: template and parser markers."""
    return frozenset(
        text
        for text, special in added
        if text and (special or _BAR.match(text) or (_BRACKETED.match(text) and text in written))
    )


def trie_pattern(words: Iterable[str]) -> str:
    """A regular expression for any of the words, longest first, whose cost does not grow with their number."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        options = [re.escape(letter) + pattern(child) for letter, child in sorted(node.items()) if letter]
        if not options:
            return ""
        body = options[0] if len(options) == 1 else "(?:" + "|".join(options) + ")"
        return f"(?:{body})?" if "" in node else body

    return pattern(trie) or r"(?!)"


@frozen
class Marks:
    """Characters that none of some texts contain: ``inside`` and ``before`` break up would-be control tokens, ``start``
    and ``end`` enclose content in a second rendering that only finds out where content stands; ``anchor`` stands in
    for what an assistant said."""

    inside: str
    before: str
    start: str
    end: str
    anchor: str

    @property
    def breaks(self) -> re.Pattern[str]:
        return _pattern(self.inside + self.before)

    @property
    def anchors(self) -> re.Pattern[str]:
        return _pattern(self.anchor)

    @property
    def ends(self) -> re.Pattern[str]:
        return _pattern(self.start + self.end)


_patterns: dict[str, re.Pattern[str]] = {}


def _pattern(characters: str) -> re.Pattern[str]:
    if characters not in _patterns:  # templates that escape non-ASCII text write the character as \uXXXX
        escaped = "|".join(re.escape(json.dumps(c)[1:-1]) for c in characters)
        _patterns[characters] = re.compile(f"[{characters}]|{escaped}")
    return _patterns[characters]


_MARKS = [Marks(*(chr(base + i) for i in range(5))) for base in range(0xE0E0, 0xE8E0, 5)]


def marks_for(texts: Iterable[str]) -> Marks:
    """Marks that occur in none of the texts, escaped as ``\\uXXXX`` or not."""
    used: set[str] = set()
    for text in texts:
        if not text.isascii():
            used.update(_PRIVATE.findall(text))
        if "\\ue" in text:
            used.update(chr(int(code, 16)) for code in re.findall(r"\\u(e[0-9a-f]{3})", text))
    for marks in _MARKS:
        if used.isdisjoint((marks.inside, marks.before, marks.start, marks.end, marks.anchor)):
            return marks
    raise Unencodable("the messages use all the private characters that this gateway needs some of: remove them")


def strings(value: Json) -> Iterable[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)


def transform(value: Json, change: Callable[[str], str]) -> Json:
    """The JSON value with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(str(key)): transform(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [transform(item, change) for item in value]
    return value


def well_formed(text: str) -> str:
    """Lone surrogates, which no tokenizer takes, become U+FFFD; pairs become the character they mean."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Encoder:
    """``tokenizer`` is the JSON of a ``tokenizers`` file; ``written`` as in control_tokens. Thread-safe."""

    def __init__(self, tokenizer: str, written: str) -> None:
        from tokenizers import Tokenizer

        spec = json.loads(tokenizer)
        added = spec.get("added_tokens") or []
        self.control = control_tokens(((t["content"], bool(t.get("special"))) for t in added), written)
        self._plain = Tokenizer.from_str(tokenizer)
        for (
            token
        ) in added:  # the copy's only special tokens are the control tokens, and it reads special tokens as text
            token["special"] = token["content"] in self.control
        _never_prepend(spec)
        self._literal = Tokenizer.from_str(json.dumps(spec))
        self._literal.encode_special_tokens = True
        self.ids: dict[str, int] = {t["content"]: int(t["id"]) for t in added if t["content"] in self.control}
        self.vocab_size = int(self._plain.get_vocab_size(with_added_tokens=True))
        self._is_control = np.zeros(max(self.vocab_size, *self.ids.values(), 0) + 1, dtype=np.bool_)
        self._is_control[list(self.ids.values())] = True
        self.pattern = re.compile(trie_pattern(self.control))
        self._left = {t["content"] for t in added if t.get("lstrip")} & self.control
        self._right = {t["content"] for t in added if t.get("rstrip")} & self.control
        self._longest = max(map(len, self.control), default=0)
        self._first, self._last = {t[0] for t in self.control}, {t[-1] for t in self.control}
        self._prefixes = {t[:n] for t in self.control for n in range(1, len(t))}
        self._suffixes = {t[n:] for t in self.control for n in range(1, len(t))}
        self._cores = {
            t[i:j] for t in self.control for i in range(1, 5) for j in range(len(t) - 4, len(t)) if j - i > 1
        }

    def token(self, id: int) -> str | None:
        found = self._plain.id_to_token(id)
        return None if found is None else str(found)

    def token_id(self, token: str) -> int | None:
        found = self._plain.token_to_id(token)
        return None if found is None else int(found)

    # -- content

    def protect(self, text: str, marks: Marks) -> str:
        """The text with breaks, so that no control token can be read in it or across its ends."""
        text = well_formed(text)
        found = self.pattern.search(text)
        while found:
            text = self.pattern.sub(lambda m: m[0][0] + marks.inside + m[0][1:] if len(m[0]) > 1 else "", text)
            found = self.pattern.search(text)
        if text in self._cores:
            return text[0] + marks.inside + text[1:]
        if any(c in text[: self._longest] for c in self._last):
            for n in range(1, min(len(text), self._longest) + 1):
                if text[:n] in self._suffixes:
                    text = marks.before + text if n == 1 else text[0] + marks.inside + text[1:]
                    break
        if any(c in text[-self._longest :] for c in self._first):
            for n in range(1, min(len(text), self._longest) + 1):
                if text[-n:] in self._prefixes:
                    return text + marks.inside if n == 1 else text[: 1 - n] + marks.inside + text[1 - n :]
        return text

    # -- whole texts

    def encode(
        self, text: str, marks: Marks, content: Sequence[tuple[int, int]] = ()
    ) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Ids of a rendered text with breaks, and which of them hold content: [T] int32 and [T] bool. ``content`` are
        spans of the text without breaks."""
        clean, found, dirty = self._clean(text, marks)
        ids, spans = self._encode(clean, found, dirty)
        inside = np.zeros(len(clean) + 1, dtype=np.int32)
        for start, end in content:
            inside[start + 1 : end + 1] = 1
        inside = np.cumsum(inside, dtype=np.int32)
        return ids, (inside[spans[:, 1]] - inside[spans[:, 0]]) > 0

    def between_markers(self, text: str, marks: Marks) -> list[tuple[int, int]]:
        """Spans, in the text without breaks, that hold no control token of the template."""
        clean, found, _ = self._clean(text, marks)
        edges = [0, *(edge for f in found for edge in (f.start, f.end)), len(clean)]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]

    def _clean(self, text: str, marks: Marks) -> tuple[str, list[_Marker], bool]:
        """The text without breaks, the markers that the template wrote into it, and whether there were breaks."""
        pieces, markers, at, length = [], [], 0, 0
        for start, end in [*(m.span() for m in marks.breaks.finditer(text)), (len(text), len(text))]:
            piece = text[at:start]
            markers += [_Marker(length + m.start(), length + m.end(), m[0]) for m in self.pattern.finditer(piece)]
            pieces.append(piece)
            length += len(piece)
            at = end
        return "".join(pieces), markers, len(pieces) > 1

    def _encode(self, text: str, found: list[_Marker], dirty: bool) -> tuple[Ids, npt.NDArray[np.int32]]:
        if not dirty:
            ids, spans = _arrays(self._plain.encode(text, add_special_tokens=False))
            if int(self._is_control[ids].sum()) == len(found):
                return ids, spans
        parts: list[tuple[Ids, npt.NDArray[np.int32]]] = []
        for start, end, marker in _runs(text, found, self._left, self._right):
            if marker:
                parts.append((np.array([self.ids[marker]], np.int32), np.array([[start, end]], np.int32)))
            elif start < end:
                ids, spans = self._as_content(text[start:end])
                parts.append((ids, spans + start))
        if not parts:
            return np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _as_content(self, text: str) -> tuple[Ids, npt.NDArray[np.int32]]:
        ids, spans = _arrays(self._literal.encode(text, add_special_tokens=False))
        if not self._is_control[ids].any():
            return ids, spans
        # a model vocabulary that holds control tokens as whole words: letter by letter, which spells none of them
        parts, at = [], 0
        for n in np.flatnonzero(self._is_control[ids]).tolist():
            parts.append((ids[at:n], spans[at:n]))
            for position in range(*spans[n].tolist()):
                letter, where = _arrays(self._literal.encode(text[position], add_special_tokens=False))
                keep = ~self._is_control[letter]
                parts.append((letter[keep], where[keep] + position))
            at = n + 1
        parts.append((ids[at:], spans[at:]))
        return np.concatenate([i for i, _ in parts]), np.concatenate([s for _, s in parts])


@frozen
class _Marker:
    start: int
    end: int
    text: str


def _arrays(encoding: Any) -> tuple[Ids, npt.NDArray[np.int32]]:
    ids = np.array(encoding.ids, dtype=np.int32)
    flat = itertools.chain.from_iterable(encoding.offsets)
    return ids, np.fromiter(flat, np.int32, 2 * len(ids)).reshape(len(ids), 2)


def _runs(
    text: str, found: Sequence[_Marker], left: set[str], right: set[str]
) -> Iterable[tuple[int, int, str | None]]:
    """Markers and the runs between them; a marker that swallows white space beside it does so here too."""
    at = 0
    for marker in [*found, None]:
        end = marker.start if marker else len(text)
        if marker and marker.text in left:
            end = at + len(text[at:end].rstrip())
        yield at, end, None
        if marker:
            yield marker.start, marker.end, marker.text
            at = marker.end
            if marker.text in right:
                at += len(text[at:]) - len(text[at:].lstrip())


def _never_prepend(spec: dict[str, Any]) -> None:
    """Runs are middles of a text: the prefix space that some tokenizers put before a text is not theirs."""
    step = spec.get("pre_tokenizer") or {}
    for part in [step, *(step.get("pretokenizers") or [])]:
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
