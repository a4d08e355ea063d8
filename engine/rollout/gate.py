"""A gate before an engine: while it is shut no generation starts, and the shutter waits for those that run.

For ``partial_rollout = false``: a weight sync waits until running *generations* end, not sessions; what sessions ask
for meanwhile waits here. Knows no weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from uniagent.engine.ports import (
    Capacity,
    Generation,
    Ids,
    InferenceEngine,
    KvPolicy,
    OnTokens,
    Sampling,
    SessionId,
    Weights,
)


class GatedEngine:
    """An ``InferenceEngine`` around another."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._running = 0
        self._open = trio.Event()
        self._open.set()
        self._idle = trio.Event()

    async def generate(
        self,
        prompt: Ids,
        sampling: Sampling,
        *,
        session: SessionId,
        on_tokens: OnTokens | None = None,
        on_abort: Callable[[Generation], None] | None = None,
    ) -> Generation:
        while not self._open.is_set():
            await self._open.wait()
        self._running += 1
        try:
            return await self._engine.generate(
                prompt, sampling, session=session, on_tokens=on_tokens, on_abort=on_abort
            )
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def shut(self) -> AsyncIterator[None]:
        """No generation runs inside the block."""
        self._open = trio.Event()
        try:
            while self._running:
                self._idle = trio.Event()
                await self._idle.wait()
            yield
        finally:
            self._open.set()

    async def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        await self._engine.update(weights, version, kv)

    def capacity(self) -> Capacity:
        return self._engine.capacity()

    def resident(self, prompt: Ids) -> int:
        return self._engine.resident(prompt)
