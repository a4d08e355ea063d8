"""The simulated engine: time is the cost model's, no token is lost, and KV adds up whatever happens."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.engine.ports import Finish, Generation, KvPolicy, Sampling
from uniagent.engine.rollout.router import ReplicaLost
from uniagent.engine.simulate.clock import Timers
from uniagent.engine.simulate.costs import Costs
from uniagent.engine.simulate.engine import SimulatedEngine
from uniagent.engine.simulate.tokens import Prompt

Clock = trio.testing.MockClock
COSTS = Costs(
    accelerators=1,
    prefill_token_s=0.001,
    prefill_chunk=100,
    decode_base_s=1.0,
    decode_request_s=0.0,
    decode_kv_s=0.0,
    kv_tokens=1000,
    sync_s=10.0,
)


@asynccontextmanager
async def opened(costs: Costs = COSTS) -> AsyncIterator[SimulatedEngine]:
    timers = Timers()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timers.run)
        yield SimulatedEngine(timers, costs)
        nursery.cancel_scope.cancel()


async def ask(engine: SimulatedEngine, prompt: Prompt, tokens: int) -> Generation:
    handle: Any = prompt
    return await engine.generate(handle, Sampling(tokens), session=prompt.session)


def prompt(session: str, length: int, shared: int = 0) -> Prompt:
    return Prompt("g", session, shared, length)


async def test_one_request_takes_its_prefill_and_one_step_a_token(autojump_clock: Clock) -> None:
    async with opened() as engine:
        answer = await ask(engine, prompt("a", 100), 5)
        # one chunk of 100 prompt tokens shares a step: 1 s and 0.1 s; then five steps
        assert trio.current_time() == pytest.approx(1.1 + 5)
        assert len(answer.token_ids) == 5
        assert answer.finish is Finish.STOP


async def test_requests_decode_side_by_side_at_the_price_of_the_batch(autojump_clock: Clock) -> None:
    async with opened(evolve(COSTS, decode_base_s=0.0, decode_request_s=1.0, prefill_token_s=0.0)) as engine:
        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(ask, engine, prompt(f"s{i}", 1), 10)
        assert trio.current_time() == pytest.approx(40, rel=0.05)  # ten steps of four


async def test_a_next_turn_prefills_only_what_is_new(autojump_clock: Clock) -> None:
    async with opened() as engine:
        await ask(engine, prompt("a", 100), 10)
        assert engine.resident(prompt("a", 200)) == 110  # type: ignore[arg-type]
        answer = await ask(engine, prompt("a", 150), 1)
        assert answer.cached_tokens == 110


async def test_siblings_share_their_prompt_and_the_least_recent_prefix_goes_first(autojump_clock: Clock) -> None:
    async with opened() as engine:
        await ask(engine, prompt("a", 100, shared=100), 50)
        second = await ask(engine, prompt("b", 100, shared=100), 50)
        assert second.cached_tokens == 100
        other = Prompt("h", "c", 0, 700)
        await ask(engine, other, 110)
        assert engine.resident(prompt("a", 150, shared=100)) == 100  # type: ignore[arg-type]  # its own part went
        assert engine.resident(prompt("b", 150, shared=100)) == 150  # type: ignore[arg-type]
        assert engine.balanced()


async def test_what_does_not_fit_waits_and_what_never_fits_is_refused(autojump_clock: Clock) -> None:
    async with opened() as engine:
        with pytest.raises(ValueError, match="never fit"):
            await ask(engine, prompt("a", 900), 200)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, prompt("a", 500), 100)
            nursery.start_soon(ask, engine, prompt("b", 500), 100)
            await trio.testing.wait_all_tasks_blocked()
            assert (engine.capacity().running, engine.capacity().waiting) == (1, 1)
        assert trio.current_time() > 200  # one after the other


@pytest.mark.parametrize("kv", list(KvPolicy))
async def test_an_update_loses_no_token_and_marks_the_versions(autojump_clock: Clock, kv: KvPolicy) -> None:
    async with opened() as engine:
        answers = []

        async def one() -> None:
            answers.append(await ask(engine, prompt("a", 100), 10))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(1.1 + 4.5)
            await engine.update(None, 7, kv)
        spans = [(s.version, s.start, s.end) for s in answers[0].versions]
        assert spans == [(0, 0, 4), (7, 4, 10)]
        again = 104 * 0.001 + 2 if kv is KvPolicy.RECOMPUTE else 0  # steps that prefill shares
        assert trio.current_time() == pytest.approx(1.1 + 10 + COSTS.sync_s + again, abs=1.5)
        assert engine.resident(prompt("zz", 5)) == 0  # type: ignore[arg-type]


async def test_a_lost_replica_fails_its_requests_and_all_later_ones(autojump_clock: Clock) -> None:
    async with opened() as engine:
        with pytest.raises(ExceptionGroup) as failed:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, engine, prompt("a", 10), 100)
                await trio.sleep(5)
                engine.lose()
        assert failed.group_contains(ReplicaLost)
        with pytest.raises(ReplicaLost):
            await ask(engine, prompt("a", 10), 100)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_request_ends_once_and_kv_adds_up_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    came: list[Generation] = []
    aborted: list[Generation] = []

    async def session(engine: SimulatedEngine, name: str) -> None:
        length = rng.randrange(1, 200)
        for _ in range(rng.randrange(1, 5)):
            with trio.move_on_after(rng.choice([3.0, 30.0, math.inf])):
                handle: Any = Prompt(f"g{name[-1]}", name, 50, length)
                answer = await engine.generate(
                    handle, Sampling(rng.randrange(1, 60)), session=name, on_abort=aborted.append
                )
                came.append(answer)
                length += len(answer.token_ids)
            assert engine.balanced()
            length = min(length + rng.randrange(0, 100), 700)

    async def main() -> None:
        async with opened() as engine, trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(session, engine, f"s{i}")
            for version in range(1, 6):
                await trio.sleep(rng.uniform(1, 40))
                match rng.randrange(4):
                    case 0:
                        await engine.update(None, version, rng.choice(list(KvPolicy)))
                    case 1:
                        engine.drain()
                    case 2:
                        engine.share(rng.uniform(0.1, 1.0))
                    case _:
                        engine.pause()
                        await trio.sleep(5)
                        engine.resume()
                assert engine.balanced()
            engine.share(1.0)
        assert engine.requests() == 0
        assert engine.balanced()
        assert engine.tokens == sum(len(a.token_ids) for a in came + aborted)
        for answer in came:
            assert sum(span.end - span.start for span in answer.versions) == len(answer.token_ids)

    trio.run(main, clock=Clock(autojump_threshold=0))
