"""The head of a separate run, on rank 0: its desk, its door, and the training mesh's role.

Where other modes run sessions in this process, here they are put on the desk and done by whoever takes them: rollout
ranks of the job, nodes that joined, and, while it would only wait for its batch, the training mesh itself. Invariants:
between ``batch`` and the next one the mesh trains and no generation runs on it; every version is on its way to all
nodes before a session may begin with it; what a change of role costs is measured each time. Knows the node and the
desk; of training it is told when.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from attrs import define

from uniagent.engine.config_file import dump
from uniagent.engine.episode import Episode
from uniagent.engine.ports import Json
from uniagent.engine.rollout.roles import Roles
from uniagent.engine.rollout.scheduler import Group, Scheduler
from uniagent.engine.run_folder import RunFolder
from uniagent.engine.separate import formation
from uniagent.engine.separate.desk import Desk
from uniagent.engine.separate.http import HeadServer
from uniagent.engine.separate.leases import Kind
from uniagent.engine.separate.worker import Doings, Worker
from uniagent.engine.session import SessionParts, run_session
from uniagent.engine.team import world

if TYPE_CHECKING:
    from uniagent.engine.node import Node
    from uniagent.engine.separate.moving import MovingEngine
    from uniagent.engine.separate.shipping import WeightShelf

WATCH_S = 0.25  # between two looks at whether the mesh should change its role
LINGER_S = 5.0  # for nodes to hear of the end
WAIT_S = 5.0  # at most, between two signs of life of a node


@define(eq=False)
class Head:
    node: Node
    desk: Desk
    roles: Roles
    moving: MovingEngine
    shelf: WeightShelf | None
    _evaluating: bool = False

    async def begin(self) -> None:
        """Gives out the first weights, unless a checkpoint's were, waits for this job's ranks that roll out, and tries
        a change of role, there and back, to know what it costs."""
        if self.desk.version < 0:
            weights = await self.node.accelerator.run(self._team.weights, self.node.version)
            await self.ship(weights, self.node.version)
        rank_names = {name_of(rank) for rank in range(self.node.config.placement.train_ranks, world()[1])}
        await self.desk.wait_until(lambda: rank_names <= self.desk.reached(self.node.version))
        await self._serve(True)
        await self._serve(False)

    async def session(self, row: Mapping[str, Json], sample: int, replica: int) -> Episode:
        """One session of a group, wherever it is done."""
        return await self.desk.session(row, sample, replica)

    async def batch(self, scheduler: Scheduler, groups: int) -> list[Group]:
        """The next batch, and the mesh ready to train on it."""
        admission = scheduler.admission
        self.roles.note(trio.current_time(), admission.consumed + admission.buffered)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, scheduler, groups)
            taken = await scheduler.batch(groups)
            nursery.cancel_scope.cancel()
        await self._serve(False)
        if self.node.stop.event.is_set() and self._alone and not self.desk.others():
            self.moving.open()  # what runs here may end here
        return taken

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[None]:
        """The sessions of this process may use its engine."""
        self.moving.open()
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                await self.moving.close()

    async def ship(self, weights: Any, version: int) -> None:
        """To all nodes: those of this job have it when this returns, others fetch it."""
        from uniagent.engine.separate.shipping import send

        if self.shelf is not None:
            await trio.to_thread.run_sync(self.shelf.place, weights, version)
        self.desk.announce(version=version)
        if (outlet := self._team.trainer.ranks.outlet) is not None:
            await self.node.accelerator.run(send, weights, version, outlet, kind="sync")

    def metrics(self) -> dict[str, float]:
        leases = self.desk.leases
        return {
            "nodes/rollout": self.desk.others(),
            "nodes/lost": leases.lost,
            "mesh/switches": self.roles.switches,
            "mesh/switch_s": self.roles.switch_s,
            "mesh/moved": self.moving.moved,
        }

    # ------------------------------------------------------------ the mesh's role

    @property
    def _team(self) -> Any:
        assert self.node.team is not None
        return self.node.team

    @property
    def _alone(self) -> bool:
        return self.node.config.placement.train_ranks == 1

    async def _watch(self, scheduler: Scheduler, groups: int) -> None:
        while True:
            missing = groups - scheduler.admission.buffered
            await self._serve(self.roles.wanted(missing=missing, others=self.desk.others()))
            await trio.sleep(WATCH_S)

    async def _serve(self, serving: bool) -> None:
        """The mesh as a whole changes its role, if it has the other one."""
        if serving == self.roles.serving:
            return
        begun, shift, accelerator = trio.current_time(), self.desk.shift + 1, self.node.accelerator
        with trio.CancelScope(shield=True):
            self.roles.switched(serving)
            if serving:
                await accelerator.run(self._team.serve, shift)
                self.desk.announce(shift=shift)
                self.moving.open()
            else:
                self.desk.announce(shift=shift)
                await self.moving.close()
                await accelerator.run(self._team.gather)
        self.roles.measured(trio.current_time() - begun)


@asynccontextmanager
async def open_head(node: Node, folder: RunFolder) -> AsyncIterator[Head]:
    """The head of a run on a node that trains; nodes may come from now on."""
    from uniagent.engine.separate.shipping import WeightShelf

    config, moving = node.config, node.moving
    assert moving is not None
    url, train = formation.head_url(config), config.placement.train_ranks
    async with trio.open_nursery() as nursery:
        mesh = frozenset(name_of(rank) for rank in range(train))
        desk = Desk(config.rollout.group_size, config.rollout.lease_s, nursery, mesh)
        shelf = WeightShelf() if config.placement.joining else None
        roles = Roles(train, 0.0, since=trio.current_time())  # what a switch costs is measured before it counts
        head = node.head = Head(node, desk, roles, moving, shelf)
        server = HeadServer(desk.handle, node.token, dump(config), shelf)
        await nursery.start(server.serve, *formation.door(config, url))
        if shelf is not None:
            node.progress.note(await _invitation(url, node.token, folder))
        await moving.close()
        worker = worker_of(node, name_of(0), desk.handle, update=_known, mesh=True)
        moving.elsewhere = asker(worker)
        nursery.start_soon(desk.watch)
        nursery.start_soon(worker.run)
        try:
            yield head
        finally:
            with trio.move_on_after(LINGER_S, shield=True):
                desk.announce(ending=True)
                await desk.wait_until(lambda: not desk.leases.nodes)
        nursery.cancel_scope.cancel()


async def _known(version: int) -> int:
    """The mesh's engines have a version before it is announced."""
    return version


async def _invitation(url: str, token: str, folder: RunFolder) -> str:
    command = f"uniagent rollout --join {url}"
    if token == formation.given_token():
        return f"rollout nodes join with: {command} (the token in {formation.TOKEN})"
    file = folder.path / "head_token"
    await trio.to_thread.run_sync(formation.keep, token, file)
    return f"rollout nodes join with: {formation.TOKEN}=$(cat {file}) {command}"


# ---------------------------------------------------------------- what every node of a separate run has


def name_of(rank: int) -> str:
    return f"rank-{rank}"


def worker_of(
    node: Node,
    name: str,
    call: Callable[..., Any],
    *,
    update: Callable[..., Any],
    check: Callable[..., Any] | None = None,
    role: Callable[..., Any] | None = None,
    mesh: bool = False,
    patience_s: float = 300.0,
) -> Worker:
    """A worker that runs its sessions on ``node``."""
    config, moving = node.config, node.moving
    assert moving is not None
    parts = SessionParts(node.gateway, node.tasks, node.providers, config.rollout.session_timeout_s)

    async def session(row: Mapping[str, Json], sample: int, replica: int) -> Episode:
        return await run_session(parts, row, name=f"train-{sample}-{replica}", sample=sample, replica=replica)

    doings = Doings(session, moving.generate_here, update, check or _nothing, role or _nothing)
    groups = max(1, config.rollout.max_sessions // config.rollout.group_size)
    capacity = {Kind.GROUP: groups, Kind.ASK: config.engine.slots}
    wait_s = min(WAIT_S, config.rollout.lease_s / 4)
    return Worker(name, call, doings, capacity, wait_s=wait_s, patience_s=patience_s, mesh=mesh)


def asker(worker: Worker) -> Callable[..., Any]:
    """Generations by other nodes, each under a name of its own."""
    count = 0

    async def ask(*what: Any) -> Any:
        nonlocal count
        count += 1
        return await worker.ask(str(count), *what)

    return ask


async def _nothing(_: Any) -> None: ...
