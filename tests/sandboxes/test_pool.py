"""Warm sandboxes and prepared images, on a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from uniagent.adapters.sandboxes.pool import KINDS, STARTING, PreparedImages, WarmPool
from uniagent.engine.errors import InfraError

START_S = 60.0


class Machines:
    """A backend whose starts take a minute."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.dead: set[str] = set()
        self.starting = self.most = self.count = 0
        self.fail = 0

    @asynccontextmanager
    async def start(self, kind: str) -> AsyncIterator[str]:
        self.starting += 1
        self.most = max(self.most, self.starting)
        try:
            await trio.sleep(START_S)
        finally:
            self.starting -= 1
        if self.fail:
            self.fail -= 1
            raise InfraError("no machine is left")
        self.count += 1
        name = f"{kind}{self.count}"
        self.open.append(name)
        try:
            yield name
        finally:
            self.open.remove(name)


@asynccontextmanager
async def running(machines: Machines, size: int) -> AsyncIterator[WarmPool[str, str]]:
    pool = WarmPool(machines.start, size, lambda box: box not in machines.dead)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.run)
        yield pool
        nursery.cancel_scope.cancel()
    assert not machines.open, "nothing stays open"


async def took(pool: WarmPool[str, str], kind: str = "a", for_s: float = 0) -> float:
    began = trio.current_time()
    async with pool.open(kind):
        waited = trio.current_time() - began
        await trio.sleep(for_s)
    return waited


async def test_only_the_first_waits(autojump_clock: trio.testing.MockClock) -> None:
    machines = Machines()
    async with running(machines, 2) as pool:
        assert await took(pool) == START_S
        await trio.sleep(2 * START_S)
        assert len(machines.open) == 2
        assert [await took(pool), await took(pool)] == [0, 0]
        await trio.sleep(2 * START_S)
        assert len(machines.open) == 2, "filled up again, and no more than that"


async def test_a_thousand_sessions_hold_no_more_than_they_use(autojump_clock: trio.testing.MockClock) -> None:
    machines = Machines()
    waits: list[float] = []

    async with running(machines, 100) as pool:
        await took(pool)
        await trio.sleep(100 * START_S)

        async def session(number: int) -> None:
            await trio.sleep(number * 1.0)
            waits.append(await took(pool, for_s=600))

        async with trio.open_nursery() as nursery:
            for number in range(1000):
                nursery.start_soon(session, number)
        assert waits.count(0) > 300
        assert max(waits) <= START_S
        await trio.sleep(100 * START_S)
        assert len(machines.open) == 100


async def test_starts_ahead_are_bounded(autojump_clock: trio.testing.MockClock) -> None:
    machines = Machines()
    async with running(machines, 5 * STARTING) as pool:
        await took(pool)
        await trio.sleep(10 * START_S)
        assert machines.most == STARTING + 1


async def test_one_that_died_is_not_given_out(autojump_clock: trio.testing.MockClock) -> None:
    machines = Machines()
    async with running(machines, 1) as pool:
        await took(pool)
        await trio.sleep(2 * START_S)
        machines.dead.update(machines.open)
        assert await took(pool) == START_S
        await trio.sleep(2 * START_S)
        assert not machines.dead & set(machines.open)


async def test_kinds_that_are_no_longer_asked_for_go(autojump_clock: trio.testing.MockClock) -> None:
    machines = Machines()
    async with running(machines, 1) as pool:
        for kind in "abcdefgh":
            await took(pool, kind)
            await trio.sleep(2 * START_S)
        assert sorted(name[0] for name in machines.open) == list("abcdefgh"[-KINDS:])


async def test_a_failed_start_is_told_and_tried_when_wanted_again(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    machines = Machines()
    async with running(machines, 1) as pool:
        machines.fail = 2
        with pytest.raises(InfraError):
            await took(pool)
        await trio.sleep(2 * START_S)
        assert "no warm sandbox: no machine is left" in caplog.text
        assert await took(pool) == START_S
        await trio.sleep(2 * START_S)
        assert await took(pool) == 0


async def test_none_is_kept_unless_asked_for(autojump_clock: trio.testing.MockClock) -> None:
    machines = Machines()
    async with running(machines, 0) as pool:
        await took(pool)
        await trio.sleep(2 * START_S)
        assert not machines.open


async def test_an_image_is_made_once(autojump_clock: trio.testing.MockClock) -> None:
    images, made = PreparedImages(), 0

    async def make() -> str:
        nonlocal made
        await trio.sleep(START_S)
        made += 1
        if made == 1:
            raise InfraError("the first one fails")
        return f"image{made}"

    got: list[str] = []

    async def want(key: str) -> None:
        got.append(await images.get(key, make))

    with pytest.raises(InfraError):
        await want("a")
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(want, "a")
    assert got == ["image2"] * 10
    await want("b")
    assert got[-1] == "image3"
