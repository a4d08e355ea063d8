"""The router: work in tokens, prefixes where they are, lost replicas, one first prefill a group."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.engine.ports import Capacity, Finish, Generation, Ids, KvPolicy, OnTokens, Sampling
from uniagent.engine.rollout.router import POLICIES, Offer, ReplicaLost, Router

Clock = trio.testing.MockClock


class Fake:
    """A replica on the virtual clock: a second to prefill, a tenth a token; holds whole prompts it has seen."""

    def __init__(self, *, total: int = 10_000, dies_at: float | None = None) -> None:
        self.total, self.dies_at = total, dies_at
        self.held: list[bytes] = []
        self.prefills: list[int] = []
        self.running = 0
        self.most = 0
        self.versions: list[int] = []

    async def generate(
        self,
        prompt: Ids,
        sampling: Sampling,
        *,
        session: str,
        on_tokens: OnTokens | None = None,
        on_abort: Callable[[Generation], None] | None = None,
    ) -> Generation:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            self.prefills.append(len(prompt) - self.resident(prompt))
            await trio.sleep(1)
            self.held.append(prompt.tobytes())
            for _ in range(sampling.max_tokens):
                await trio.sleep(0.1)
                if self.dies_at is not None and trio.current_time() >= self.dies_at:
                    raise ReplicaLost("gone")
                if on_tokens is not None:
                    on_tokens(np.array([1], np.int32))
        finally:
            self.running -= 1
        n = sampling.max_tokens
        return Generation(np.ones(n, np.int32), np.zeros(n, np.float32), (), (), Finish.LENGTH, 0)

    async def update(self, weights: Any, version: int, kv: KvPolicy) -> None:
        self.versions.append(version)

    def capacity(self) -> Capacity:
        used = 100 * self.running
        return Capacity(self.total, max(0, self.total - used), self.running, 0, 4096)

    def resident(self, prompt: Ids) -> int:
        found = prompt.tobytes()
        return max((len(h) // 4 for h in self.held if found.startswith(h)), default=0)


def prompt(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, 1000, n, dtype=np.int32)


async def test_a_session_goes_back_to_the_replica_that_has_its_prefix(autojump_clock: Clock) -> None:
    replicas = [Fake(), Fake(), Fake()]
    router = Router(replicas)
    text = prompt(200)
    for turn in range(4):
        await router.generate(text, Sampling(5), session="s")
        text = np.concatenate([text, prompt(50, turn)])
    used = [r for r in replicas if r.prefills]
    assert len(used) == 1
    assert used[0].prefills == [200, 50, 50, 50]


async def test_the_binding_is_relaxed_when_the_replica_has_no_memory_left(autojump_clock: Clock) -> None:
    full, free = Fake(), Fake()
    router = Router([full, free])
    await router.generate(prompt(200), Sampling(1), session="s")
    full.total = 10  # what it held is gone, too
    full.held.clear()
    await router.generate(prompt(250), Sampling(1), session="s")
    assert free.prefills == [250]


async def test_a_long_request_weighs_more_than_many_short_ones(autojump_clock: Clock) -> None:
    replicas = [Fake(), Fake()]
    router = Router(replicas)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: router.generate(prompt(5000), Sampling(1), session="long"))
        await trio.sleep(0)
        for i in range(10):
            nursery.start_soon(lambda i=i: router.generate(prompt(40, i + 1), Sampling(1), session=f"s{i}"))
            await trio.sleep(0)
    assert sorted(len(r.prefills) for r in replicas) == [1, 10]


async def test_siblings_share_the_first_prefill(autojump_clock: Clock) -> None:
    replicas = [Fake(), Fake()]
    router = Router(replicas)
    async with trio.open_nursery() as nursery:
        for i in range(8):
            nursery.start_soon(lambda i=i: router.generate(prompt(300), Sampling(3), session=f"g{i}"))
    everything = sorted(p for r in replicas for p in r.prefills)
    assert everything == [0] * 7 + [300]


async def test_a_lost_replica_costs_only_what_it_was_doing(autojump_clock: Clock) -> None:
    now = trio.current_time()
    replicas = [Fake(dies_at=now + 1.5), Fake()]
    router = Router(replicas, "round_robin")
    answers = []

    async def ask(i: int) -> None:
        answers.append(await router.generate(prompt(20, i), Sampling(10), session=f"s{i}"))

    async with trio.open_nursery() as nursery:
        for i in range(6):
            nursery.start_soon(ask, i)
    assert len(answers) == 6
    assert router.lost_tokens == 3 * 4
    assert [o.index for o in router.offers(prompt(5), "x")] == [1]


async def test_when_every_replica_is_lost_the_request_says_so(autojump_clock: Clock) -> None:
    router = Router([Fake(dies_at=0.0), Fake(dies_at=0.0)])
    with pytest.raises(ReplicaLost, match="every replica is lost"):
        await router.generate(prompt(20), Sampling(3), session="s")


async def test_a_replica_that_is_away_gets_no_request_but_every_update(autojump_clock: Clock) -> None:
    replicas = [Fake(), Fake()]
    router = Router(replicas, "round_robin")
    router.away(0, True)
    assert [o.index for o in router.offers(prompt(5), "x")] == [1]
    await router.update([], 3, KvPolicy.RECOMPUTE)
    assert [r.versions for r in replicas] == [[3], [3]]
    router.away(0, False)
    assert [o.index for o in router.offers(prompt(5), "x")] == [0, 1]


async def test_an_update_reaches_every_living_replica(autojump_clock: Clock) -> None:
    replicas = [Fake(), Fake()]
    await Router(replicas).update([], 3, KvPolicy.RECOMPUTE)
    assert [r.versions for r in replicas] == [[3], [3]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(sorted(POLICIES)), replicas=st.integers(1, 4))
def test_outstanding_work_is_that_of_the_running_requests_whatever_ends_how(
    seed: int, policy: str, replicas: int
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        router = Router([Fake() for _ in range(replicas)], policy)

        async def session(name: str) -> None:
            text = prompt(rng.randrange(1, 300), rng.randrange(5))
            for _ in range(rng.randrange(1, 4)):
                with trio.move_on_after(rng.choice([0.5, 2.0, 1e6])):
                    await router.generate(text, Sampling(rng.randrange(1, 8)), session=name)
                text = np.concatenate([text, prompt(rng.randrange(1, 50))])
            router.forget(name)

        async with trio.open_nursery() as nursery:
            for i in range(12):
                nursery.start_soon(session, f"s{i}")
                await trio.sleep(rng.random())
        assert all(o.outstanding == o.requests == 0 and not o.bound for o in router.offers(prompt(3), "s0"))

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_every_policy_chooses_among_the_offers_alone() -> None:
    from uniagent.engine.rollout.router import Ask

    offers = [Offer(i, 10 * i, 5 * i, i, 100, 1000, bound=i == 4) for i in (1, 2, 4)]
    for name, policy in POLICIES.items():
        for turn in range(5):
            assert policy(Ask(f"s{turn}", 50, 10, turn), offers) in (1, 2, 4), name
