"""The slot table: which tokens every slot of a slot-cache engine holds, and what the next step computes. numpy only.

A slot is one row of the K/V cache and everything known about its tokens: ``ids[:total]``, of which ``[:have]`` have
their K/V and ``[:fresh]`` have K/V written by the current weights. A request owns its slot from admission to its end;
afterwards the slot keeps the K/V, so that the session's next turn, or any prompt with the same beginning, starts from
it, until a newcomer takes the slot that was idle longest.

Invariants
 - fresh <= have <= total <= context, and an idle slot has all three equal: only K/V of the current weights is reused;
 - K/V of [:fresh] never changes while it stays fresh, so it may be copied to another slot at any time;
 - of requests that share a beginning nobody has yet, one computes it and the others wait, then copy it;
 - pieces of long prompts take turns with shorter ones, the least recently served first: none starves.

Every method runs on the engine's thread, save ``resident``, which any thread may call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from uniagent.adapters.engines.sampling import draw_key
from uniagent.adapters.engines.spans import version_spans
from uniagent.engine.ports import Finish, Floats, Generation, Ids, KvPolicy, SessionId, StepRequest

Rows = npt.NDArray[np.int64]  # slot numbers

_WORTH = 16  # tokens of a shared beginning that are worth a step of waiting


@define(eq=False)
class Live:
    """A request in a slot. ``kept`` by position in the generation; ``cached`` tokens were not prefilled."""

    request: StepRequest
    slot: int
    order: int
    cached: int | None = None
    served: int = 0  # the last step that computed a piece of its prompt
    kept: dict[int, Ids] = field(factory=dict)


@frozen
class Copy:
    """K/V of [begin, end) from one slot to another, before anything else of the step."""

    source: int
    target: int
    begin: int
    end: int


@frozen
class Piece:
    """``take`` tokens of a slot from ``begin`` on, to be prefilled."""

    slot: int
    begin: int
    take: int


@frozen(eq=False)
class Plan:
    """One step: copies, then one forward over the next token of each decoding slot and over pieces of prompts."""

    copies: Sequence[Copy]
    decode: Rows
    pieces: Sequence[Piece]


class Slots:
    def __init__(self, count: int, context: int) -> None:
        self.count, self.context, self.version = count, context, 0
        self.ids = np.zeros((count, context), np.int32)
        self.logprobs = np.zeros((count, context), np.float32)
        self.versions = np.zeros((count, context), np.int32)  # whose weights sampled the token
        self.kv_versions = np.zeros((count, context), np.int32)  # whose weights wrote its K/V
        self.total, self.have, self.fresh = (np.zeros(count, np.int64) for _ in range(3))
        self.live: list[Live | None] = [None] * count
        self.active = np.zeros(count, np.bool_)  # live is not None
        self.start, self.limit = np.zeros(count, np.int64), np.zeros(count, np.int64)  # prompt's end, longest total
        self.key = np.zeros(count, np.uint64)
        self.temperature, self.top_p = np.ones(count, np.float32), np.ones(count, np.float64)
        self.top_k = np.zeros(count, np.int32)
        self.stops = np.full((count, 1), -1, np.int32)
        self._owner: list[SessionId | None] = [None] * count
        self._used = np.zeros(count, np.int64)  # when a request last entered or left
        self._settled = np.zeros(count, np.bool_)  # its own prefill has begun: no more copying
        self._clock = 0

    # ------------------------------------------------------------ requests

    def admit(self, request: StepRequest) -> int | None:
        """Give the request a slot; None: all are taken."""
        free = np.flatnonzero(~self.active)
        if not free.size:
            return None
        prompt, sampling = request.prompt, request.sampling
        held = np.minimum(self._common(prompt), self.fresh)
        best = min(int(held.max()), len(prompt) - 1)
        slot = self._choose(free, held, best, request.session)
        keep = min(int(held[slot]), len(prompt) - 1)
        self._clock += 1
        self.fresh[slot] = keep
        self.ids[slot, keep : len(prompt)] = prompt[keep:]
        self.total[slot], self.have[slot] = len(prompt), keep
        self.start[slot] = len(prompt)
        self.limit[slot] = min(len(prompt) + sampling.max_tokens, self.context)
        self.key[slot] = draw_key(sampling.seed, request.session, sampling.turn)
        self.temperature[slot], self.top_p[slot], self.top_k[slot] = (
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
        )
        self._set_stops(slot, sampling.stop_ids)
        self._owner[slot], self._used[slot], self._settled[slot] = request.session, self._clock, False
        whole = keep if keep == len(prompt) - 1 else None  # nothing to prefill: it decodes at once
        self.live[slot], self.active[slot] = Live(request, slot, self._clock, cached=whole), True
        return slot

    def _choose(self, free: Rows, held: Rows, best: int, session: SessionId) -> int:
        """In place where the session's own slot, or a slot that loses nothing, has the longest beginning; otherwise
        the slot idle longest, but not the one that would be copied from."""
        longest = free[held[free] >= best] if best else free[:0]
        for slot in longest:
            if self._owner[slot] == session or self.total[slot] <= best:
                return int(slot)
        victims = np.setdiff1d(free, longest[:1]) if free.size > 1 else free
        empty = victims[self.total[victims] == 0]
        return int(empty[0]) if empty.size else int(victims[self._used[victims].argmin()])

    def _set_stops(self, slot: int, ids: Sequence[int]) -> None:
        if len(ids) > self.stops.shape[1]:
            wider = np.full((self.count, len(ids)), -1, np.int32)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = -1
        self.stops[slot, : len(ids)] = ids

    def release(self, slot: int, finish: Finish) -> Generation:
        """The request ends; its K/V stays for whoever begins alike."""
        live = self.live[slot]
        assert live is not None
        start, total, have = int(self.start[slot]), int(self.total[slot]), int(self.have[slot])
        wrote = np.full(total, self.version, np.int32)  # the last token's K/V was never needed
        wrote[:have] = self.kv_versions[slot, :have]
        kept = tuple(live.kept.get(n) for n in range(total - start)) if live.kept else None
        generation = Generation(
            token_ids=self.ids[slot, start:total].copy(),
            logprobs=self.logprobs[slot, start:total].copy(),
            versions=version_spans(self.versions[slot, start:total]),
            kv_versions=version_spans(wrote),
            finish=finish,
            cached_tokens=live.cached or 0,
            kept=kept,
        )
        self._clock += 1
        self._used[slot] = self._clock
        self.total[slot] = self.have[slot] = self.fresh[slot]
        self.live[slot], self.active[slot] = None, False
        return generation

    # ------------------------------------------------------------ steps

    def plan(self, budget: int, step: int) -> Plan:
        """What step number ``step`` computes, with at most ``budget`` tokens of prompts. Copies count as done."""
        todo = np.where(self.active, self.total - self.have, 0)
        filling = [live for slot in np.flatnonzero(todo > 1) if (live := self.live[slot]) is not None]
        filling.sort(key=lambda live: (live.served, live.order))
        copies: list[Copy] = []
        pieces: list[Piece] = []
        for live in filling:
            if not self._settled[live.slot] and not self._settle(live, copies):
                continue
            begin = int(self.have[live.slot])
            take = min(int(self.total[live.slot]) - begin, budget)
            if take:
                budget -= take
                live.served = step
                pieces.append(Piece(live.slot, begin, take))
        return Plan(copies, np.flatnonzero(todo == 1), pieces)

    def _settle(self, live: Live, copies: list[Copy]) -> bool:
        """Copy what another slot has of its beginning; False: a longer beginning is being computed, wait for it."""
        slot = live.slot
        have, need = int(self.have[slot]), int(self.total[slot]) - 1
        common = self._common(self.ids[slot, :need])
        held = np.minimum(common, self.fresh)
        source = int(held.argmax())
        if have == self.fresh[slot] and held[source] > have:
            copies.append(Copy(source, slot, have, int(held[source])))
            self.kv_versions[slot, have : held[source]] = self.version
            have = int(held[source])
            self.have[slot] = self.fresh[slot] = have
        coming = self.active & self._settled & (self.total - self.have > 1) & (self.fresh == self.have)
        gain = int(common[coming].max(initial=0)) - have
        if gain >= _WORTH and 2 * gain >= need - have:
            return False
        self._settled[slot] = True
        if live.cached is None:
            live.cached = have
        return True

    def advance(self, plan: Plan) -> None:
        """The plan's forward is done: its tokens have their K/V."""
        rows = plan.decode
        here = self.have[rows]
        self.kv_versions[rows, here] = self.version
        self.fresh[rows] += self.fresh[rows] == here
        self.have[rows] += 1
        for piece in plan.pieces:
            end = piece.begin + piece.take
            self.kv_versions[piece.slot, piece.begin : end] = self.version
            if self.fresh[piece.slot] == piece.begin:
                self.fresh[piece.slot] = end
            self.have[piece.slot] = end

    def append(self, rows: Rows, tokens: Ids, logprobs: Floats) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """One sampled token a row -> (ended by a stop id [B], ended by length [B])."""
        here = self.total[rows]
        self.ids[rows, here] = tokens
        self.logprobs[rows, here] = logprobs
        self.versions[rows, here] = self.version
        self.total[rows] = here + 1
        stopped = (tokens[:, None] == self.stops[rows]).any(1)
        return stopped, (here + 1 >= self.limit[rows]) & ~stopped

    def renew(self, version: int, kv: KvPolicy) -> None:
        """The weights changed. No K/V of before is reused by a new request; running ones go by ``kv``."""
        self.fresh[:] = 0
        idle = ~self.active
        self.total[idle] = self.have[idle] = 0
        if kv is KvPolicy.RECOMPUTE:
            self.have[:] = 0
            self._settled[:] = False
        self.version = version

    # ------------------------------------------------------------ prefixes

    def _common(self, prompt: Ids) -> Rows:
        """[P] -> [slots] how many tokens of the prompt each slot begins with."""
        known = min(len(prompt), self.context)
        differ = self.ids[:, :known] != prompt[:known]
        first = np.where(differ.any(1), differ.argmax(1), known)
        return np.minimum(first, self.total)

    def resident(self, prompt: Ids) -> int:
        """Tokens of the prompt that need no prefill."""
        return int(np.minimum(self._common(prompt), self.fresh).max())
