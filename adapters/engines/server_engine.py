"""One server elsewhere, which takes and returns token ids, as an ``InferenceEngine``.

Invariants: cancelling closes the connection, which makes the server abort; a generation that the server broke off is
taken up where it stopped, so no sampled token is lost or told twice; a server that stays away is a ``ReplicaLost``; at
most ``slots`` requests are at the server, the others wait here. Weights cannot be handed over: every token has the
version that the engine was made with. Knows no config and no other replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import trio
from attrs import define, field

from uniagent.adapters.engines import completions
from uniagent.adapters.engines.completions import Interrupted, Piece
from uniagent.adapters.engines.prefixes import Chain, Prefixes
from uniagent.adapters.engines.requests import check
from uniagent.adapters.engines.sampling import draw_key
from uniagent.adapters.engines.spans import version_spans
from uniagent.engine.ports import (
    Capacity,
    Finish,
    Generation,
    Ids,
    KvPolicy,
    OnTokens,
    Sampling,
    SessionId,
    StepRequest,
    Weights,
)
from uniagent.engine.rollout.router import ReplicaLost

PAUSES_S = (0.2, 0.5, 1.0, 2.0)  # before asking a failing server again; then it is lost


@define(eq=False)
class _Live:
    """A request under way, and what came of it so far."""

    prompt: Ids
    sampling: Sampling
    key: int
    most: int  # tokens
    on_tokens: OnTokens | None
    ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    cached: int | None = None
    stopped: bool = False  # by on_tokens
    finish: Finish | None = None

    def take(self, piece: Piece) -> bool:
        self.ids.extend(piece.ids)
        self.logprobs.extend(piece.logprobs)
        if piece.cached is not None and self.cached is None:
            self.cached = piece.cached
        if piece.finish is not None:
            self.finish = Finish(piece.finish)
        if piece.ids and self.on_tokens is not None and self.on_tokens(np.asarray(piece.ids, np.int32)) is True:
            self.stopped = self.finish is None
        return self.stopped

    @property
    def over(self) -> Finish | None:
        """Why it is over, where the last piece need not have said so."""
        if self.stopped:
            return Finish.ABORTED
        if self.finish is None and self.ids and self.ids[-1] in self.sampling.stop_ids:
            return Finish.STOP
        return self.finish or (Finish.LENGTH if len(self.ids) >= self.most else None)

    def generation(self, version: int, finish: Finish) -> Generation:
        total = len(self.prompt) + len(self.ids) if self.ids else 0
        return Generation(
            token_ids=np.asarray(self.ids, np.int32),
            logprobs=np.minimum(np.asarray(self.logprobs, np.float32), 0),
            versions=version_spans([version] * len(self.ids)),
            kv_versions=version_spans([version] * total),
            finish=finish,
            cached_tokens=min(self.cached or 0, len(self.prompt) - 1),
        )


class ServerEngine:
    """An ``InferenceEngine`` over one server. ``interrupted`` counts the answers that it broke off."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        *,
        context: int,
        slots: int,
        vocabulary: int,
        chain: Chain | None = None,
        version: int = 0,
    ) -> None:
        self.interrupted = 0
        self._client, self._model = client, model
        self._context, self._vocabulary, self._version = context, vocabulary, version
        self._total, self._held = slots * context, 0
        self._slots = trio.CapacityLimiter(slots)
        self._prefixes = Prefixes(self._total, chain or Chain())

    async def generate(
        self,
        prompt: Ids,
        sampling: Sampling,
        *,
        session: SessionId,
        on_tokens: OnTokens | None = None,
        on_abort: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """See ``InferenceEngine``. ReplicaLost when the server stays away; UserError for a wrong model or API key."""
        request = StepRequest(0, prompt, sampling, session)  # an id that the model has not takes vLLM's engine down
        check(request, context=self._context, vocabulary=self._vocabulary)
        most = min(sampling.max_tokens, self._context - len(prompt))
        key = draw_key(sampling.seed, session, sampling.turn)
        live = _Live(prompt, sampling, key, most, on_tokens)
        try:
            async with self._slots:
                self._held += len(prompt) + most
                try:
                    finish = await self._run(live)
                finally:
                    self._held -= len(prompt) + most
        except trio.Cancelled:
            if on_abort is not None:
                on_abort(live.generation(self._version, Finish.ABORTED))
            raise
        return live.generation(self._version, finish)

    async def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        raise ValueError(
            f"{self._client.base_url}: a server's weights cannot be updated from here: train with engine.name = 'vllm' "
            "or 'transformers', and start the server anew from a checkpoint"
        )

    def capacity(self) -> Capacity:
        """By what was asked of the server from here: a request may need its prompt and all of its budget."""
        waiting = self._slots.statistics().tasks_waiting
        free = max(0, self._total - self._held)
        return Capacity(self._total, free, self._slots.borrowed_tokens, waiting, self._context)

    def resident(self, prompt: Ids) -> int:
        return self._prefixes.resident(prompt)

    async def _run(self, live: _Live) -> Finish:
        believed = self._prefixes.believed(live.prompt)
        failures = 0
        while True:
            before = len(live.ids)
            try:
                await completions.stream(self._client, self._body(live), self._taking(live))
            except Interrupted as problem:
                self.interrupted += 1
                failures = 1 if len(live.ids) > before else failures + 1
                if live.over is None:
                    if failures > len(PAUSES_S):
                        self._prefixes.clear()
                        raise ReplicaLost(f"{self._client.base_url}: {problem}, {failures} times in a row") from problem
                    await trio.sleep(PAUSES_S[failures - 1])
            if (finish := live.over) is not None:
                if live.cached is not None:
                    self._prefixes.correct(believed, live.cached)
                self._prefixes.hold(np.concatenate([live.prompt, np.asarray(live.ids[:-1], np.int32)]))
                return finish

    def _body(self, live: _Live) -> dict[str, Any]:
        done = len(live.ids)  # a broken answer goes on after what came, with draws that it has not had
        prompt = [*live.prompt.tolist(), *live.ids]
        seed = (live.key if not done else draw_key(live.key, "", done)) & (2**62 - 1)
        return completions.body(self._model, prompt, live.sampling, max_tokens=live.most - done, seed=seed)

    def _taking(self, live: _Live) -> Callable[[Piece], bool]:
        def take(piece: Piece) -> bool:
            if piece.ids and not live.ids:
                self._prefixes.hold(live.prompt)  # siblings may follow it now
            return live.take(piece)

        return take
