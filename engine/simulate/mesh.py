"""Who trains where: the learner's time, and the training mesh that rolls out while it would wait.

``colocated`` training shares each device with its engine: engines that have requests keep ``engine_share`` of it, and
the learner gets all of the devices when none has. ``separate`` switches the training mesh as a whole while a batch is
not there yet, when ``rollout.roles`` says so, which real training asks too; what the mesh was generating goes on
elsewhere. Invariant: the training mesh has no request while it trains.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio
from attrs import define, field

from uniagent.engine.rollout.roles import Roles
from uniagent.engine.rollout.router import Router
from uniagent.engine.rollout.scheduler import Group, Scheduler
from uniagent.engine.simulate.engine import SimulatedEngine
from uniagent.engine.simulate.scenario import Mode, Scenario

SLICES = 10  # of a colocated training step, between which the engines' load is looked at again
WATCH_S = 5.0  # between two looks at whether to switch


@define(eq=False)
class Mesh:
    """``learner_s`` are accelerator-seconds of training."""

    scenario: Scenario
    engines: Sequence[SimulatedEngine]
    router: Router
    scheduler: Scheduler
    learner_s: float = 0.0
    roles: Roles = field(init=False)
    _ready_at: float = 0.0  # the training mesh has its optimizer back

    def __attrs_post_init__(self) -> None:
        self.roles = Roles(len(self._own), self.scenario.costs.switch_s)
        if self.scenario.mode is Mode.SEPARATE:
            for index in self._own:
                self.router.away(index, True)

    @property
    def _own(self) -> range:
        """The training mesh's replicas."""
        return range(self.scenario.rollout_replicas, len(self.engines))

    async def batch(self, groups: int) -> list[Group]:
        """The next batch, and the training mesh ready to train on it."""
        if self.scenario.mode is not Mode.SEPARATE:
            return await self.scheduler.batch(groups)
        a = self.scheduler.admission
        self.roles.note(trio.current_time(), a.consumed + a.buffered)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._roles, groups)
            taken = await self.scheduler.batch(groups)
            nursery.cancel_scope.cancel()
        if self.roles.serving:
            self._leave()
        await trio.sleep_until(self._ready_at)
        return taken

    async def train(self, tokens: int) -> None:
        """One optimizer step over so many tokens."""
        s = self.scenario
        work = tokens * s.costs.learner_token_s
        if s.mode is Mode.COLOCATED:
            await self._beside_engines(work)
        else:
            own = s.train_accelerators if s.mode.pools else s.accelerators
            await trio.sleep(work / own)
        self.learner_s += work
        await trio.sleep(s.costs.learner_step_s)

    # ------------------------------------------------------------ colocated

    async def _beside_engines(self, work: float) -> None:
        part = work / self.scenario.accelerators / SLICES
        try:
            for _ in range(SLICES):
                share = self.scenario.engine_share if any(e.requests() for e in self.engines) else 0.0
                for engine in self.engines:
                    engine.share(share or 1.0)
                await trio.sleep(part / (1 - share))
        finally:
            for engine in self.engines:
                engine.share(1.0)

    # ------------------------------------------------------------ separate

    async def _roles(self, groups: int) -> None:
        """While the batch is awaited: serve when that pays, and stop in time."""
        while True:
            missing = groups - self.scheduler.admission.buffered
            wanted = self.roles.wanted(missing=missing, others=self.scenario.rollout_replicas)
            if wanted and not self.roles.serving:
                await self._join()
            elif self.roles.serving and not wanted:
                self._leave()
            await trio.sleep(WATCH_S)

    async def _join(self) -> None:
        self.roles.switched(True)
        await trio.sleep(self.scenario.costs.switch_s)
        self.roles.measured(self.scenario.costs.switch_s)
        for index in self._own:
            self.router.away(index, False)

    def _leave(self) -> None:
        self.roles.switched(False)
        for index in self._own:
            self.router.away(index, True)
        for index in self._own:
            self.engines[index].drain()
        self._ready_at = trio.current_time() + self.scenario.costs.switch_s
