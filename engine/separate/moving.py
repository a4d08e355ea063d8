"""An engine that may be closed for a while: what it was generating goes on elsewhere, from where it was.

Around the engine of a rank of the training mesh, which cannot decode while it trains, and of a rollout rank, which
hands on what would only wait when others have room. Invariants: a generation's tokens, logprobs and versions are kept
wherever they were sampled, and its budget is spent once; while the engine is closed nothing runs in it; a part that
goes on elsewhere draws from a generator of its own (its session's name and place), so that no draw is used twice.
Knows engines by the port; where ``elsewhere`` is, it does not know.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

import numpy as np
import trio
from attrs import evolve

from uniagent.engine.ports import (
    Capacity,
    Finish,
    Generation,
    Ids,
    InferenceEngine,
    KvPolicy,
    OnTokens,
    Sampling,
    SessionId,
    VersionSpan,
    Weights,
)

Generate = Callable[[Ids, Sampling, SessionId], Awaitable[Generation]]


class MovingEngine:
    """An ``InferenceEngine``. ``interrupt`` ends all generations of ``engine`` at once, each with what it has (finish
    ABORTED). ``elsewhere`` may give a part: ABORTED, to be continued. ``crowded`` says whether a new generation had
    better go elsewhere though the engine is open."""

    def __init__(self, engine: InferenceEngine, interrupt: Callable[[], None]) -> None:
        self.elsewhere: Generate | None = None
        self.crowded: Callable[[], bool] = lambda: False
        self.moved = 0  # generations that went on elsewhere
        self.engine, self._interrupt = engine, interrupt
        self._running = 0
        self._open = trio.Event()
        self._open.set()
        self._idle = trio.Event()

    # ------------------------------------------------------------ open and closed

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def open(self) -> None:
        """Generations run here from now on."""
        self._open.set()

    async def close(self) -> None:
        """Returns when nothing runs in the engine any more."""
        if self._open.is_set():
            self._open = trio.Event()
        while self._running:
            self._interrupt()
            self._idle = trio.Event()
            await self._idle.wait()

    # ------------------------------------------------------------ InferenceEngine

    async def generate(
        self,
        prompt: Ids,
        sampling: Sampling,
        *,
        session: SessionId,
        on_tokens: OnTokens | None = None,
        on_abort: Callable[[Generation], None] | None = None,
    ) -> Generation:
        parts: list[Generation] = []
        ended = False  # on_tokens said so

        def streamed(ids: Ids) -> bool | None:
            nonlocal ended
            ended = on_tokens is not None and on_tokens(ids) is True
            return ended

        def aborted(part: Generation) -> None:
            if on_abort is not None:
                on_abort(splice([*parts, part]))

        while True:
            said = np.concatenate([prompt, *(p.token_ids for p in parts)]).astype(np.int32)
            left = evolve(sampling, max_tokens=sampling.max_tokens - (len(said) - len(prompt)))
            name = f"{session}+{len(said) - len(prompt)}" if parts else session
            if self.elsewhere is None:
                await self._open.wait()
            if self.elsewhere is None or (self.is_open and not self.crowded()):
                part = await self._here(said, left, name, streamed if on_tokens else None, aborted)
            else:
                self.moved += 1
                part = await self._there(said, left, name, streamed if on_tokens else None, aborted)
            done = part.finish is not Finish.ABORTED or ended
            if done or len(part.token_ids) or not parts:
                parts.append(part)
            if done:
                return splice(parts)

    async def generate_here(self, prompt: Ids, sampling: Sampling, session: SessionId) -> Generation:
        """For another node: what comes before the engine closes; ABORTED and empty when it is closed."""
        if not self.is_open:
            nothing = np.zeros(0, np.int32)
            return Generation(nothing, nothing.astype(np.float32), (), (), Finish.ABORTED, 0)
        return await self._here(prompt, sampling, session, None, None)

    async def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        await self.engine.update(weights, version, kv)

    def capacity(self) -> Capacity:
        return self.engine.capacity()

    def resident(self, prompt: Ids) -> int:
        return self.engine.resident(prompt)

    # ------------------------------------------------------------ one part

    async def _here(
        self,
        prompt: Ids,
        sampling: Sampling,
        session: SessionId,
        on_tokens: OnTokens | None,
        on_abort: Callable[[Generation], None] | None,
    ) -> Generation:
        self._running += 1
        try:
            return await self.engine.generate(prompt, sampling, session=session, on_tokens=on_tokens, on_abort=on_abort)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _there(
        self,
        prompt: Ids,
        sampling: Sampling,
        session: SessionId,
        on_tokens: OnTokens | None,
        on_abort: Callable[[Generation], None],
    ) -> Generation:
        """What it says comes at once; of an answer that a stop string ends, the rest is cut off as overrun later."""
        assert self.elsewhere is not None
        try:
            part = await self.elsewhere(prompt, sampling, session)
        except trio.Cancelled:
            nothing = np.zeros(0, np.int32)
            on_abort(Generation(nothing, nothing.astype(np.float32), (), (), Finish.ABORTED, 0))
            raise
        if on_tokens is not None and len(part.token_ids):
            on_tokens(part.token_ids)
        return part


def splice(parts: Sequence[Generation]) -> Generation:
    """One generation out of parts that each went on where the one before ended. The last part says whose weights wrote
    the KV, because it was prefilled with all that came before."""
    if len(parts) == 1:
        return parts[0]
    lengths = [len(p.token_ids) for p in parts]
    starts = [0, *np.cumsum(lengths)[:-1].tolist()]
    kept = None
    if any(p.kept is not None for p in parts):
        kept = tuple(k for p, n in zip(parts, lengths, strict=True) for k in (p.kept or (None,) * n))
    last = next((p for p in reversed(parts) if p.kv_versions), parts[-1])
    return Generation(
        np.concatenate([p.token_ids for p in parts]).astype(np.int32),
        np.concatenate([p.logprobs for p in parts]).astype(np.float32),
        _joined(
            VersionSpan(s.version, s.start + at, s.end + at)
            for p, at in zip(parts, starts, strict=True)
            for s in p.versions
        ),
        last.kv_versions,
        parts[-1].finish,
        parts[0].cached_tokens,
        kept,
    )


def _joined(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version as one span."""
    out: list[VersionSpan] = []
    for span in spans:
        if out and out[-1].version == span.version and out[-1].end == span.start:
            out[-1] = evolve(out[-1], end=span.end)
        else:
            out.append(span)
    return tuple(out)
