"""Spreads generations over replicas of the policy by the work they really are.

Work is counted in tokens: what a replica would have to prefill for this prompt (the prompt minus what it holds of it),
and what it still has to prefill and decode for others. Invariants: a replica's outstanding work is exactly that of
the requests it runs; a session goes where its prefix is while that replica has memory to spare, and anywhere below
that; of requests with one prompt that nobody holds yet, one is prefilled and the others follow it; a request on a
replica that is lost is made again elsewhere, and the tokens it had sampled are counted in ``lost_tokens``.

Knows replicas by the InferenceEngine port alone, local or remote. The policies are pure functions, so that they can be
compared on a simulated cluster.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import trio
from attrs import define, frozen

from uniagent.engine.errors import InfraError
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

SPARE = 0.1  # share of a replica's KV below which the binding of a session to it is relaxed
WORTH_WAITING = 64  # tokens of a prompt from which on siblings wait for the first prefill
MEMORY = 0.05  # weight of the newest generation in the expected length


@frozen
class Offer:
    """What a policy sees of one replica for one request, in tokens. ``bound``: the session was there last."""

    index: int
    prefill: int  # of this prompt, not resident there
    outstanding: int
    requests: int
    free: int  # KV
    total: int  # KV
    bound: bool

    @property
    def spare(self) -> float:
        return self.free / self.total if self.total else 1.0


@frozen
class Ask:
    """One request: how much it is, and of whom. ``turn`` counts all requests of the router."""

    session: SessionId
    prompt: int
    decode: int  # expected
    turn: int


Policy = Callable[[Ask, Sequence[Offer]], int]  # -> index


def cache_aware(ask: Ask, offers: Sequence[Offer]) -> int:
    """Least work to the end of this request: prefill, the queue before it, and, where the KV does not fit, the prefixes
    of others that it would push out. The session's own replica wins while it has memory to spare and is not far more
    loaded than the least loaded one."""
    least = min(o.outstanding for o in offers)
    for o in offers:
        held = ask.prompt - o.prefill
        if o.bound and held and o.spare >= SPARE and o.outstanding - least <= held + ask.decode:
            return o.index

    def cost(o: Offer) -> tuple[float, int]:
        crowding = max(0, o.prefill + ask.decode - o.free)
        return o.prefill + o.outstanding + 2 * crowding, o.index

    return min(offers, key=cost).index


def sticky_hash(ask: Ask, offers: Sequence[Offer]) -> int:
    """The session's name alone decides, for good."""
    return offers[zlib.crc32(ask.session.encode()) % len(offers)].index


def sticky_least_loaded(ask: Ask, offers: Sequence[Offer]) -> int:
    """The replica with fewest requests when the session began, for good."""
    return next((o.index for o in offers if o.bound), least_requests(ask, offers))


def least_tokens(ask: Ask, offers: Sequence[Offer]) -> int:
    return min(offers, key=lambda o: (o.outstanding, o.index)).index


def least_requests(ask: Ask, offers: Sequence[Offer]) -> int:
    return min(offers, key=lambda o: (o.requests, o.index)).index


def round_robin(ask: Ask, offers: Sequence[Offer]) -> int:
    return offers[ask.turn % len(offers)].index


POLICIES: dict[str, Policy] = {
    "cache_aware": cache_aware,
    "sticky_hash": sticky_hash,
    "sticky_least_loaded": sticky_least_loaded,
    "least_tokens": least_tokens,
    "least_requests": least_requests,
    "round_robin": round_robin,
}


class ReplicaLost(InfraError):
    """A replica is gone. Raised by a replica's ``generate``; the router goes on with the others."""


@define(eq=False)
class _Replica:
    engine: InferenceEngine
    outstanding: int = 0
    requests: int = 0
    lost: bool = False
    away: bool = False  # it does something else for a while


@define(eq=False)
class _Work:
    """The outstanding tokens of one request on its replica: none are left when it ends."""

    replica: _Replica
    prefill: int
    decode: int
    came: int = 0

    def __attrs_post_init__(self) -> None:
        self.replica.outstanding += self.prefill + self.decode
        self.replica.requests += 1

    def tokens(self, n: int) -> None:
        self.came += n
        done = min(n, self.decode)
        self.replica.outstanding -= self.prefill + done
        self.prefill, self.decode = 0, self.decode - done

    def end(self) -> None:
        self.replica.outstanding -= self.prefill + self.decode
        self.prefill = self.decode = 0
        self.replica.requests -= 1


class Router:
    """An ``InferenceEngine`` over several. ``lost_tokens`` counts what lost replicas had sampled."""

    def __init__(self, replicas: Sequence[InferenceEngine], policy: str = "cache_aware") -> None:
        if not replicas:
            raise ValueError("a router needs at least one replica")
        self.lost_tokens = 0
        self._replicas = [_Replica(engine) for engine in replicas]
        self._policy = POLICIES[policy]
        self._home: dict[SessionId, int] = {}
        self._leads: dict[bytes, trio.Event] = {}  # prompts that are being prefilled for the first time
        self._expected = 64.0  # tokens of a generation
        self._turns = 0

    async def generate(
        self,
        prompt: Ids,
        sampling: Sampling,
        *,
        session: SessionId,
        on_tokens: OnTokens | None = None,
        on_abort: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """See InferenceEngine; ReplicaLost when none is left."""
        key = prompt.tobytes() if len(prompt) >= WORTH_WAITING else b""
        if key and (lead := self._leads.get(key)) is not None:
            await lead.wait()
        leads = key and key not in self._leads
        if leads:
            self._leads[key] = trio.Event()
        try:
            while True:
                index = self._choose(prompt, sampling, session)
                replica = self._replicas[index]
                work = self._begin(replica, prompt, sampling)

                def streamed(ids: Ids, work: _Work = work) -> bool | None:
                    work.tokens(len(ids))
                    if leads:
                        self._leads[key].set()
                    return on_tokens(ids) if on_tokens is not None else None

                try:
                    answer = await replica.engine.generate(
                        prompt, sampling, session=session, on_tokens=streamed, on_abort=on_abort
                    )
                except ReplicaLost:
                    replica.lost = True
                    self.lost_tokens += work.came
                    if on_tokens is not None and work.came:
                        raise  # the client has heard the beginning of an answer that will not come
                    continue
                finally:
                    work.end()
                self._expected += MEMORY * (len(answer.token_ids) - self._expected)
                return answer
        finally:
            if leads:
                self._leads.pop(key).set()

    def away(self, index: int, away: bool) -> None:
        """Whether a replica takes no new requests for now, as a training mesh that serves rollouts between two steps.
        What it runs is its owner's to end; it still takes updates."""
        self._replicas[index].away = away

    async def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        """All replicas, side by side; each is atomic by itself. ``weights`` must be iterable repeatedly."""
        async with trio.open_nursery() as nursery:
            for replica in self._replicas:
                if not replica.lost:
                    nursery.start_soon(replica.engine.update, weights, version, kv)

    def capacity(self) -> Capacity:
        """The sum over the replicas that live; the context of the smallest."""
        each = [r.engine.capacity() for r in self._replicas if not r.lost]
        return Capacity(
            kv_total=sum(c.kv_total for c in each),
            kv_free=sum(c.kv_free for c in each),
            running=sum(c.running for c in each),
            waiting=sum(c.waiting for c in each),
            context=min((c.context for c in each), default=0),
            scripted=bool(each) and all(c.scripted for c in each),
        )

    def resident(self, prompt: Ids) -> int:
        return max((r.engine.resident(prompt) for r in self._replicas if not r.lost), default=0)

    def forget(self, session: SessionId) -> None:
        """The session has ended."""
        self._home.pop(session, None)

    def offers(self, prompt: Ids, session: SessionId) -> list[Offer]:
        """What the policy sees, for the replicas that live and are not away."""
        home = self._home.get(session)
        found = []
        for index, replica in enumerate(self._replicas):
            if replica.lost or replica.away:
                continue
            load = replica.engine.capacity()
            found.append(
                Offer(
                    index=index,
                    prefill=len(prompt) - replica.engine.resident(prompt),
                    outstanding=replica.outstanding,
                    requests=replica.requests,
                    free=load.kv_free,
                    total=load.kv_total,
                    bound=index == home,
                )
            )
        if not found:
            raise ReplicaLost("every replica is lost: no engine is left to generate")
        return found

    def _choose(self, prompt: Ids, sampling: Sampling, session: SessionId) -> int:
        offers = self.offers(prompt, session)
        decode = min(sampling.max_tokens, round(self._expected))
        index = self._policy(Ask(session, len(prompt), decode, self._turns), offers)
        self._turns += 1
        self._home[session] = index
        return index

    def _begin(self, replica: _Replica, prompt: Ids, sampling: Sampling) -> _Work:
        prefill = len(prompt) - replica.engine.resident(prompt)
        return _Work(replica, prefill, min(sampling.max_tokens, round(self._expected)))
