"""The other nodes of a separate run: ranks that roll out, ranks of the training mesh, nodes that joined from elsewhere.

All three are a node with an engine, sessions and a ``Worker``; they differ in how new weights come and in when their
engine is theirs. Invariants: an engine takes a version between two steps, and what it then holds is compared with what
was sent; a rank that trains rolls out only while rank 0's log is closed to it; a rank does what the head says until it
ends or the head is lost, and signals are the head's business, save on a node of a job of its own.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from typing import Any

import trio
from attrs import define, evolve, field

from uniagent.engine.canary import agree
from uniagent.engine.config import RunConfig
from uniagent.engine.model_files import pick_device
from uniagent.engine.node import Node, open_node
from uniagent.engine.observe.progress import Progress, Silent
from uniagent.engine.ports import Json, KvPolicy
from uniagent.engine.separate.formation import head_url
from uniagent.engine.separate.head import asker, name_of, worker_of
from uniagent.engine.separate.http import HeadClient
from uniagent.engine.separate.worker import Unreachable, Worker
from uniagent.engine.signals import SIGNALS, Stop, watch
from uniagent.engine.team import leave, world

PAUSE_S = 0.2  # before weights that are not there yet are asked for again
RANK_PATIENCE_S = 60.0  # a rank whose head is gone has been left behind


def follow(config: RunConfig) -> None:
    """A rank other than 0 of the head's job, from start to end. Blocking; runs trio."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    trio.run(_rank, config)
    leave()


async def _rank(config: RunConfig) -> None:
    rank, _ = world()
    config = evolve(config, gateway=evolve(config.gateway, port=0))  # a fixed one is rank 0's
    trains = rank < config.placement.train_ranks
    async with open_node(config, stop=Stop(config.run.drain_s), progress=Silent(), trains=trains, leads=False) as node:
        head = HeadClient.to(head_url(config), node.token)
        async with head.client:
            await (MeshRank(node).run(head, rank) if trains else _rollout_rank(node, head, rank))


# ---------------------------------------------------------------- a rank that rolls out


async def _rollout_rank(node: Node, head: HeadClient, rank: int) -> None:
    from uniagent.engine.separate.shipping import receive

    async def update(version: int) -> int:
        device, kv = pick_device(node.config.model.device), KvPolicy(node.config.engine.kv)
        return await node.accelerator.run(receive, node.core, node.outlet, device, kv, kind="sync")

    worker = _helped(
        node,
        lambda **role: worker_of(node, name_of(rank), head.call, update=update, patience_s=RANK_PATIENCE_S, **role),
    )
    await worker.run()


def _helped(node: Node, make: Any) -> Worker:
    """A worker whose node hands on what would wait for a place in its engine, while the training mesh serves."""
    moving, shift = node.moving, 0
    assert moving is not None

    async def role(now: int) -> None:
        nonlocal shift
        shift = now

    async def check(canary: Mapping[str, Json]) -> None:
        assert moving is not None
        await agree(moving.engine, canary)

    worker: Worker = make(role=role, check=check)
    moving.elsewhere = asker(worker)
    moving.crowded = lambda: shift % 2 == 1 and node.gate.capacity().waiting > 0
    return worker


# ---------------------------------------------------------------- a rank of the training mesh


@define(eq=False)
class MeshRank:
    """Follows rank 0's log while the mesh trains, and is a node while it serves."""

    node: Node
    _shift: int = 0
    _news: trio.Event = field(factory=trio.Event)

    async def run(self, head: HeadClient, rank: int) -> None:
        node, moving = self.node, self.node.moving
        assert moving is not None
        assert node.team is not None
        await moving.close()
        node.team.synced = self._put
        worker = worker_of(
            node, name_of(rank), head.call, update=_have, role=self._role, mesh=True, patience_s=RANK_PATIENCE_S
        )
        moving.elsewhere = asker(worker)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._work, worker)
            while (command := await node.accelerator.run(node.team.follow, kind="learner"))[0] != "end":
                while self._shift <= command[1]:  # until the head has the mesh train again
                    await self._news.wait()
            nursery.cancel_scope.cancel()

    async def _work(self, worker: Worker) -> None:
        await worker.run()
        await self._role(1 << 30)  # the head ends: so will its log

    async def _role(self, shift: int) -> None:
        assert self.node.moving is not None
        if shift % 2:
            self.node.moving.open()
        else:
            await self.node.moving.close()
        self._shift = shift
        self._news.set()
        self._news = trio.Event()

    def _put(self, weights: list[tuple[str, Any]], version: int) -> None:
        from uniagent.engine.separate.shipping import put

        assert self.node.core is not None
        put(self.node.core, weights, version, KvPolicy(self.node.config.engine.kv))


async def _have(version: int) -> int:
    """The log brings a version before it is announced."""
    return version


# ---------------------------------------------------------------- a node that joins


async def join(config: RunConfig, head: HeadClient, progress: Progress) -> int:
    """A rollout node of a job of its own; the exit status. The first signal drains it, the second ends it."""
    stop = Stop(config.run.drain_s)
    name = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
    async with open_node(config, stop=stop, progress=progress, trains=False, leads=False) as node:

        async def update(version: int) -> int:
            return await _fetch(node, head, version)

        worker = _helped(node, lambda **role: worker_of(node, name, head.call, update=update, **role))
        progress.note(f"joined {head.url} as {name}")
        async with trio.open_nursery() as nursery:
            await nursery.start(watch, stop)
            nursery.start_soon(_drain, worker, stop)
            await worker.run()
            nursery.cancel_scope.cancel()
    return stop.exit_status


async def _drain(worker: Worker, stop: Stop) -> None:
    await stop.event.wait()
    await worker.drain(stop.drain_s)


async def _fetch(node: Node, head: HeadClient, version: int) -> int:
    """The newest weights, ``version`` or newer, into the engine."""
    from uniagent.engine.separate.shipping import fetch, put

    while True:
        try:
            found = await fetch(head.manifest, head.piece, version)
        except Unreachable:
            found = None
        if found is not None:
            reached, weights = found
            kv = KvPolicy(node.config.engine.kv)
            await node.accelerator.run(put, node.core, weights, reached, kv, kind="sync")
            return reached
        await trio.sleep(PAUSE_S)
