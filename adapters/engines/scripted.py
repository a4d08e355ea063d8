"""A deterministic stand-in for a model: answers come from a script file or a function. No torch, no thread.

It runs in trio, delays included, so tests and simulations use it on a virtual clock. A script is JSON lines, one a
generation: ``{"text": …}`` or ``{"token_ids": […], "logprobs": […]}``, optionally with ``finish_reason`` ("stop" or
"length"), ``delay_s`` before the answer, and ``match``: the line is kept for prompts whose text contains it. Each
session reads the script from line 1: a generation takes the first line the session has not used whose ``match``, if it
has one, is in the prompt. ``text`` is raw template text, encoded with control tokens allowed; nothing is added to it.
Past the end ``Problem`` 409 is raised.

There is no prefix cache: ``resident`` and ``cached_tokens`` are 0. Logprobs that the script does not give are
invented: a fixed function of seed, session, turn and position. Temperature, top-p and top-k have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import trio
from attrs import define, field, frozen

from uniagent.adapters.engines.sampling import draw_key, uniforms
from uniagent.adapters.engines.spans import version_spans
from uniagent.engine import config
from uniagent.engine.errors import UserError, nearest
from uniagent.engine.messages import Problem
from uniagent.engine.ports import (
    Capacity,
    Finish,
    Floats,
    Generation,
    Ids,
    KvPolicy,
    OnTokens,
    Sampling,
    SessionId,
    Weights,
)


@frozen(eq=False)
class Answer:
    """One scripted generation. ``finish`` None: STOP, or LENGTH when the budget cut it."""

    token_ids: Ids
    logprobs: Floats | None = None
    finish: Finish | None = None
    delay_s: float = 0.0


Respond = Callable[[Ids, Sampling, SessionId], Answer | Sequence[int]]  # what the model says to a prompt


class ScriptedEngine:
    """An ``InferenceEngine``. ``respond`` gives each answer; ``Script`` is the one that reads a file."""

    def __init__(self, respond: Respond, *, context: int = 1 << 20, vocabulary: int | None = None) -> None:
        self.version = 0
        self._respond = respond
        self._context = context
        self._vocabulary = vocabulary
        self._running = 0
        self._held = 0  # tokens of running requests

    async def generate(
        self,
        prompt: Ids,
        sampling: Sampling,
        *,
        session: SessionId,
        on_tokens: OnTokens | None = None,
        on_abort: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """See ``InferenceEngine``. Problem (409) past the end of a script."""
        self._check(prompt)
        answer = self._respond(prompt, sampling, session)
        if not isinstance(answer, Answer):
            answer = Answer(np.asarray(answer, np.int32))
        self._running += 1
        self._held += len(prompt)
        try:
            return await self._play(prompt, answer, sampling, session, on_tokens, on_abort)
        finally:
            self._running -= 1
            self._held -= len(prompt)

    async def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        await trio.lowlevel.checkpoint()
        self.version = version

    def capacity(self) -> Capacity:
        total = self._context * 1024
        return Capacity(total, max(0, total - self._held), self._running, 0, self._context, scripted=True)

    def resident(self, prompt: Ids) -> int:
        return 0

    def _check(self, prompt: Ids) -> None:
        if not 0 < len(prompt) < self._context:
            raise ValueError(f"a prompt of {len(prompt)} tokens; 1 to {self._context - 1} are allowed")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or (self._vocabulary is not None and high >= self._vocabulary):
            raise ValueError(f"token id {low if low < 0 else high} is not in the vocabulary (0 to {self._vocabulary})")

    async def _play(
        self,
        prompt: Ids,
        answer: Answer,
        sampling: Sampling,
        session: SessionId,
        on_tokens: OnTokens | None,
        on_abort: Callable[[Generation], None] | None,
    ) -> Generation:
        length, finish = self._cut(prompt, answer, sampling)
        ids = answer.token_ids[:length]
        logprobs = answer.logprobs if answer.logprobs is not None else _invented(length, sampling, session)
        versions: list[int] = []

        def sampled(finish: Finish) -> Generation:
            count = len(versions)
            kv = [versions[0] if versions else self.version] * len(prompt) + versions
            return Generation(ids[:count], logprobs[:count], version_spans(versions), version_spans(kv), finish, 0)

        try:
            if answer.delay_s:
                await trio.sleep(answer.delay_s)
            for position in range(length):
                versions.append(self.version)
                if on_tokens is not None:
                    if on_tokens(ids[position : position + 1]) is True and position + 1 < length:
                        return sampled(Finish.ABORTED)
                    await trio.lowlevel.checkpoint()
            if on_tokens is None:
                await trio.lowlevel.checkpoint()
        except trio.Cancelled:
            if on_abort is not None:
                on_abort(sampled(Finish.ABORTED))
            raise
        return sampled(finish)

    def _cut(self, prompt: Ids, answer: Answer, sampling: Sampling) -> tuple[int, Finish]:
        """Tokens of the answer that are sampled, and why it ends there."""
        budget = min(sampling.max_tokens, self._context - len(prompt))
        stops = np.flatnonzero(np.isin(answer.token_ids, sampling.stop_ids))
        length = int(stops[0]) + 1 if stops.size else len(answer.token_ids)
        if length > budget:
            return budget, Finish.LENGTH
        return length, answer.finish or Finish.STOP


def _invented(length: int, sampling: Sampling, session: SessionId) -> Floats:
    """Logprobs in (-2, 0]."""
    key = draw_key(sampling.seed, session, sampling.turn)
    return (-2.0 * uniforms(np.full(length, key, np.uint64), np.arange(length, dtype=np.uint64))).astype(np.float32)


@frozen(eq=False)
class _Line:
    answer: Answer
    match: str | None


@define
class _Progress:
    """Of one session: lines from ``next`` on are unused, and so are the ``skipped`` ones before it."""

    next: int = 0
    skipped: list[int] = field(factory=list)

    def take(self, index: int) -> None:
        if index < self.next:
            self.skipped.remove(index)
        else:
            self.skipped.extend(range(self.next, index))
            self.next = index + 1


class Script:
    """The lines of a script file, and which of them each session has used."""

    def __init__(self, lines: Sequence[_Line], decode: Callable[[Ids], str] | None) -> None:
        self._lines = lines
        self._decode = decode
        self._progress: dict[SessionId, _Progress] = {}

    @classmethod
    def read(
        cls, path: Path, *, encode: Callable[[str], Sequence[int]], decode: Callable[[Ids], str] | None = None
    ) -> Script:
        """Reads and checks the file. encode turns text into ids with control tokens allowed; decode turns prompts into
        text with control tokens shown (needed for ``match``). Raises UserError with the line's number."""
        try:
            texts = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as problem:
            raise UserError(f"cannot read the script {path}: {problem}") from problem
        lines = [_line(text, f"{path}:{n}", encode) for n, text in enumerate(texts, 1) if text.strip()]
        if decode is None and any(line.match is not None for line in lines):
            raise UserError(f"{path} has lines with match, which need a tokenizer: give the model")
        return cls(lines, decode)

    def __call__(self, prompt: Ids, sampling: Sampling, session: SessionId) -> Answer:
        progress = self._progress.setdefault(session, _Progress())
        text: str | None = None
        for index in chain(progress.skipped, range(progress.next, len(self._lines))):
            match = self._lines[index].match
            if match is not None and text is None and self._decode is not None:
                text = self._decode(prompt)
            if match is None or match in (text or ""):
                progress.take(index)
                answer: Answer = self._lines[index].answer
                return answer
        left = len(self._lines) - progress.next + len(progress.skipped)
        why = f"none of the {left} lines left matches this prompt" if left else "every line is used"
        raise Problem(
            409, "script_exhausted", f"the script has no answer for this request: {why}; add a line to the script"
        )


def _line(text: str, where: str, encode: Callable[[str], Sequence[int]]) -> _Line:
    known = ("text", "token_ids", "logprobs", "finish_reason", "delay_s", "match")
    try:
        row: Any = json.loads(text)
    except ValueError as problem:
        raise UserError(f"{where}: not JSON: {problem}") from problem
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with text or token_ids, got {text[:40]!r}")
    for key in row:
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}: {nearest(key, known)}")
    if ("text" in row) == ("token_ids" in row):
        raise UserError(f"{where}: give exactly one of text and token_ids")
    tokens = row.get("token_ids")
    if tokens is not None and not (isinstance(tokens, list) and all(type(each) is int for each in tokens)):
        raise UserError(f"{where}: token_ids must be a list of integers")
    if not all(isinstance(row.get(key, ""), str) for key in ("text", "match")):
        raise UserError(f"{where}: text and match must be strings")
    try:
        ids = np.asarray(encode(row["text"]) if tokens is None else tokens, np.int32)
        logprobs = None if row.get("logprobs") is None else np.asarray(row["logprobs"], np.float32)
        delay_s = float(row.get("delay_s", 0.0))
        finish = None if row.get("finish_reason") is None else Finish(row["finish_reason"])
    except (ValueError, TypeError, OverflowError) as problem:
        raise UserError(f"{where}: {problem}; finish_reason is stop or length, the rest are numbers") from problem
    if logprobs is not None and logprobs.shape != ids.shape:
        raise UserError(f"{where}: {len(ids)} token_ids need as many logprobs, got {logprobs.size}")
    return _Line(Answer(ids, logprobs, finish, delay_s), row.get("match"))


def build(
    settings: config.Engine,
    model: Any = None,
    *,
    shared: bool = False,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Ids], str] | None = None,
) -> ScriptedEngine:
    """The registry's factory: ``[engine.options] script`` names the file; model and shared are not used."""
    script = settings.options.get("script")
    if not script:
        raise UserError("engine scripted needs a script: set engine.options.script to a file of JSON lines")
    return ScriptedEngine(Script.read(Path(script), encode=encode, decode=decode), context=settings.context)
