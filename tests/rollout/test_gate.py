"""A shut gate: running generations end, new ones wait, nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import trio
import trio.testing

from uniagent.engine.ports import Capacity, Finish, Generation, KvPolicy, Sampling
from uniagent.engine.rollout.gate import GatedEngine


class Slow:
    """Answers after a second; counts what runs."""

    def __init__(self) -> None:
        self.running = 0

    async def generate(self, prompt: Any, sampling: Sampling, **kw: Any) -> Generation:
        self.running += 1
        await trio.sleep(1)
        self.running -= 1
        return Generation(prompt, np.zeros(len(prompt), np.float32), (), (), Finish.STOP, 0)

    async def update(self, weights: Any, version: int, kv: KvPolicy) -> None:
        assert self.running == 0

    def capacity(self) -> Capacity:
        return Capacity(1, 1, self.running, 0, 1)

    def resident(self, prompt: Any) -> int:
        return 0


async def test_while_shut_nothing_generates_and_afterwards_everything_is_answered(
    autojump_clock: trio.testing.MockClock,
) -> None:
    slow = Slow()
    gate = GatedEngine(slow)
    answered: list[float] = []

    async def ask(after: float) -> None:
        await trio.sleep(after)
        await gate.generate(np.arange(3, dtype=np.int32), Sampling(1), session="s")
        answered.append(trio.current_time())

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for after in (0.0, 0.4, 1.2, 3.0):
            nursery.start_soon(ask, after)
        await trio.sleep(0.5)
        async with gate.shut():
            assert slow.running == 0
            await gate.update(None, 1, KvPolicy.KEEP)
            await trio.sleep(1)
            assert slow.running == 0
    assert [round(t - began, 3) for t in answered] == [1.0, 1.4, 3.4, 4.0]
