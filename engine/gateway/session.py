"""One gateway session: locate -> encode -> generate -> decode -> commit, for in-process agents and for HTTP alike.

Invariants: a request that is refused changes nothing; every token the engine gave back is committed exactly once, as
an answer or as an aborted one; generations have turn numbers 0, 1, … in the order they start, siblings of n > 1
their own; after ``finish`` nothing is committed. The session's config decides how tokens are sampled: what the caller
asks for is recorded, and only a lower ``max_tokens`` counts, unless the session trusts its client.

Knows no wire format and no socket; the tree, the codec and the engine do the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import trio
from attrs import define, evolve, field, frozen

from uniagent.engine.gateway.attempt import Attempt, Listener
from uniagent.engine.gateway.codec import Break, Codec
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
from uniagent.engine.trajectory.nodes import Node, Place
from uniagent.engine.trajectory.types import Export, Provenance, Sampled, Segment

if TYPE_CHECKING:
    from uniagent.engine.gateway.decoder import Decoded
    from uniagent.engine.trajectory.tree import TurnTree

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
    """``engine_s`` sums the time in the engine; ``breaks`` counts the chains begun anew because the template changed
    what the engine had seen."""

    id: str
    address: ModelEndpoint  # without ``complete``
    parts: SessionParts
    tree: TurnTree
    sampling: SessionSampling
    training: bool = True
    reward: float | None = None
    export: Export | None = None
    engine_s: float = 0.0
    generations: int = 0
    breaks: int = 0
    memo: Any = None  # of the wire side: what this session's requests have in common
    spent: trio.Event = field(factory=trio.Event, repr=False)  # a request was refused: no generation is left
    _closing: bool = False
    _attempts: set[Attempt] = field(factory=set, repr=False)
    _undelivered: dict[str, Node] = field(factory=dict, repr=False)
    _requests: Requests = field(factory=Requests, repr=False)
    _turns: list[dict[str, Json]] = field(factory=list, repr=False)

    # ------------------------------------------------------------ asking the model

    async def complete(
        self, call: ModelCall, on_delta: Callable[[Delta], None] | None = None, *, listener: Listener | None = None
    ) -> list[Reply]:
        """``call.n`` replies. The caller says ``delivered`` once their last byte is out.

        Problem: 400 for a prompt that does not fit, 403 for a spent budget, 410 for a finished session. Cancelling
        commits what was sampled so far as aborted.
        """
        if listener is None and on_delta is not None:
            listener = _Deltas(on_delta)
        opening = self._opening(call)
        place, delta = await self._encode(call)
        prompt = place.prompt(delta if opening is None else (*delta, Segment(Provenance.TEMPLATE, opening)))
        plans = self._plans(call, len(prompt))
        if listener is not None:
            listener.started(self._reply_id(plans[0]), len(prompt))
        if len(plans) == 1:
            replies = [await self._generate(call, place, delta, opening, prompt, plans[0], listener, 0)]
        else:
            replies = await self._siblings(call, place, delta, opening, prompt, plans, listener)
        await trio.lowlevel.checkpoint_if_cancelled()
        return replies

    def leave(self, listener: Listener) -> None:
        """Whoever listened is gone: its generations end or never begin, what they sampled stays undelivered."""
        listener.left = True
        for attempt in tuple(self._attempts):
            if attempt.listener is listener:
                attempt.end("left")

    async def ask(self, call: ModelCall) -> Reply:
        """One reply, delivered by returning it: ``ModelEndpoint.complete`` of in-process agents."""
        (reply,) = await self.complete(evolve(call, n=1, stream=False) if call.n != 1 or call.stream else call)
        self.delivered([reply])
        return reply

    async def count(self, call: ModelCall) -> int:
        """Prompt tokens of a request; changes nothing."""
        place, delta = await self._encode(call)
        return len(place.prompt(delta))

    def delivered(self, replies: list[Reply]) -> None:
        """The last byte of these replies was written."""
        for reply in replies:
            node = self._undelivered.pop(reply.id, None)
            if node is not None and self.export is None:
                self.tree.mark_delivered(node)

    def endpoint(self) -> ModelEndpoint:
        """How an agent reaches this session, in this process or over HTTP."""
        return evolve(self.address, complete=self.ask, spent=self.spent.wait, acted=self.last_action)

    def last_action(self) -> tuple[str, int]:
        """This session and the turn of its last answer; -1 before the first."""
        return self.id, int(self._turns[-1]["turn"]) if self._turns else -1

    @property
    def turns(self) -> tuple[Mapping[str, Json], ...]:
        """The record: one JSON-able object a generation; ``engine.gateway.record.replay`` gives the raw requests."""
        return tuple(self._turns)

    # ------------------------------------------------------------ the end

    async def finish(self, reward: float | None = None) -> Export:
        """Ends what still runs, then exports; the same export when asked again."""
        if reward is not None and self.export is None:
            self.reward = reward
        self._closing = True
        with trio.CancelScope(shield=True):
            while self._attempts:
                attempt = next(iter(self._attempts))
                attempt.end("aborted")
                await attempt.done.wait()
        if self.export is None:
            self.export = self.tree.export()
            self._keep_tokens(self.export)
            self._undelivered.clear()
            self.memo = None
        return self.export

    def _keep_tokens(self, export: Export) -> None:
        """Actions that stand whole in no trajectory keep their tokens in the record's turn."""
        standing: dict[int, int] = {}
        for trajectory in export.trajectories:
            for action in trajectory.actions:
                standing[action.order] = max(standing.get(action.order, 0), action.end - action.start)
        for turn in self._turns:
            sampled = self.tree.history.actions[turn["action"]].acted.sampled
            if standing.get(turn["action"], 0) < len(sampled.token_ids):
                turn["tokens"] = {
                    "ids": sampled.token_ids.tolist(),
                    "logprobs": sampled.logprobs.tolist(),
                    "versions": [[v.version, v.start, v.end] for v in sampled.versions],
                }

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
        try:
            return place, await self._delta(call, place)
        except Break:
            self.breaks += 1
            place = place.apart()
            return place, await self._delta(call, place)

    def _opening(self, call: ModelCall) -> Ids | None:
        """What makes the model call a tool, where the client demands one. Problem 400 for what it cannot be held to."""
        if self.parts.engine.capacity().scripted:
            return None
        if call.json_by is not None:
            why = f"answers cannot be held to a JSON form here: leave {call.json_by} out and ask for JSON in the prompt"
            raise Problem(400, "json_unsupported", why)
        return self.parts.codec.opening(call) if call.tools and call.tool_choice != "auto" else None

    async def _delta(self, call: ModelCall, place: Place) -> tuple[Segment, ...]:
        codec = self.parts.codec
        new = sum(len(p.message.text) + len(p.message.reasoning) for p in place.pending)
        if new <= OFFLOAD_CHARACTERS:
            return codec.delta(call, place.pending, place.anchor)
        delta: tuple[Segment, ...] = await self.parts.offload(codec.delta, call, place.pending, place.anchor)
        self._check_open()
        return delta

    def _check_open(self) -> None:
        if self._closing:
            raise Problem(410, "session_finished", f"session {self.id} is finished: open another one to go on")

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
            self.spent.set()
            raise Problem(
                403,
                "generation_budget_spent",
                f"this session may make {mine.max_generations} generations and has made {self.generations}: "
                "stop here, or raise max_generations",
            )
        first = self.generations
        self.generations += call.n
        most = min(mine.max_tokens, limit - prompt, call.max_tokens or limit)
        return [self._sampling(call, most, first + i) for i in range(call.n)]

    def _sampling(self, call: ModelCall, max_tokens: int, turn: int) -> Sampling:
        mine, stop_ids = self.sampling, self.parts.codec.stop_ids
        plan = Sampling(max_tokens, mine.temperature, mine.top_p, mine.top_k, stop_ids, self.parts.seed, turn)
        if self.training or not self.parts.trust_client:
            return plan
        asked = {k: call.asked[k] for k in ("temperature", "top_p", "top_k", "seed") if call.asked.get(k) is not None}
        return evolve(plan, **asked)

    async def _siblings(
        self,
        call: ModelCall,
        place: Place,
        delta: tuple[Segment, ...],
        opening: Ids | None,
        prompt: Ids,
        plans: list[Sampling],
        listener: Listener | None,
    ) -> list[Reply]:
        replies: dict[int, Reply] = {}

        async def one(choice: int) -> None:
            replies[choice] = await self._generate(call, place, delta, opening, prompt, plans[choice], listener, choice)

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
        opening: Ids | None,
        prompt: Ids,
        sampling: Sampling,
        listener: Listener | None,
        choice: int,
    ) -> Reply:
        self._check_open()
        if listener is not None and listener.left:
            raise Problem(499, "ended", "the client left before its answer was begun")
        heard = listener if call.stream or isinstance(listener, _Deltas) else None

        def emit(piece: Delta) -> None:
            if heard is not None:
                heard.delta(evolve(piece, choice=choice) if choice else piece)

        codec, turn = self.parts.codec, sampling.turn
        decoder = codec.decoder(call, lambda index, name: codec.call_id(self.id, turn, index, name))
        if opening is not None:
            decoder.begin(opening)
        attempt = Attempt(decoder, listener, incremental=heard is not None or bool(call.stop) or not call.parallel)
        self._attempts.add(attempt)
        started = trio.current_time()
        try:
            generation = await attempt.run(self.parts.engine, prompt, sampling, self.id, emit)
        except ValueError as problem:
            raise Problem(400, "prompt_refused", f"the engine refused the prompt: {problem}") from problem
        finally:
            self._attempts.discard(attempt)
            ended = trio.current_time()
            self.engine_s += ended - started
        if generation is None or (attempt.cause and not len(generation.token_ids)):
            await trio.lowlevel.checkpoint_if_cancelled()
            raise Problem(499, "ended", "the request was ended before its first token")
        decoded = decoder.finish(generation.finish.value)
        for piece in decoded.deltas:
            emit(piece)
        reply = self._reply(sampling, len(prompt), generation, decoded, decoder.matched)
        aborted = attempt.cause == "aborted"
        node = self.tree.commit(
            place,
            delta=delta,
            answer=_sampled(generation, sampling, decoded, attempt, opening),
            reply=None if aborted else reply.message(),
            started=started,
            ended=ended,
            parse_problem=decoded.problem,
        )
        if attempt.cause is None:
            self._undelivered[reply.id] = node
        self._turns.append(self._requests.turn(call, sampling, reply, node.order, (started, ended), attempt.cause))
        if aborted:
            await trio.lowlevel.checkpoint_if_cancelled()
            raise Problem(410, "session_finished", f"session {self.id} was finished while this answer was made")
        return reply

    def _reply_id(self, sampling: Sampling) -> str:
        return hashlib.blake2b(f"{self.id}/{sampling.turn}".encode(), digest_size=12).hexdigest()

    def _reply(
        self, sampling: Sampling, prompt: int, generation: Generation, decoded: Decoded, stop: str | None
    ) -> Reply:
        return Reply(
            id=self._reply_id(sampling),
            text=decoded.text,
            reasoning=decoded.reasoning,
            calls=decoded.calls,
            finish=decoded.finish,
            usage=Usage(prompt, len(generation.token_ids), generation.cached_tokens, decoded.reasoning_tokens),
            problem=decoded.problem,
            stop=stop,
        )


@define(eq=False)
class _Deltas:
    """A listener that only wants the deltas."""

    delta: Callable[[Delta], None]
    left: bool = False

    def started(self, reply_id: str, prompt_tokens: int) -> None: ...


def _sampled(
    generation: Generation, sampling: Sampling, decoded: Decoded, attempt: Attempt, opening: Ids | None
) -> Sampled:
    """As the tree keeps it. A client that left is no abort: its answer ends there, undelivered."""
    if attempt.cause == "aborted":
        finish = "aborted"
    else:
        finish = "stop" if generation.finish is Finish.ABORTED else generation.finish.value
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
        text_ends=np.array(attempt.text_ends, np.int32) if attempt.incremental else None,
        opening=opening,
        call_ends=tuple(attempt.call_ends),
    )
