"""The server engine against a server on loopback: the contract, what is asked, what breaks, several replicas."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from attrs import frozen

from tests.engines.contract import (
    Check,
    Logits,
    Opened,
    applicable,
    prompt,
    versions_follow_updates,
)
from tests.engines.contract_updates import cancelling_around_an_update_leaves_nothing_behind
from tests.engines.fake_server import ANSWER, FakeServer, serving
from uniagent.adapters.engines import server_engine
from uniagent.adapters.engines.prefixes import BLOCK, Prefixes
from uniagent.adapters.engines.server import build, read_options
from uniagent.engine import config
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Finish, Generation, Ids, InferenceEngine, KvPolicy, Sampling, VersionSpan
from uniagent.engine.rollout.router import ReplicaLost

VOCABULARY = 150
START = prompt(1, 9, VOCABULARY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return tmp_path


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_engine, "PAUSES_S", (0.0,) * 4)


@asynccontextmanager
async def opened(
    folder: Path, *servers: FakeServer, slots: int = 8, context: int = 96, **options: Any
) -> AsyncIterator[InferenceEngine]:
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(serving(server))
        settings = config.Engine(
            "server", slots=slots, context=context, options={"urls": [s.url for s in servers], **options}
        )
        engine = await stack.enter_async_context(build(settings, folder))
        for server in servers:
            server.bodies.clear()  # the probe's
        yield engine


# ---------------------------------------------------------------- the contract


@frozen
class Remote:
    folder: Path
    model: bool = False
    vocabulary: int = VOCABULARY

    @asynccontextmanager
    async def open(self, *, slots: int = 8, context: int = 96, prefill: int = 32) -> AsyncIterator[Opened]:
        async def update(version: int, kv: KvPolicy) -> None:
            raise NotImplementedError

        async with opened(self.folder, FakeServer(context=4096), slots=slots, context=context) as engine:
            yield Opened(engine, update, trio.lowlevel.checkpoint)

    def logits(self, ids: Ids, version: int) -> Logits:
        raise NotImplementedError

    def replay(self, ids: Ids, spans: tuple[VersionSpan, ...]) -> Logits:
        raise NotImplementedError


def cases() -> list[Any]:
    updating = (versions_follow_updates, cancelling_around_an_update_leaves_nothing_behind)
    checks = [c for c in applicable(Remote(Path())) if c not in updating]
    slow = {"thousands_may_queue"}
    return [pytest.param(c, id=c.__name__, marks=[pytest.mark.slow] if c.__name__ in slow else []) for c in checks]


@pytest.mark.parametrize("check", cases())
async def test_contract(check: Check, folder: Path) -> None:
    await check(Remote(folder))


# ---------------------------------------------------------------- what is asked and answered


async def test_every_parameter_of_the_distribution_is_said(folder: Path) -> None:
    """What is left out, a server fills in from the model's generation_config: another policy would be sampled."""
    server = FakeServer()
    async with opened(folder, server) as engine:
        sampling = Sampling(5, temperature=0.7, top_p=0.9, top_k=0, stop_ids=(3, 4), seed=1)
        await engine.generate(START, sampling, session="s")
        await engine.generate(START, sampling, session="other")
    asked, other = server.bodies
    said = {
        "prompt": START.tolist(),
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "model": "fake",
    }
    assert {name: asked[name] for name in said} == said
    assert 0 <= asked["seed"] < 2**62
    assert asked["seed"] != other["seed"]


async def test_a_generation_carries_logprobs_the_version_and_what_was_cached(folder: Path) -> None:
    async with opened(folder, FakeServer(cached=6)) as engine:
        answer = await engine.generate(START, Sampling(4), session="s")
    assert answer.token_ids.tolist() == ANSWER[:4]
    assert answer.logprobs.tolist() == [-0.5] * 4
    assert answer.versions == (VersionSpan(0, 0, 4),)
    assert answer.kv_versions == (VersionSpan(0, 0, 13),)
    assert answer.cached_tokens == 6


async def test_the_servers_context_counts_where_it_is_shorter(folder: Path) -> None:
    async with opened(folder, FakeServer(context=20), context=96) as engine:
        assert engine.capacity().context == 20
        assert len((await engine.generate(START, Sampling(50), session="s")).token_ids) == 11


async def test_no_more_than_slots_requests_are_at_the_server(folder: Path) -> None:
    server = FakeServer()
    async with opened(folder, server, slots=3) as engine, trio.open_nursery() as nursery:
        server.hold = trio.Event()

        async def one(name: str) -> None:
            await engine.generate(START, Sampling(2), session=name)

        for n in range(7):
            nursery.start_soon(one, f"s{n}")
        while len(server.bodies) < 3:
            await trio.sleep(0.001)
        load = engine.capacity()
        assert (load.running, load.waiting) == (3, 4)
        assert load.kv_free == load.kv_total - 3 * (len(START) + 2)
        server.hold.set()
    assert server.most == 3
    assert engine.capacity().kv_free == load.kv_total


async def test_cancelling_closes_the_connection_and_hands_over_what_came(folder: Path) -> None:
    server = FakeServer()
    partial: list[Generation] = []
    async with opened(folder, server) as engine:
        server.hold = trio.Event()
        with trio.CancelScope() as scope:
            await engine.generate(
                START, Sampling(50), session="s", on_tokens=lambda ids: scope.cancel(), on_abort=partial.append
            )
        with trio.fail_after(5):
            while not server.left:
                await trio.sleep(0.001)
    assert [(g.token_ids.tolist(), g.finish) for g in partial] == [(ANSWER[:1], Finish.ABORTED)]


async def test_weights_are_refused(folder: Path) -> None:
    async with opened(folder, FakeServer()) as engine:
        with pytest.raises(ValueError, match="cannot be updated from here"):
            await engine.update([], 1, KvPolicy.RECOMPUTE)


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_passing_fault_is_tried_again(folder: Path, status: int) -> None:
    server = FakeServer(faults=[])
    async with opened(folder, server) as engine:
        server.faults = [status] * 4
        answer = await engine.generate(START, Sampling(3), session="s")
    assert answer.token_ids.tolist() == ANSWER[:3]
    assert len(server.bodies) == 5


async def test_a_broken_answer_goes_on_where_it_stopped(folder: Path) -> None:
    server = FakeServer()
    seen: list[int] = []
    async with opened(folder, server) as engine:
        server.faults = [("break", 4), ("break", 0), ("break", 3)]
        answer = await engine.generate(
            START, Sampling(12), session="s", on_tokens=lambda ids: seen.extend(ids.tolist())
        )
    assert answer.token_ids.tolist() == ANSWER[:4] + ANSWER[:3] + ANSWER[:5] == seen
    assert answer.finish is Finish.LENGTH
    assert [b["max_tokens"] for b in server.bodies] == [12, 8, 8, 5]
    assert server.bodies[2]["prompt"] == START.tolist() + ANSWER[:4]
    assert len({b["seed"] for b in server.bodies}) == 3  # draws that it has not had; the same ones for the same place


@pytest.mark.parametrize(("stops", "finish", "length"), [((ANSWER[2],), Finish.STOP, 3), ((), Finish.LENGTH, 9)])
async def test_an_answer_that_breaks_after_its_last_token_is_whole(
    folder: Path, stops: tuple[int, ...], finish: Finish, length: int
) -> None:
    server = FakeServer()
    async with opened(folder, server) as engine:
        server.faults = ["unfinished"]
        answer = await engine.generate(START, Sampling(9, stop_ids=stops), session="s")
    assert (answer.finish, len(answer.token_ids), len(server.bodies)) == (finish, length, 1)


async def test_a_server_that_stays_away_is_a_lost_replica(folder: Path) -> None:
    server = FakeServer()
    async with opened(folder, server) as engine:
        server.faults = [503] * 5
        with pytest.raises(ReplicaLost, match="503"):
            await engine.generate(START, Sampling(3), session="s")
        assert engine.capacity().running == 0
        assert len((await engine.generate(START, Sampling(3), session="s")).token_ids) == 3  # it is back


async def test_a_refusal_is_no_fault(folder: Path) -> None:
    server = FakeServer()
    async with opened(folder, server) as engine:
        server.faults = [400]
        with pytest.raises(ValueError, match="fault 400"):
            await engine.generate(START, Sampling(3), session="s")
    assert len(server.bodies) == 1


async def test_a_dead_replicas_sessions_go_on_at_the_others(folder: Path) -> None:
    dead, alive = FakeServer(), FakeServer()
    async with opened(folder, dead, alive, policy="round_robin") as engine:
        dead.faults = [("break", 2)] + [503] * 50
        answers = [await engine.generate(START, Sampling(4), session=f"s{n}") for n in range(6)]
    assert [a.token_ids.tolist() for a in answers] == [ANSWER[:4]] * 6
    assert len(alive.bodies) == 6
    assert all(b["prompt"] == START.tolist() for b in alive.bodies)


async def test_a_session_returns_to_the_replica_that_holds_its_prefix(folder: Path) -> None:
    servers = [FakeServer(context=4096) for _ in range(3)]
    long = prompt(2, 400, VOCABULARY)
    async with opened(folder, *servers, context=4096) as engine:
        await engine.generate(prompt(3, 300, VOCABULARY), Sampling(2), session="other")
        await engine.generate(long, Sampling(2), session="s")
        home = next(s for s in servers if any(b["prompt"] == long.tolist() for b in s.bodies))
        following = np.concatenate([long, prompt(4, 50, VOCABULARY)])
        assert engine.resident(following) == 400 // BLOCK * BLOCK
        await engine.generate(following, Sampling(2), session="s")
    assert any(b["prompt"] == following.tolist() for b in home.bodies)


# ---------------------------------------------------------------- prefixes


def test_a_reply_that_shows_a_block_gone_takes_all_older_ones_with_it() -> None:
    held = Prefixes(10_000)
    first, second, third = (prompt(n, 640, VOCABULARY) for n in range(3))
    for ids in (first, second, third):
        held.hold(ids)
    assert held.resident(second) == 639
    held.correct(held.believed(second), 0)
    assert held.resident(first) == held.resident(second) == 0
    assert held.resident(third) == 639


def test_the_least_recently_used_blocks_make_room() -> None:
    held = Prefixes(20 * BLOCK)
    first, second = prompt(0, 15 * BLOCK, VOCABULARY), prompt(1, 10 * BLOCK, VOCABULARY)
    held.hold(first)
    held.hold(second)
    assert held.resident(second) == 10 * BLOCK - 1
    assert held.resident(first) == 10 * BLOCK  # its beginning is kept, its end is not


def test_counts_in_larger_blocks_are_no_loss() -> None:
    held = Prefixes(10_000)
    ids = prompt(0, 320, VOCABULARY)
    held.hold(ids)
    held.correct(held.believed(ids), 256)
    assert held.resident(ids) == 319


# ---------------------------------------------------------------- opening


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "name the servers"),
        ({"urls": ["127.0.0.1:8000"]}, "name the servers"),
        ({"url": "http://x"}, "did you mean 'urls'"),
        ({"urls": "http://x", "timeout_s": 0}, "timeout_s"),
        ({"urls": "http://x", "policy": "sticky"}, "policy"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_options(options)


def test_a_url_may_end_in_v1() -> None:
    assert read_options({"urls": ["http://a:1/v1/", "http://b:2"]}).urls == ("http://a:1", "http://b:2")


async def test_no_server_there(folder: Path) -> None:
    with pytest.raises(UserError, match="no server answers"):
        async with build(config.Engine("server", options={"urls": "http://127.0.0.1:9"}), folder):
            pass


async def test_the_api_key_comes_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "open sesame")
    async with opened(folder, FakeServer(key="open sesame"), api_key="$THEIR_KEY") as engine:
        assert len((await engine.generate(START, Sampling(2), session="s")).token_ids) == 2
    with pytest.raises(BaseExceptionGroup) as group:
        async with opened(folder, FakeServer(key="open sesame")):
            pass
    assert group.group_contains(UserError, match="api_key")


async def test_a_server_without_token_ids_is_refused(folder: Path) -> None:
    with pytest.raises(BaseExceptionGroup) as group:
        async with opened(folder, FakeServer(ids=False)):
            pass
    assert group.group_contains(UserError, match="return_token_ids")


async def test_raw_logprobs_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with opened(folder, FakeServer()):
            assert not caplog.records
        async with opened(folder, FakeServer(raw=True)):
            assert "processed_logprobs" in caplog.text
