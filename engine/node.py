"""The composition root: puts the parts of a run together, runs them in one nursery, takes them down in order.

Invariants: sessions end before what they use (sandbox providers, gateway, engine, accelerator); the parts are found
by name and imported only here; whatever breaks ends the process with its cause. Knows which parts there are, and
nothing of what they do.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from attrs import define, field

from uniagent.engine import collector, model_files
from uniagent.engine.accelerator import Accelerator
from uniagent.engine.canary import Canary, Score, forward_logprobs
from uniagent.engine.config import RunConfig
from uniagent.engine.errors import UserError
from uniagent.engine.gateway.codec import Codec
from uniagent.engine.gateway.server import listen
from uniagent.engine.gateway.session import SessionParts, in_thread
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.observe.lag import Lag
from uniagent.engine.observe.lag import watch as watch_lag
from uniagent.engine.observe.progress import Progress
from uniagent.engine.ports import Json, KvPolicy, Sleeper, StepEngine, TaskSource
from uniagent.engine.position import Position
from uniagent.engine.providers import NodeProviders
from uniagent.engine.registry import load
from uniagent.engine.rollout.driver import StepDriver
from uniagent.engine.rollout.gate import GatedEngine
from uniagent.engine.separate import formation
from uniagent.engine.separate.moving import MovingEngine
from uniagent.engine.signals import Stop
from uniagent.engine.signals import watch as watch_signals
from uniagent.engine.team import Team, join, world

if TYPE_CHECKING:
    from uniagent.engine.learner.batch import Batch
    from uniagent.engine.separate.head import Head

GIL_SWITCH_S = 0.0005  # the accelerator thread must not hold the interpreter for long: it delays every session


@define(eq=False)
class Node:
    """A running node. ``version`` is the policy version the engine serves. In a separate run ``moving`` is the engine
    as sessions have it, ``outlet`` the process group that weights take, ``token`` opens the head's door, ``head`` is
    what rank 0 does beside."""

    config: RunConfig
    model_folder: Path
    accelerator: Accelerator
    core: StepEngine | None  # of the accelerator thread alone; None: the engine is elsewhere
    shared: bool  # engine and learner are one module
    gate: GatedEngine
    canary: Canary | None
    gateway: Gateway
    tasks: TaskSource
    providers: NodeProviders
    stop: Stop
    lag: Lag
    progress: Progress
    team: Team | None = None
    version: int = 0
    moving: MovingEngine | None = None
    outlet: Any = None
    token: str = field(default="", repr=False)
    head: Head | None = None

    def rows(self, source: str, *, seed: int, repeat: bool) -> Any:
        """The sample rows of a source, in order."""
        options: Mapping[str, Json] = self.config.tasks.options
        return load("seams", "samples")(source, seed=seed, options=options, repeat=repeat)

    async def learn(self, batch: Batch, *, sync: bool) -> dict[str, float]:
        """Trains on a batch, piece by piece between engine steps. With ``sync`` the engine gets the new weights in the
        same call as the last optimizer step: nothing is sampled from weights without a version."""
        team, canary = self.team, self.canary
        assert team is not None
        assert canary is not None
        if isinstance(self.core, Sleeper):
            await self.accelerator.run(self.core.sleep, kind="engine")
        pieces = await self.accelerator.run(team.plan, batch)
        for piece in range(pieces):
            self.progress.phase("training", piece, pieces)
            await self.accelerator.run(team.micro, piece)
        if not sync:
            metrics = await self.accelerator.run(team.apply)
            if isinstance(self.core, Sleeper):
                await self.accelerator.run(self.core.wake, kind="engine")
            return metrics
        if self.config.rollout.partial_rollout:
            metrics = await self._apply_and_sync(team)
        else:
            async with self.gate.shut():
                metrics = await self._apply_and_sync(team)
        self.version += 1
        metrics["canary_gap"] = await self._check(canary)
        return metrics

    async def _check(self, canary: Canary) -> float:
        gap = await canary.check(self.version)
        if self.head is not None:
            self.head.desk.announce(canary=canary.reference)
        return gap

    @asynccontextmanager
    async def own_sessions(self) -> AsyncIterator[None]:
        """Around sessions that must run in this process, as those of an evaluation."""
        async with self.head.evaluating() if self.head is not None else nullcontext():
            yield

    async def restore(self, checkpoint: Path) -> Position:
        """Before any session: trainer and engine get what a training checkpoint (a step-N) holds."""
        team, canary = self.team, self.canary
        assert team is not None
        assert canary is not None

        def load_and_sync() -> tuple[Position, Any]:
            position = Position.of_json(team.load(checkpoint))
            return position, self._sync(team, position.policy_version) if self.core is not None else None

        position, weights = await self.accelerator.run(load_and_sync, kind="checkpoint")
        self.version = position.policy_version
        await self._send(team, position.policy_version, weights)
        await self._check(canary)
        return position

    async def _apply_and_sync(self, team: Team) -> dict[str, float]:
        version = self.version + 1
        if self.core is None:
            metrics = await self.accelerator.run(team.apply)
            await self._send(team, version)
            return metrics

        def both() -> tuple[dict[str, float], Any]:
            metrics = team.apply()
            return metrics, self._sync(team, version)

        metrics, weights = await self.accelerator.run(both)
        await self._send(team, version, weights)
        return metrics

    async def _send(self, team: Team, version: int, weights: Any = None) -> None:
        """To engines that are elsewhere, which have copies of their own."""
        if self.core is None:
            weights = await self.accelerator.run(team.weights, version)
            await self.gate.update(weights, version, KvPolicy(self.config.engine.kv))
        elif self.head is not None:
            await self.head.ship(weights, version)

    def _sync(self, team: Team, version: int) -> Any:
        """Into this process's engine; what it got."""
        assert self.core is not None
        weights = None if self.shared else team.weights(version)
        self.core.update(weights, version, KvPolicy(self.config.engine.kv))
        if weights is not None and (held := self.core.weights()) is not None:
            from uniagent.engine.learner.weights import compare

            compare(weights, held)
        return weights


@asynccontextmanager
async def open_node(
    config: RunConfig,
    *,
    stop: Stop,
    progress: Progress,
    trains: bool,
    checkpoint: Path | None = None,
    leads: bool = True,
) -> AsyncIterator[Node]:
    """A node that is ready for sessions. ``trains``: with a trainer over the engine's module. ``checkpoint``: a Hugging
    Face folder in place of model.path. ``leads`` False: a node of a separate run that another process leads."""
    sys.setswitchinterval(GIL_SWITCH_S)
    if not config.tasks.file:
        raise UserError("tasks.file is not set: name the Task Config (TOML or YAML) of this run")
    tasks = load("seams", "tasks").from_file(config.tasks.file)
    folder = model_files.folder(str(checkpoint) if checkpoint else config.model.path)
    factory = _factory(config)
    steps = getattr(factory, "steps", True)
    if trains and not steps and not getattr(factory, "trains", False):
        raise UserError(
            f"engine.name = {config.engine.name!r} cannot be trained with: its weights are out of reach; it serves "
            "uniagent eval. Train with 'transformers' or 'vllm'"
        )
    separate = config.rollout.mode == "separate" and (trains or not leads)
    if separate and not steps:
        raise UserError(
            f"engine.name = {config.engine.name!r} with these options runs in a process of its own, and a separate run "
            "puts new weights into engines of its ranks: use one in this process (vllm: engine.options.process = "
            "'inline')"
        )
    async with Accelerator.start() as accelerator, trio.open_nursery() as nursery, AsyncExitStack() as engines:
        if leads:
            await nursery.start(watch_signals, stop)
        lag = Lag()
        nursery.start_soon(watch_lag, lag)
        shared = getattr(factory, "shares_module", True) and (not trains or shares_module(config)) and not separate
        codec = Codec.from_folder(folder, parser=config.model.parser)
        core = team = canary = moving = ranks = None
        token = ""
        if steps:
            if separate:
                token, ranks = await accelerator.run(_enter, config, kind="setup")
            core, team, score = await accelerator.run(_build, config, folder, trains, shared, ranks, kind="setup")
            gather_s, below = config.engine.gather_ms / 1000, config.engine.slots // 2
            driver = StepDriver(accelerator, core, gather_s=gather_s, gather_below=below)
            moving = MovingEngine(driver, driver.interrupt) if separate else None
            gate = GatedEngine(moving or driver)
            if leads:
                canary = Canary(
                    accelerator, driver, score, seed=config.run.seed, vocabulary=codec.vocab_size, greedy=separate
                )
        else:
            gate = GatedEngine(await engines.enter_async_context(factory(config.engine, folder)))
            if trains:
                team = await accelerator.run(build_trainer, config, kind="setup")
                canary = Canary(accelerator, gate, team.logprobs, seed=config.run.seed, vocabulary=codec.vocab_size)
        gateway = Gateway(
            SessionParts(codec, gate, in_thread, config.run.seed),
            policy=_policy(config),
            max_sessions=config.gateway.max_sessions,
            model_name=folder.name,
        )
        gateway.origin = await nursery.start(listen, gateway, config.gateway)
        nursery.start_soon(collector.at_quiet_moments, lambda: any(session.running for session in gateway))
        providers = NodeProviders(nursery, config.sandbox.options)
        node = Node(
            config=config,
            model_folder=folder,
            accelerator=accelerator,
            core=core,
            shared=shared,
            gate=gate,
            canary=canary,
            gateway=gateway,
            tasks=tasks,
            providers=providers,
            stop=stop,
            lag=lag,
            progress=progress,
            team=team,
            moving=moving,
            outlet=ranks.outlet if ranks is not None else None,
            token=token,
        )
        if canary is not None:
            await canary.check(0)
        try:
            yield node
        finally:
            if not accelerator.ended:
                with trio.CancelScope(shield=True):
                    await accelerator.run(_end, core, team if leads else None, kind="setup")
        nursery.cancel_scope.cancel()


def shares_module(config: RunConfig) -> bool:
    """Whether engine and learner may be one module: only where no optimizer step goes live without a version, and the
    weights are not sharded."""
    return config.learner.minibatches == 1 and config.rollout.sync_every == 1 and world()[1] == 1


def _enter(config: RunConfig) -> tuple[str, Any]:
    """The head's token and the ranks of a separate run's job, of which all come here."""
    ranks = join(config, model_files.pick_device(config.model.device))
    return formation.share(formation.own_token()), ranks


def _build(
    config: RunConfig, folder: Path, trains: bool, shared: bool, ranks: Any = None
) -> tuple[Any, Team | None, Score]:
    """Engine, team, and how the canary is scored; on the accelerator thread."""
    ranks, model = _model(config, folder, trains, "float32" if trains and shared else config.model.dtype, ranks)
    core = _factory(config)(config.engine, model, shared=shared)
    if not trains:
        return core, None, functools.partial(forward_logprobs, model)
    team = _team(config, model, ranks)
    if (lead := getattr(core, "lead", None)) is not None:  # an engine over several ranks: its commands go to their log
        lead(team)
    return core, team, team.logprobs


def _end(core: Any, team: Team | None) -> None:
    """On the accelerator thread: the engine first, since the ranks' groups end with the team."""
    if (close := getattr(core, "close", None)) is not None:
        close()
    if team is not None:
        team.end()


def build_trainer(config: RunConfig) -> Team:
    """The trainer without engine and node: of a rank that only follows, with its part of an engine over several ranks,
    or beside an engine that is elsewhere."""
    ranks, model = _model(config, model_files.folder(config.model.path), True, config.model.dtype)
    part = getattr(_factory(config), "build_part", None)
    follower = part(config.engine, model) if part is not None and ranks.rank else None
    team = _team(config, model, ranks)
    team.engine = follower
    return team


def _factory(config: RunConfig) -> Any:
    """Of the engine; one that has several picks by its options."""
    factory = load("engines", config.engine.name)
    return factory.choose(config) if hasattr(factory, "choose") else factory


def _model(config: RunConfig, folder: Path, trains: bool, dtype: str, ranks: Any = None) -> tuple[Any, Any]:
    """The ranks that train together, and the model. A module that is trained and sampled from is loaded in float32,
    which the trainer would make of it anyway; an engine's own copy keeps ``model.dtype``."""
    import torch

    torch.set_num_threads(config.run.threads)
    device = model_files.pick_device(config.model.device)
    if trains and ranks is None:
        ranks = join(config, device)
    prepare = getattr(_factory(config), "prepare_ranks", None)
    if trains and world()[1] > 1 and prepare is not None:
        prepare(config.engine, device)
    return ranks, model_files.load(folder, dtype=dtype, device=device)


def _team(config: RunConfig, model: Any, ranks: Any) -> Team:
    from uniagent.engine.learner.trainer import Trainer

    learner = config.learner  # adapters are switched off for the reference: no copy
    copied = learner.kl_coef and not learner.lora_rank
    reference = copy.deepcopy(model).requires_grad_(False) if copied else None
    return Team(
        Trainer(model, config.learner, seed=config.run.seed, steps=config.run.steps, reference=reference, ranks=ranks)
    )


def _policy(config: RunConfig) -> Any:
    from uniagent.engine.trajectory.tree import TreePolicy

    g = config.gateway
    return TreePolicy(rewind=g.rewind, refused=g.refused, side_call=g.side_call, edited=g.edited)
