"""One gateway session: locate -> encode -> generate -> decode -> commit, for in-process agents and for HTTP alike.

Invariants: a request that is refused changes nothing; every token the engine gave back is committed exactly once, as
an answer or as an aborted one; generations have turn numbers 0, 1, … in the order they start, siblings of n > 1
their own; after ``finish`` nothing is committed. The session's config decides how tokens are sampled: what the caller
asks for is recorded, and only a lower ``max_tokens`` counts, unless the session trusts its client.

Knows no wire format and no socket; the tree, the codec and the engine do the work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import trio
from attrs import asdict, define, evolve, field, frozen

from uniagent.engine.gateway.attempt import GRACE_S, Attempt, Listener
from uniagent.engine.gateway.record import Requests
from uniagent.engine.messages import Delta, ModelCall, Problem, Reply, Usage
from uniagent.engine.ports import (
    Finish,
    Generation,
    Ids,
    InferenceEngine,
    Json,
    ModelEndpoint,
    Sampling,
    SessionSampling,
)
from uniagent.engine.trajectory.types import Export, Sampled, Segment

if TYPE_CHECKING:
    from uniagent.engine.gateway.codec import Codec, Decoded
    from uniagent.engine.trajectory.tree import Node, Place, TurnTree

OFFLOAD_CHARACTERS = 2000  # new content longer than this is encoded off the loop


class Offload(Protocol):
    """Runs a slow pure function off the loop: a thread in production, inline in simulations."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


async def inline(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


async def in_thread(fn: Callable[..., Any], *args: Any) -> Any:
    return await trio.to_thread.run_sync(fn, *args)


@frozen
class SessionParts:
    """What all sessions of a gateway share. ``trust_client``: the client's temperature, top_p, top_k and seed are
    honoured (never in training)."""

    codec: Codec
    engine: InferenceEngine
    offload: Offload
    seed: int = 0
    trust_client: bool = False


@define(eq=False)
class GatewaySession:
    """``engine_s`` sums the time in the engine."""

    id: str
    address: ModelEndpoint  # without ``complete``
    parts: SessionParts
    tree: TurnTree
    sampling: SessionSampling
    training: bool = True
    reward: float | None = None
    export: Export | None = None
    engine_s: float = 0.0
    lost: int = 0  # tokens an engine sampled but never gave back
    generations: int = 0
    memo: Any = None  # of the wire side: what this session's requests have in common
    _attempts: set[Attempt] = field(factory=set, repr=False)
    _undelivered: dict[str, Node] = field(factory=dict, repr=False)
    _requests: Requests = field(factory=Requests, repr=False)
    _turns: list[Mapping[str, Json]] = field(factory=list, repr=False)

    # ------------------------------------------------------------ asking the model

    async def complete(
        self, call: ModelCall, on_delta: Callable[[Delta], None] | None = None, *, listener: Listener | None = None
    ) -> list[Reply]:
        """``call.n`` replies. The caller says ``delivered`` once their last byte is out.

        Problem: 400 for a prompt that does not fit, 403 for a spent budget, 409 for a finished session. Cancelling
        commits what was sampled so far as aborted; ``listener.gone`` leaves it undelivered.
        """
        if listener is None and on_delta is not None:
            listener = _Deltas(on_delta)
        place, delta = await self._encode(call)
        prompt = _join(place.prefix(), delta)
        plans = self._plans(call, len(prompt))
        if listener is not None:
            listener.started(len(prompt))
        if len(plans) == 1:
            replies = [await self._generate(call, place, delta, prompt, plans[0], listener, 0)]
        else:
            replies = await self._siblings(call, place, delta, prompt, plans, listener)
        await trio.lowlevel.checkpoint_if_cancelled()
        return replies

    async def ask(self, call: ModelCall) -> Reply:
        """One reply, delivered by returning it: ``ModelEndpoint.complete`` of in-process agents."""
        (reply,) = await self.complete(evolve(call, n=1, stream=False) if call.n != 1 or call.stream else call)
        self.delivered([reply])
        return reply

    async def count(self, call: ModelCall) -> int:
        """Prompt tokens of a request; changes nothing."""
        place, delta = await self._encode(call)
        return len(place.prefix()) + sum(len(s.ids) for s in delta)

    def delivered(self, replies: list[Reply]) -> None:
        """The last byte of these replies was written."""
        for reply in replies:
            node = self._undelivered.pop(reply.id, None)
            if node is not None and self.export is None:
                self.tree.mark_delivered(node)

    def endpoint(self) -> ModelEndpoint:
        """How an agent reaches this session, in this process or over HTTP."""
        return evolve(self.address, complete=self.ask)

    @property
    def turns(self) -> tuple[Mapping[str, Json], ...]:
        """The record: one JSON-able object a generation; ``engine.gateway.record.replay`` gives the raw requests."""
        return tuple(self._turns)

    # ------------------------------------------------------------ the end

    async def finish(self, reward: float | None = None) -> Export:
        """Ends what still runs, then exports; the same export when asked again."""
        if reward is not None and self.export is None:
            self.reward = reward
        with trio.move_on_after(2 * GRACE_S, shield=True):
            while self._attempts:
                attempt = next(iter(self._attempts))
                attempt.end("aborted")
                await attempt.done.wait()
                await trio.lowlevel.cancel_shielded_checkpoint()
        if self.export is None:
            self.export = self.tree.export()
            self._undelivered.clear()
            self.memo = None
        return self.export

    @property
    def running(self) -> int:
        """Generations under way."""
        return len(self._attempts)

    # ------------------------------------------------------------ one request

    async def _encode(self, call: ModelCall) -> tuple[Place, tuple[Segment, ...]]:
        self._check_open()
        place = self.tree.locate(call, trio.current_time())
        if place.known_delta is not None:
            return place, place.known_delta
        codec = self.parts.codec
        if sum(len(m.text) + len(m.reasoning) for m in place.pending) > OFFLOAD_CHARACTERS:
            delta = await self.parts.offload(codec.delta, call, place.pending, place.anchor)
            self._check_open()
        else:
            delta = codec.delta(call, place.pending, place.anchor)
        return place, delta

    def _check_open(self) -> None:
        if self.export is not None:
            raise Problem(409, "session_finished", f"session {self.id} is finished: open another one to go on")

    def _plans(self, call: ModelCall, prompt: int) -> list[Sampling]:
        """How each of the n generations is sampled; Problem when a budget is spent."""
        mine, context = self.sampling, self.parts.engine.capacity().context
        limit = min(context, mine.max_total_tokens) if mine.max_total_tokens else context
        if prompt >= limit:
            raise Problem(
                400,
                "context_length_exceeded",
                f"prompt is too long: {prompt} tokens >= {limit} maximum; shorten or compact the conversation",
            )
        if mine.max_generations is not None and self.generations + call.n > mine.max_generations:
            raise Problem(
                403,
                "generation_budget_spent",
                f"this session may make {mine.max_generations} generations and has made {self.generations}: "
                "stop here, or raise max_generations",
            )
        first = self.generations
        self.generations += call.n
        base = self._client_sampling(call) if self.parts.trust_client and not self.training else self._own_sampling()
        most = min(mine.max_tokens, limit - prompt, *((call.max_tokens,) if call.max_tokens else ()))
        return [evolve(base, max_tokens=most, turn=first + i) for i in range(call.n)]

    def _own_sampling(self) -> Sampling:
        s = self.sampling
        return Sampling(
            s.max_tokens, s.temperature, s.top_p, s.top_k, tuple(self.parts.codec.stop_ids), self.parts.seed
        )

    def _client_sampling(self, call: ModelCall) -> Sampling:
        asked = {k: call.asked[k] for k in ("temperature", "top_p", "top_k", "seed") if call.asked.get(k) is not None}
        return evolve(self._own_sampling(), **asked)

    async def _siblings(
        self,
        call: ModelCall,
        place: Place,
        delta: tuple[Segment, ...],
        prompt: Ids,
        plans: list[Sampling],
        listener: Listener | None,
    ) -> list[Reply]:
        replies: dict[int, Reply] = {}

        async def one(choice: int) -> None:
            replies[choice] = await self._generate(call, place, delta, prompt, plans[choice], listener, choice)

        failures: list[BaseException] = []
        try:
            async with trio.open_nursery() as nursery:
                for choice in range(call.n):
                    nursery.start_soon(one, choice)
        except* (Problem, ValueError) as group:
            failures = list(group.exceptions)
        if failures:
            raise failures[0]
        return [replies[choice] for choice in range(call.n)]

    async def _generate(
        self,
        call: ModelCall,
        place: Place,
        delta: tuple[Segment, ...],
        prompt: Ids,
        sampling: Sampling,
        listener: Listener | None,
        choice: int,
    ) -> Reply:
        decoder = self.parts.codec.decoder(call)
        stream = _Stream(listener if call.stream or isinstance(listener, _Deltas) else None, choice)
        attempt = Attempt(decoder, listener, incremental=stream.listener is not None or bool(call.stop))
        self._attempts.add(attempt)
        started = trio.current_time()
        try:
            generation = await attempt.run(self.parts.engine, prompt, sampling, self.id, stream.emit)
            ended = trio.current_time()
            self.engine_s += ended - started
            if generation is None:
                self.lost += attempt.lost
                self.tree.commit(
                    place, delta=delta, answer=None, reply=None, started=started, ended=ended, parse_problem=None
                )
                raise Problem(499, "aborted", "the generation was aborted")
            decoded = decoder.finish(generation.finish)
            stream.rest(decoded)
            reply = self._reply(sampling, len(prompt), generation, decoded)
            answer = _sampled(generation, sampling, decoded, attempt.cause)
            node = self.tree.commit(
                place,
                delta=delta,
                answer=answer,
                reply=reply.message(),
                started=started,
                ended=ended,
                parse_problem=decoded.problem,
            )
            self._undelivered[reply.id] = node
            self._record(call, sampling, reply, started, ended, attempt.cause)
            return reply
        except ValueError as problem:
            raise Problem(400, "prompt_refused", f"the engine refused the prompt: {problem}") from problem
        finally:
            self._attempts.discard(attempt)

    def _reply(
        self, call: ModelCall, sampling: Sampling, prompt: int, generation: Generation, decoded: Decoded
    ) -> Reply:
        key = f"{self.id}/{sampling.turn}".encode()
        usage = Usage(prompt, len(generation.token_ids), generation.cached_tokens)
        return Reply(
            id=hashlib.blake2b(key, digest_size=12).hexdigest(),
            text=decoded.text,
            reasoning=decoded.reasoning,
            calls=decoded.calls,
            finish=decoded.finish,
            usage=usage,
            problem=decoded.problem,
        )

    def _record(
        self, call: ModelCall, sampling: Sampling, reply: Reply, started: float, ended: float, cause: str | None
    ) -> None:
        request = call.raw if isinstance(call.raw, Mapping) else {"messages": call.messages, "tools": call.tools}
        self._turns.append(
            {
                "turn": sampling.turn,
                "dialect": call.dialect,
                "request": self._requests.record(sampling.turn, request),
                "sampling": asdict(sampling),
                "asked": dict(call.asked) | ({"max_tokens": call.max_tokens} if call.max_tokens else {}),
                "usage": asdict(reply.usage),
                "started": started,
                "ended": ended,
                "finish": reply.finish,
                "reply": reply.id,
                "cause": cause,
                "problem": reply.problem,
            }
        )


@frozen
class _Deltas:
    """A listener that only wants the deltas."""

    delta: Callable[[Delta], None]

    def started(self, prompt_tokens: int) -> None: ...

    def gone(self) -> bool:
        return False


@define
class _Stream:
    """Passes deltas on, and at the end what the decoder had held back: the pieces add up to the whole answer."""

    listener: Listener | None
    choice: int
    text: int = 0
    reasoning: int = 0
    arguments: dict[int, int] = field(factory=dict)

    def emit(self, delta: Delta) -> None:
        if self.listener is None:
            return
        self.text += len(delta.text)
        self.reasoning += len(delta.reasoning)
        if delta.call_index is not None:
            self.arguments[delta.call_index] = self.arguments.get(delta.call_index, 0) + len(delta.arguments)
        self.listener.delta(evolve(delta, choice=self.choice) if self.choice else delta)

    def rest(self, decoded: Decoded) -> None:
        if self.listener is None:
            return
        if len(decoded.reasoning) > self.reasoning:
            self.emit(Delta(reasoning=decoded.reasoning[self.reasoning :]))
        if len(decoded.text) > self.text:
            self.emit(Delta(text=decoded.text[self.text :]))
        for index, call in enumerate(decoded.calls):
            written = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
            if index not in self.arguments:
                self.emit(Delta(call_index=index, call_id=call.id, call_name=call.name, arguments=written))
            elif len(written) > self.arguments[index]:
                self.emit(Delta(call_index=index, arguments=written[self.arguments[index] :]))


def _join(prefix: Ids, delta: tuple[Segment, ...]) -> Ids:
    return np.concatenate([prefix, *(s.ids for s in delta)], dtype=np.int32)


def _sampled(generation: Generation, sampling: Sampling, decoded: Decoded, cause: str | None) -> Sampled:
    """As the tree keeps it. A client that left is no abort: the answer ends there, undelivered."""
    finish = (
        "aborted" if cause == "aborted" else "stop" if generation.finish is Finish.ABORTED else generation.finish.value
    )
    return Sampled(
        token_ids=generation.token_ids,
        logprobs=generation.logprobs,
        versions=generation.versions,
        kv_versions=generation.kv_versions,
        finish=finish,
        sampling=sampling,
        cached_tokens=generation.cached_tokens,
        kept=generation.kept,
        used=decoded.used,
        closed=decoded.closed,
    )
