"""SimulatedEngine: an ``InferenceEngine`` of token counts, with continuous batching as processor sharing.

Between two events (a request comes, its prefill ends, its last token comes, an update, a new speed) every decoding
request gets one token a step and the head of the prefill queue up to a chunk of prompt tokens a step; a step's length
comes from the cost model. So a request ends when the steps served reach its target: a heap, O(log n) an event, however
many tokens there are. Invariants: KV reserved, resident and free add up to the total; a request ends exactly once; a
token is sampled once and has the version of the weights at that moment; an update loses none.

Simplified: a request reserves the KV of its whole answer when it starts (no preemption), and waiting is first come,
first served. Idle prefixes are dropped least recently used first, a session's before its group's; an update makes all
of them useless (each version has its own salt), and with ``recompute`` running requests are prefilled again.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import trio
from attrs import define, field

from uniagent.engine.ports import (
    Capacity,
    Finish,
    Generation,
    Ids,
    KvPolicy,
    OnTokens,
    Sampling,
    SessionId,
    VersionSpan,
    Weights,
)
from uniagent.engine.rollout.router import ReplicaLost
from uniagent.engine.simulate.clock import Timers
from uniagent.engine.simulate.costs import Costs
from uniagent.engine.simulate.tokens import Prompt, Tokens, as_ids

_NEARLY = 1e-6  # of a token: rounding
_TICK_S = 1e-6  # the shortest wait, so that rounding never makes time stand still


@define(eq=False)
class _Request:
    prompt: Prompt
    tokens: int
    on_tokens: OnTokens | None
    to_prefill: float = 0.0
    cached: int = 0
    begun: float = 0.0  # steps served when it began to decode, less the tokens it had
    decoding: bool = False
    told: int = 0
    spans: list[tuple[int, int]] = field(factory=list)  # (version, first token)
    done: trio.Event = field(factory=trio.Event)
    generation: Generation | None = None
    sampled: int = 0  # while it does not decode


@define(eq=False)
class SimulatedEngine:
    """One replica. ``tokens`` sampled, ``prefilled`` and ``cached`` prompt tokens and the seconds only grow."""

    timers: Timers
    costs: Costs
    context: int = 1 << 30
    version: int = 0
    tokens: int = 0
    prefilled: float = 0.0
    prefilled_again: float = 0.0
    cached: int = 0
    prompts: int = 0
    busy_s: float = 0.0
    paused_s: float = 0.0
    lost: bool = False
    _speed: float = 1.0
    _paused: int = 0
    _at: float = 0.0
    _step_s: float = 1.0
    _served: float = 0.0  # decode steps so far
    _batch: int = 0
    _kv: float = 0.0  # of decoding requests
    _free: int = field(init=False)
    _waiting: deque[_Request] = field(factory=deque)
    _prefill: deque[_Request] = field(factory=deque)
    _decode: list[tuple[float, int, _Request]] = field(factory=list)
    _live: dict[_Request, None] = field(factory=dict)  # started, in order
    _idle: OrderedDict[tuple[str, str], int] = field(factory=OrderedDict)  # resident, of nobody running
    _idle_tokens: int = 0
    _load: Capacity | None = None  # as asked for since the last change
    _groups: dict[str, int] = field(factory=dict)  # group -> running requests over its common tokens
    _order: itertools.count[int] = field(factory=itertools.count)

    def __attrs_post_init__(self) -> None:
        self._free = self.costs.kv_tokens

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
        """Samples exactly ``sampling.max_tokens``. ``prompt`` is a ``tokens.Prompt``."""
        if self.lost:
            raise ReplicaLost("the simulated replica is lost")
        asked: Any = prompt
        if len(asked) + sampling.max_tokens > min(self.context, self.costs.kv_tokens):
            raise ValueError(
                f"{len(asked)} + {sampling.max_tokens} tokens never fit: the context is {self.context}, the KV "
                f"{self.costs.kv_tokens} tokens"
            )
        request = _Request(asked, sampling.max_tokens, on_tokens)
        self._advance()
        self._waiting.append(request)
        self._plan()
        try:
            await request.done.wait()
        except trio.Cancelled:
            if request.generation is None and not self.lost:
                self._advance()
                self._end(request, Finish.ABORTED)
                self._plan()
            if on_abort is not None and request.generation is not None:
                on_abort(request.generation)
            raise
        if request.generation is None:
            raise ReplicaLost("the simulated replica was lost")
        return request.generation

    async def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        """Generation stands still for ``costs.sync_s``."""
        self.pause()
        try:
            await trio.sleep(self.costs.sync_s)
            self.load(version, kv)
        finally:
            self.paused_s += self.costs.sync_s
            self.resume()

    def capacity(self) -> Capacity:
        if self._load is None:
            self._load = Capacity(
                kv_total=self.costs.kv_tokens,
                kv_free=self._free + self._idle_tokens,
                running=len(self._live),
                waiting=len(self._waiting),
                context=self.context,
            )
        return self._load

    def resident(self, prompt: Ids) -> int:
        asked: Any = prompt
        return self._resident(asked)

    # ------------------------------------------------------------ what the rest of the simulation does to it

    def load(self, version: int, kv: KvPolicy) -> None:
        """New weights, at once."""
        self._advance()
        self.version = version
        for tokens in self._idle.values():
            self._free += tokens
        self._idle.clear()
        self._idle_tokens = 0
        again: set[str] = set()
        for request in list(self._live):
            if kv is KvPolicy.RECOMPUTE:
                self._stop_decoding(request)
                own = request.prompt.length - request.prompt.common + request.sampled
                first = request.prompt.group not in again
                again.add(request.prompt.group)
                if not request.to_prefill:
                    self._prefill.append(request)
                request.to_prefill = float(own + (request.prompt.common if first else 0))
                self.prefilled_again += request.to_prefill
            self._span(request)
        self._plan()

    def pause(self) -> None:
        """Nothing runs until as many ``resume``; requests may come."""
        self._advance()
        self._paused += 1
        self._plan()

    def resume(self) -> None:
        self._advance()
        self._paused -= 1
        self._plan()

    def share(self, speed: float) -> None:
        """From now on the engine has this share of the device's time."""
        self._advance()
        self._speed = speed
        self._plan()

    def drain(self) -> None:
        """End every request with what it has: finish ABORTED, to be gone on with elsewhere; drop all KV."""
        self._advance()
        for request in [*self._live, *self._waiting]:
            self._end(request, Finish.ABORTED)
        self._free += sum(self._idle.values())
        self._idle.clear()
        self._idle_tokens = 0
        self._plan()

    def lose(self) -> None:
        """The replica is gone with all it was doing."""
        self._advance()
        self.lost = True
        for request in [*self._live, *self._waiting]:
            self._stop_decoding(request)
            self._tell(request, request.sampled)
            request.done.set()
        self._live.clear()
        self._waiting.clear()
        self._prefill.clear()
        self._decode.clear()
        self._groups.clear()
        self._batch, self._kv = 0, 0.0
        self._load = None
        self.timers.arm(self, math.inf, self._ring)

    def requests(self) -> int:
        return len(self._live) + len(self._waiting)

    def balanced(self) -> bool:
        """Whether reserved, resident and free KV add up."""
        held = sum(r.prompt.length - r.prompt.common + r.tokens for r in self._live)
        common = {r.prompt.group: r.prompt.common for r in self._live}
        return self.lost or self._free + sum(self._idle.values()) + held + sum(common.values()) == self.costs.kv_tokens

    # ------------------------------------------------------------ time

    def _advance(self) -> None:
        """Serve what was served since the last event."""
        now = trio.current_time()
        passed, self._at = now - self._at, now
        if self._paused or passed <= 0 or not (self._batch or self._prefill):
            return
        passed *= self._speed
        self.busy_s += passed
        steps = passed / self._step_s
        self._served += steps
        self._kv += steps * self._batch
        budget = steps * self.costs.prefill_chunk
        while self._prefill and budget > 0:
            head = self._prefill[0]
            part = min(budget, head.to_prefill)
            head.to_prefill -= part
            self.prefilled += part
            budget -= part
            if head.to_prefill > _NEARLY:
                break
            self._prefill.popleft()
            self._start_decoding(head)

    def _plan(self) -> None:
        """End what is done, start what fits, and set the alarm for the next event. The last step of every change."""
        self._load = None
        while self._decode and self._decode[0][0] <= self._served + _NEARLY:
            _, _, request = heapq.heappop(self._decode)
            if request.decoding and request.begun + request.tokens <= self._served + _NEARLY:
                self._end(request, Finish.STOP)
        while self._waiting and self._start(self._waiting[0]):
            self._waiting.popleft()
        while self._decode and not self._decode[0][2].decoding:
            heapq.heappop(self._decode)
        when = math.inf
        if not self._paused and self._speed > 0 and (self._batch or self._prefill):
            steps = self._decode[0][0] - self._served if self._decode else math.inf
            head = self._prefill[0].to_prefill if self._prefill else 0.0
            if head:
                steps = min(steps, head / self.costs.prefill_chunk)
            middle = self._kv + self._batch * steps / 2
            self._step_s = self.costs.step_s(self._batch, middle)
            if head:
                self._step_s += self.costs.prefill_chunk * self.costs.prefill_token_s
            self._step_s = max(_TICK_S, self._step_s)
            when = trio.current_time() + max(_TICK_S, steps * self._step_s / self._speed)
        self.timers.arm(self, when, self._ring)

    def _ring(self) -> None:
        self._advance()
        self._plan()

    # ------------------------------------------------------------ one request

    def _start(self, request: _Request) -> bool:
        """Take its KV; False when it does not fit yet."""
        prompt = request.prompt
        common, own = prompt.common, prompt.length - prompt.common
        group, session = ("group", prompt.group), ("session", prompt.session)
        here = prompt.group in self._groups or self._idle.get(group, 0) >= common
        mine = min(self._idle.get(session, 0), own) if here else 0
        need = own + request.tokens + (0 if prompt.group in self._groups else common)
        if need > self._free + self._idle_tokens:
            return False
        for key in (session, group):
            self._release(key)
        while self._free < need:
            self._release(next(iter(self._idle)))
        self._free -= need
        self._groups[prompt.group] = self._groups.get(prompt.group, 0) + 1
        request.cached = (common if here else 0) + mine
        self.cached += request.cached
        self.prompts += prompt.length
        request.to_prefill = float(max(1, prompt.length - request.cached))  # the last token is always run
        self._live[request] = None
        self._span(request)
        self._prefill.append(request)
        return True

    def _start_decoding(self, request: _Request) -> None:
        request.to_prefill = 0.0
        request.decoding = True
        request.begun = self._served - request.sampled
        self._batch += 1
        self._kv += request.prompt.length + request.sampled
        heapq.heappush(self._decode, (request.begun + request.tokens, next(self._order), request))
        self._tell(request, 1)

    def _stop_decoding(self, request: _Request) -> None:
        if request.decoding:
            done = self._served - request.begun
            request.sampled = min(request.tokens, math.floor(done + _NEARLY))
            request.decoding = False
            self._batch -= 1
            self._kv = max(0.0, self._kv - request.prompt.length - done) if self._batch else 0.0

    def _end(self, request: _Request, finish: Finish) -> None:
        if request not in self._live:
            self._waiting.remove(request)
            request.generation = _generation(request, finish)
            request.done.set()
            return
        self._stop_decoding(request)
        if finish is Finish.STOP:
            request.sampled = request.tokens
        elif request.to_prefill:
            self._prefill.remove(request)
        del self._live[request]
        prompt = request.prompt
        own = prompt.length - prompt.common + request.sampled
        self._free += request.tokens - request.sampled
        self._keep(("session", prompt.session), own)
        self._groups[prompt.group] -= 1
        if not self._groups[prompt.group]:
            del self._groups[prompt.group]
            self._keep(("group", prompt.group), prompt.common)
        elif ("group", prompt.group) in self._idle:
            self._idle.move_to_end(("group", prompt.group))
        self.tokens += request.sampled
        self._tell(request, request.sampled)
        request.generation = _generation(request, finish)
        request.done.set()

    def _tell(self, request: _Request, sampled: int) -> None:
        """At the first token, and at the end: the router counts work by it."""
        if request.on_tokens is not None and sampled > request.told:
            new, request.told = sampled - request.told, sampled
            request.on_tokens(as_ids(Tokens(new)))

    def _span(self, request: _Request) -> None:
        """Tokens from here on come from the weights of now."""
        done = math.floor(self._served - request.begun + _NEARLY) if request.decoding else request.sampled
        if request.spans and request.spans[-1][1] == done:
            request.spans.pop()
        request.spans.append((self.version, done))

    # ------------------------------------------------------------ idle prefixes

    def _keep(self, key: tuple[str, str], tokens: int) -> None:
        self._release(key)
        self._idle[key] = tokens
        self._idle_tokens += tokens

    def _release(self, key: tuple[str, str]) -> None:
        tokens = self._idle.pop(key, 0)
        self._free += tokens
        self._idle_tokens -= tokens

    def _resident(self, prompt: Prompt) -> int:
        common = prompt.common
        if prompt.group not in self._groups and self._idle.get(("group", prompt.group), 0) < common:
            return 0
        return common + min(self._idle.get(("session", prompt.session), 0), prompt.length - common)


def _generation(request: _Request, finish: Finish) -> Generation:
    starts = [(v, start) for v, start in request.spans if start < request.sampled]
    ends = [*(start for _, start in starts[1:]), request.sampled]
    spans = tuple(VersionSpan(v, start, end) for (v, start), end in zip(starts, ends, strict=True)) if starts else ()
    tokens: Any = Tokens(request.sampled)
    return Generation(tokens, tokens, spans, (), finish, request.cached)
