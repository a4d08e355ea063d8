"""What one simulated run is: machine, mode, workload, faults. Made from a RunConfig, or directly by a bench."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from attrs import evolve, field, fields, frozen

from uniagent.engine.config import RunConfig
from uniagent.engine.errors import UserError
from uniagent.engine.ports import KvPolicy
from uniagent.engine.simulate import costs as cost_model
from uniagent.engine.simulate.costs import Costs
from uniagent.engine.simulate.faults import Fault
from uniagent.engine.simulate.workload import Workload


class Mode(StrEnum):
    """How accelerators are shared. ``pools``: it has a rollout pool and a training pool."""

    SYNC = "sync"  # all roll out, all train, in turn
    ONE_STEP_OFF = "one_step_off"  # two pools; the next batch is rolled out while one is trained on
    FULLY_ASYNC = "fully_async"  # two pools; sessions go on across updates
    COLOCATED = "colocated"  # all do both at once
    SEPARATE = "separate"  # two pools; the training pool rolls out while it would wait

    @property
    def pools(self) -> bool:
        return self in (Mode.ONE_STEP_OFF, Mode.FULLY_ASYNC, Mode.SEPARATE)

    @property
    def stale(self) -> bool:
        """Whether sessions go on across updates."""
        return self in (Mode.FULLY_ASYNC, Mode.COLOCATED, Mode.SEPARATE)


@frozen
class Scenario:
    mode: Mode = Mode.COLOCATED
    accelerators: int = 64
    train_accelerators: int = 16  # of them, in split modes
    steps: int = 20
    seed: int = 0
    groups_per_step: int = 16
    group_size: int = 8
    max_sessions: int = 100_000
    staleness_threshold: float = 2.0
    max_staleness: int = 3
    sync_every: int = 1
    memory_share: float = 0.0  # no limit
    kv: KvPolicy = KvPolicy.RECOMPUTE
    partial_rollout: bool = True
    session_timeout_s: float = 1e6
    engine_share: float = 0.5  # of the device while it trains, colocated
    router: str = "cache_aware"
    costs: Costs = field(factory=Costs)
    workload: Workload = field(factory=Workload)
    faults: tuple[Fault, ...] = ()
    deadline_s: float = 1e8  # of virtual time; a run that takes longer hangs

    def __attrs_post_init__(self) -> None:
        each = self.costs.accelerators
        if self.accelerators % each or not self.accelerators:
            raise UserError(f"simulate.accelerators = {self.accelerators}: must be a multiple of {each}, one replica's")
        if self.mode.pools and (self.train_accelerators % each or not 0 < self.train_accelerators < self.accelerators):
            raise UserError(
                f"simulate.train_accelerators = {self.train_accelerators}: mode {self.mode} needs a multiple of {each} "
                f"between {each} and {self.accelerators - each}"
            )

    @property
    def threshold(self) -> float:
        return self.staleness_threshold if self.mode.stale else 0.0

    @property
    def staleness(self) -> int:
        """Oldest token that trains. One step off: sampled by the weights before those that are trained."""
        return self.max_staleness if self.mode.stale else int(self.mode is Mode.ONE_STEP_OFF)

    @property
    def rollout_replicas(self) -> int:
        """Replicas that always roll out."""
        given = self.train_accelerators if self.mode.pools else 0
        return (self.accelerators - given) // self.costs.accelerators


def from_config(config: RunConfig, *, seed: int, faults: tuple[Fault, ...] = ()) -> Scenario:
    """The scenario of a run config and its [simulate] section."""
    given, rollout = config.simulate, config.rollout
    costs = cost_model.read(Path(given.costs)) if given.costs else Costs()
    drawn = {f.name: getattr(given, f.name) for f in fields(Workload) if hasattr(given, f.name)}
    return Scenario(
        mode=Mode(given.mode or rollout.mode),
        accelerators=given.accelerators,
        train_accelerators=given.train_accelerators,
        steps=config.run.steps,
        seed=seed,
        groups_per_step=rollout.groups_per_step,
        group_size=rollout.group_size,
        max_sessions=rollout.max_sessions,
        staleness_threshold=rollout.staleness_threshold,
        max_staleness=rollout.max_staleness,
        sync_every=rollout.sync_every,
        memory_share=rollout.memory_share,
        kv=KvPolicy(config.engine.kv),
        partial_rollout=rollout.partial_rollout,
        session_timeout_s=rollout.session_timeout_s,
        engine_share=given.engine_share,
        router=given.router,
        costs=evolve(costs, accelerators=given.replica_accelerators or costs.accelerators),
        workload=Workload(**drawn, samples=config.run.steps * rollout.groups_per_step),
        faults=faults,
    )
