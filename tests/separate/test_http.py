"""The head over HTTP, from token to weights, on the loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch
import trio

from uniagent.engine.errors import UserError
from uniagent.engine.separate.desk import Desk
from uniagent.engine.separate.http import HeadClient, HeadServer
from uniagent.engine.separate.shipping import WeightShelf, fetch
from uniagent.engine.separate.worker import Unreachable


@asynccontextmanager
async def head(shelf: WeightShelf | None = None) -> AsyncIterator[tuple[Desk, HeadClient]]:
    async with trio.open_nursery() as nursery:
        desk = Desk(2, 5.0, nursery)
        port = await nursery.start(HeadServer(desk.handle, "secret", "[run]\n", shelf).serve, "127.0.0.1", 0)
        client = HeadClient.to(f"http://127.0.0.1:{port}", "secret")
        async with client.client:
            yield desk, client
        nursery.cancel_scope.cancel()


def pull(desk: Desk, **changes: Any) -> Mapping[str, Any]:
    body = {"node": "n", "head": desk.head, "held": {}, "capacity": {"group": 4}, "has": 0, "version": -1}
    return {**body, "shift": 0, "canary": -1, "wait_s": 0.0, **changes}


async def test_nothing_is_said_without_the_token() -> None:
    async with head() as (desk, client):
        for token in ("almost-secret", "wrong"):
            stranger = HeadClient.to(client.url, token)
            async with stranger.client:
                with pytest.raises(UserError, match="token"):
                    await stranger.call("pull", pull(desk))
        async with httpx.AsyncClient(base_url=client.url, trust_env=False) as bare:
            assert (await bare.get("/v1/config")).status_code == 401
        assert not desk.leases.nodes


async def test_a_pull_waits_for_work_and_gets_it_at_once() -> None:
    async with head() as (desk, client), trio.open_nursery() as nursery:
        nursery.start_soon(desk.session, {"x": 1}, 7, 0)
        nursery.start_soon(desk.session, {"x": 1}, 7, 1)
        answer = await client.call("pull", pull(desk, wait_s=60.0))
        (given,) = answer["give"]
        assert (given["id"], given["parts"], given["payload"]["row"]) == ("group-7", [0, 1], {"x": 1})
        nursery.cancel_scope.cancel()


async def test_messages_for_another_head_or_of_another_kind_change_nothing() -> None:
    async with head() as (desk, client):
        assert await client.call("pull", pull(desk, head="another")) == {"head": desk.head}
        assert not desk.leases.nodes
        with pytest.raises(UserError, match="not 'shout'"):
            await client.call("shout", {"head": desk.head})
        with pytest.raises(UserError, match="KeyError"):
            await client.call("push", {"head": desk.head})
        assert (await client.config()) == "[run]\n"


async def test_weights_are_fetched_by_version_and_a_newer_one_is_asked_for_again() -> None:
    shelf = WeightShelf()
    sent = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    async with head(shelf) as (_, client):
        assert await fetch(client.manifest, client.piece, 0) is None  # none yet
        shelf.place(list(sent.items()), 3)
        assert await fetch(client.manifest, client.piece, 4) is None
        found = await fetch(client.manifest, client.piece, 1)
        assert found is not None
        assert found[0] == 3
        assert all(torch.equal(tensor, sent[name]) for name, tensor in found[1])

        async def late_manifest() -> dict[str, Any]:
            old = await client.manifest()
            shelf.place(list(sent.items()), 5)
            return old

        assert await fetch(late_manifest, client.piece, 1) is None

        async def damaged(version: int, number: int) -> bytes:
            return (await client.piece(version, number))[:-1] + b"\xff"

        assert await fetch(client.manifest, damaged, 1) is None


async def test_a_run_that_takes_no_nodes_says_what_to_set() -> None:
    async with head() as (_, client):
        with pytest.raises(UserError, match=r"placement\.joining"):
            await client.manifest()


async def test_a_head_that_is_not_there_is_unreachable() -> None:
    client = HeadClient.to("http://127.0.0.1:9", "secret")
    async with client.client:
        with pytest.raises(Unreachable):
            await client.call("hello", {})


async def test_a_port_that_is_taken_is_one_sentence() -> None:
    async with head() as (desk, client):
        port = int(client.url.rpartition(":")[2])
        with pytest.raises(UserError, match=r"rollout\.head_url"):
            await HeadServer(desk.handle, "secret", "").serve("127.0.0.1", port)
