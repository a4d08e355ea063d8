"""StepDriver over a small synchronous engine: streams, aborts, refusals, updates, crashes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest
import trio

from uniagent.engine.accelerator import Accelerator, AcceleratorError
from uniagent.engine.ports import (
    Capacity,
    Finish,
    Generation,
    Ids,
    KvPolicy,
    Sampling,
    StepOutput,
    StepRequest,
    VersionSpan,
    Weights,
)
from uniagent.engine.rollout.driver import StepDriver


class Counting:
    """A StepEngine that counts up from the prompt's last token, one token a step for every request."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[StepRequest, list[int]]] = {}
        self.version = 0
        self.aborted: list[int] = []
        self.crash_at: int | None = None

    def add(self, request: StepRequest) -> None:
        if not len(request.prompt):
            raise ValueError("an empty prompt")
        self.live[request.id] = (request, [])

    def abort(self, id: int) -> Generation | None:
        if id not in self.live:
            return None
        self.aborted.append(id)
        return self._generation(self.live.pop(id)[1], Finish.ABORTED)

    def busy(self) -> bool:
        return bool(self.live)

    def step(self) -> list[StepOutput]:
        outputs = []
        for id, (request, done) in list(self.live.items()):
            token = int(request.prompt[-1]) + len(done) + 1
            if token == self.crash_at:
                raise RuntimeError("out of memory")
            done.append(token)
            generation = None
            if len(done) == request.sampling.max_tokens:
                generation = self._generation(self.live.pop(id)[1], Finish.LENGTH)
            outputs.append(StepOutput(id, np.array([token], np.int32), generation))
        return outputs

    def _generation(self, ids: list[int], finish: Finish) -> Generation:
        span = (VersionSpan(self.version, 0, len(ids)),)
        return Generation(np.array(ids, np.int32), np.zeros(len(ids), np.float32), span, span, finish, 0)

    def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        self.version = version

    def weights(self) -> Weights:
        return None

    def capacity(self) -> Capacity:
        return Capacity(100, 100 - len(self.live), len(self.live), 0, 50)

    def resident(self, prompt: Ids) -> int:
        return 3


@asynccontextmanager
async def driven() -> AsyncIterator[tuple[StepDriver, Counting]]:
    async with Accelerator.start() as accelerator:
        engine = Counting()
        yield StepDriver(accelerator, engine), engine


PROMPT = np.array([5, 10], np.int32)


async def test_many_generations_stream_in_order_and_complete() -> None:
    async with driven() as (driver, _), trio.open_nursery() as nursery:

        async def one(first: int) -> None:
            streamed: list[int] = []
            generation = await driver.generate(
                np.array([first], np.int32),
                Sampling(7),
                session=f"s{first}",
                on_tokens=lambda ids: streamed.extend(ids),
            )
            assert streamed == list(range(first + 1, first + 8)) == generation.token_ids.tolist()
            assert generation.finish is Finish.LENGTH

        for first in range(0, 2000, 10):
            nursery.start_soon(one, first)


async def test_a_refused_prompt_raises_in_its_caller_alone() -> None:
    async with driven() as (driver, _):
        with pytest.raises(ValueError, match="empty prompt"):
            await driver.generate(np.array([], np.int32), Sampling(3), session="s")
        assert (await driver.generate(PROMPT, Sampling(2), session="s")).token_ids.tolist() == [11, 12]


async def test_cancelling_aborts_and_nothing_is_left_in_the_engine() -> None:
    async with driven() as (driver, engine):
        async with trio.open_nursery() as nursery:

            def saw(ids: Ids) -> None:
                if ids[0] == 15:
                    nursery.cancel_scope.cancel()

            await driver.generate(PROMPT, Sampling(1_000_000), session="s", on_tokens=saw)
        assert nursery.cancel_scope.cancelled_caught
        while engine.live:
            await trio.sleep(0.001)
        assert engine.aborted == [0]


async def test_a_cancelled_generation_hands_over_what_was_sampled() -> None:
    async with driven() as (driver, engine):
        kept: list[Generation] = []
        with trio.CancelScope() as scope:

            def saw(ids: Ids) -> None:
                if ids[0] == 15:
                    scope.cancel()

            await driver.generate(PROMPT, Sampling(1_000_000), session="s", on_tokens=saw, on_abort=kept.append)
        assert scope.cancelled_caught
        (generation,) = kept
        assert generation.finish is Finish.ABORTED
        assert generation.token_ids.tolist()[:5] == [11, 12, 13, 14, 15]
        assert len(generation.logprobs) == len(generation.token_ids)
        assert engine.live == {}


async def test_late_outputs_are_counted_and_dropped() -> None:
    async with driven() as (driver, _):
        driver.deliver(([StepOutput(99, PROMPT)], []))
        assert driver.late == 1


async def test_on_tokens_ends_a_generation_and_gets_what_was_sampled() -> None:
    async with driven() as (driver, engine):
        seen: list[int] = []

        def stop(ids: Ids) -> bool:
            seen.extend(ids)
            return len(seen) == 4

        generation = await driver.generate(PROMPT, Sampling(1_000_000), session="s", on_tokens=stop)
        assert generation.finish is Finish.ABORTED
        assert seen == [11, 12, 13, 14] == generation.token_ids.tolist()[:4]
        assert engine.live == {}


async def test_an_error_in_on_tokens_fails_its_generation_alone() -> None:
    async with driven() as (driver, engine):

        def bad(ids: Ids) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await driver.generate(PROMPT, Sampling(1_000_000), session="s", on_tokens=bad)
        assert len((await driver.generate(PROMPT, Sampling(2), session="s")).token_ids) == 2
        while engine.live:
            await trio.sleep(0.001)


async def test_update_capacity_and_resident_pass_through() -> None:
    async with driven() as (driver, _):
        await driver.update(None, 4, KvPolicy.KEEP)
        assert (await driver.generate(PROMPT, Sampling(2), session="s")).versions == (VersionSpan(4, 0, 2),)
        assert driver.capacity() == Capacity(100, 100, 0, 0, 50)
        assert driver.resident(PROMPT) == 3


async def test_a_crash_of_the_engine_reaches_every_waiter_and_the_block() -> None:
    seen: list[BaseException] = []

    async def one(driver: StepDriver) -> None:
        try:
            await driver.generate(PROMPT, Sampling(1_000_000), session="s")
        except AcceleratorError as error:
            seen.append(error)
            raise

    async def body() -> None:
        async with driven() as (driver, engine), trio.open_nursery() as nursery:
            engine.crash_at = 40
            for _ in range(5):
                nursery.start_soon(one, driver)

    with pytest.raises(AcceleratorError, match="out of memory"):
        await body()
    assert len(seen) == 5


class Widths(Counting):
    """Remembers how many requests each step had."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def step(self) -> list[StepOutput]:
        self.widths.append(len(self.live))
        return super().step()


async def test_gathering_waits_for_more_requests_until_the_batch_is_wide_enough() -> None:
    engine = Widths()
    async with Accelerator.start() as accelerator, trio.open_nursery() as nursery:
        driver = StepDriver(accelerator, engine, gather_s=30.0, gather_below=6)
        for i in range(6):
            nursery.start_soon(partial(driver.generate, PROMPT, Sampling(1), session=f"s{i}"))
            await trio.sleep(0.005)  # so that the thread could step in between
    assert engine.widths == [6]


async def test_without_gathering_a_request_is_stepped_at_once() -> None:
    engine = Widths()
    async with Accelerator.start() as accelerator:
        driver = StepDriver(accelerator, engine)
        for i in range(3):
            await driver.generate(PROMPT, Sampling(1), session=f"s{i}")
    assert engine.widths == [1, 1, 1]
