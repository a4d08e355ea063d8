"""A node's worker against a head that is scripted: restarts, silence, leaving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from attrs import define, field

from tests.separate.play import inline
from uniagent.engine.episode import Episode
from uniagent.engine.ports import Finish, Generation, TaskResult
from uniagent.engine.separate.leases import Kind
from uniagent.engine.separate.worker import Doings, HeadLost, Unreachable, Worker
from uniagent.engine.trajectory.types import Export, Ledger

QUIET = {"give": [], "drop": [], "version": 3, "shift": 0, "ending": False, "canary": None}


def group(sample: int, attempt: int = 1, parts: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    payload = {"row": {}, "sample": sample, "version": 3}
    return {"id": f"group-{sample}", "kind": "group", "attempt": attempt, "parts": parts, "payload": payload}


@define(eq=False)
class Stage:
    """A head that answers pulls from a list, and a node whose sessions take as long as they are let."""

    answers: list[dict[str, Any]]
    head: str = "one"
    up: bool = True
    pulls: list[Mapping[str, Any]] = field(factory=list)
    pushed: list[tuple[str, str, int]] = field(factory=list)  # (head, id, part)
    said: list[str] = field(factory=list)
    began: list[tuple[int, int]] = field(factory=list)
    updates: list[int] = field(factory=list)
    session_s: float = 1000.0
    worker: Worker = field(init=False)

    def __attrs_post_init__(self) -> None:
        async def session(row: Any, sample: int, replica: int) -> Episode:
            self.began.append((sample, replica))
            await trio.sleep(self.session_s)
            return Episode("s", "t", sample, replica, TaskResult(0.0), Export((), (), Ledger(0, 0, 0, {})))

        async def generate(*_: Any) -> Generation:
            nothing = np.zeros(0, np.int32)
            return Generation(nothing, nothing.astype(np.float32), (), (), Finish.STOP, 0)

        async def update(version: int) -> int:
            self.updates.append(version)
            return version

        async def nothing(_: Any) -> None: ...

        doings = Doings(session, generate, update, nothing, nothing, inline)
        self.worker = Worker("n", self.call, doings, {Kind.GROUP: 4, Kind.ASK: 4}, wait_s=5.0, patience_s=60.0)

    async def call(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        await trio.sleep(0.1)
        if not self.up:
            raise Unreachable("nobody there")
        self.said.append(verb)
        if verb == "pull" and body["head"] == self.head:
            self.pulls.append(body)
            if not self.answers:
                await trio.sleep(body["wait_s"])
            if body["head"] != self.head:
                raise Unreachable("it went down meanwhile")
            return {"head": self.head, **(self.answers.pop(0) if self.answers else QUIET)}
        if verb == "push" and body["head"] == self.head:
            self.pushed.append((body["head"], body["id"], body["part"]))
        return {"head": self.head}


async def test_after_a_restart_of_the_head_nothing_from_before_reaches_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stage = Stage([{**QUIET, "give": [group(1)]}], session_s=20.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.worker.run)
        await trio.sleep(10)
        assert sorted(stage.began) == [(1, 0), (1, 1)]
        stage.head = "two"
        stage.answers.append({**QUIET, "give": [group(1)]})  # the new run's first group has the same number
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert sorted(stage.began) == [(1, 0), (1, 0), (1, 1), (1, 1)]
    assert sorted(stage.pushed) == [("two", "group-1", 0), ("two", "group-1", 1)]
    assert stage.updates == [3, 3]  # its weights may be older ones: they are asked for again


async def test_a_lease_that_is_lost_is_cancelled_and_may_come_again(autojump_clock: trio.testing.MockClock) -> None:
    stage = Stage([{**QUIET, "give": [group(1)]}, {**QUIET, "drop": ["group-1"], "give": [group(1, 2, (1,))]}])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.worker.run)
        await trio.sleep(30)
        assert sorted(stage.began) == [(1, 0), (1, 1), (1, 1)]
        assert stage.pulls[-1]["held"] == {"group-1": 2}
        assert stage.worker.lost_work == 1
        nursery.cancel_scope.cancel()


async def test_draining_takes_nothing_more_pushes_what_ends_and_leaves(autojump_clock: trio.testing.MockClock) -> None:
    stage = Stage([{**QUIET, "give": [group(1)]}], session_s=30.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.worker.run)
        await trio.sleep(10)
        await stage.worker.drain(60.0)
    assert {part for _, _, part in stage.pushed} == {0, 1}
    assert stage.pulls[-1]["capacity"] == {"group": 0, "ask": 0}
    assert stage.said[-1] == "leave"
    assert trio.current_time() < 45


async def test_draining_gives_up_what_takes_too_long(autojump_clock: trio.testing.MockClock) -> None:
    stage = Stage([{**QUIET, "give": [group(1)]}])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.worker.run)
        await trio.sleep(10)
        await stage.worker.drain(20.0)
    assert stage.pushed == []
    assert stage.said[-1] == "leave"


async def test_a_head_that_stays_away_ends_the_node_with_a_sentence(autojump_clock: trio.testing.MockClock) -> None:
    stage = Stage([])
    lost = pytest.RaisesExc(HeadLost, match="has not answered for 60 s")
    with pytest.RaisesGroup(lost, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stage.worker.run)
            await trio.sleep(10)
            stage.up = False


async def test_a_head_that_comes_back_in_time_finds_the_node_at_work(autojump_clock: trio.testing.MockClock) -> None:
    stage = Stage([{**QUIET, "give": [group(1)]}], session_s=40.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.worker.run)
        await trio.sleep(10)
        stage.up = False
        await trio.sleep(45)
        stage.up = True
        await trio.sleep(20)
        nursery.cancel_scope.cancel()
    assert sorted(part for _, _, part in stage.pushed) == [0, 1]


@pytest.mark.parametrize("version", [3, 9])
async def test_no_session_begins_before_the_engine_has_its_version(
    autojump_clock: trio.testing.MockClock, version: int
) -> None:
    late = group(1)
    late["payload"]["version"] = 9
    stage = Stage([{**QUIET, "give": [late]}, {**QUIET, "version": version}])
    stage.answers += [{**QUIET, "version": version}] * 5
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.worker.run)
        await trio.sleep(3)
        assert bool(stage.began) == (version == 9)
        nursery.cancel_scope.cancel()
