"""Who trains where: the learner's time, and the training mesh that rolls out while it would wait.

``colocated`` training shares each device with its engine: engines that have requests keep ``engine_share`` of it, and
the learner gets all of the devices when none has. ``separate`` switches the training mesh as a whole: when a batch is
not there yet it serves rollouts if the time this is predicted to save exceeds what both switches cost, with a margin,
and goes back in time for the batch; what it was generating goes on elsewhere. Invariant: the training mesh has no
request while it trains.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio
from attrs import define, field

from uniagent.engine.rollout.router import Router
from uniagent.engine.rollout.scheduler import Group, Scheduler
from uniagent.engine.simulate.engine import SimulatedEngine
from uniagent.engine.simulate.scenario import Mode, Scenario

MARGIN = 1.5  # the gain must be so many times the cost: hysteresis
SLICES = 10  # of a colocated training step, between which the engines' load is looked at again
WATCH_S = 5.0  # between two looks at whether to switch
MEMORY = 0.2  # weight of the newest batch in the expected seconds a group


@define(eq=False)
class Mesh:
    """``learner_s`` are accelerator-seconds of training; ``switches`` counts changes of role, both ways."""

    scenario: Scenario
    engines: Sequence[SimulatedEngine]
    router: Router
    scheduler: Scheduler
    learner_s: float = 0.0
    switches: int = 0
    serving: bool = False
    _group_s: float | None = None  # of rollout, at the rate of late
    _last: tuple[float, int] = field(default=(0.0, 0))
    _ready_at: float = 0.0  # the training mesh has its optimizer back

    def __attrs_post_init__(self) -> None:
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
        self._note_rate()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._roles, groups)
            taken = await self.scheduler.batch(groups)
            nursery.cancel_scope.cancel()
        if self.serving:
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

    def _note_rate(self) -> None:
        now, a = trio.current_time(), self.scheduler.admission
        done = a.consumed + a.buffered
        since, before = self._last
        if done > before:
            rate = (now - since) / (done - before)
            self._group_s = rate if self._group_s is None else self._group_s + MEMORY * (rate - self._group_s)
            self._last = (now, done)

    async def _roles(self, groups: int) -> None:
        """While the batch is awaited: serve when that pays, and stop in time."""
        s = self.scenario
        while True:
            missing = groups - self.scheduler.admission.buffered
            wait = missing * (self._group_s or 0.0)
            gain = wait * len(self._own) / len(self.engines)
            if not self.serving and gain > MARGIN * 2 * s.costs.switch_s:
                await self._join()
            elif self.serving and wait < s.costs.switch_s:
                self._leave()
                return
            await trio.sleep(WATCH_S)

    async def _join(self) -> None:
        self.serving = True
        self.switches += 1
        await trio.sleep(self.scenario.costs.switch_s)
        for index in self._own:
            self.router.away(index, False)

    def _leave(self) -> None:
        self.switches += 1
        for index in self._own:
            self.router.away(index, True)
        for index in self._own:
            self.engines[index].drain()
        self.serving = False
        self._ready_at = trio.current_time() + self.scenario.costs.switch_s
