"""The training loop of every mode: take a batch of complete groups, train on it, hand the new weights to the engine.

Sessions run beside it, as far as the scheduler's admission allows: in sync mode none while training, in colocated mode
those of the next batches. Invariants: no trained token is older than ``max_staleness``; every episode that ended is in
the record, with what became of its tokens; a run that is asked to stop leaves a checkpoint and a summary of what it
did, and what a killed one did after its last checkpoint is done again. A sample's sessions are named by its number in
the data and not by the step, so that a run is repeatable.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import trio
from attrs import Factory, define, evolve, field

from uniagent.engine.checkpointing import Checkpoints
from uniagent.engine.config_file import dump
from uniagent.engine.curriculum.feed import Feed, open_feed
from uniagent.engine.episode import Episode
from uniagent.engine.errors import UserError
from uniagent.engine.evaluation import evaluate
from uniagent.engine.fingerprint import of_run, software
from uniagent.engine.journal import Journal, Record, Use, lines
from uniagent.engine.learner.batch import Batch, build, moved
from uniagent.engine.learner.recipe import recipe
from uniagent.engine.node import Node
from uniagent.engine.observe.alarms import Alarms
from uniagent.engine.observe.metrics import MetricsFile, of_agents, of_answers, of_episodes, of_tasks, staleness
from uniagent.engine.ports import Json
from uniagent.engine.position import Position, Samples
from uniagent.engine.rollout.admission import Admission
from uniagent.engine.rollout.memory import Memory, longest
from uniagent.engine.rollout.scheduler import Group, Scheduler
from uniagent.engine.run_folder import RunFolder
from uniagent.engine.session import SessionParts, run_session

FLAT = 20  # batches' worth of groups without a signal in a row, after which waiting for one is no use


@define(eq=False)
class Training:
    """One run of training on an open node."""

    node: Node
    folder: RunFolder
    journal: Journal
    metrics: MetricsFile
    checkpoints: Checkpoints
    start: Position = field(factory=Position)
    resumed: bool = False  # the folder holds what an earlier process did
    step: int = Factory(lambda self: self.start.step, takes_self=True)
    evals: dict[str, Mapping[str, float]] = Factory(lambda self: dict(self.start.evals), takes_self=True)
    tokens: int = 0  # sampled, all phases
    sandbox_s: float = 0.0
    _samples: Samples = field(init=False)
    _feed: Feed = field(init=False)
    _started: float = field(factory=trio.current_time)
    _trained_at: float = field(factory=trio.current_time)
    _ended: int = 0  # sessions since the last step
    _problem: str | None = None  # why the learner can go on no more
    _failed_groups: int = 0  # in a row, all of whose sessions failed outside the model
    _flat_groups: int = 0  # in a row, given back because all of their sessions came to one outcome
    _returned: deque[tuple[Group, str]] = field(factory=deque)
    _alarms: Alarms = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._alarms = Alarms(self.node.config.alarms)

    async def run(self) -> None:
        """Evaluate, train run.steps batches, evaluate, save. Returns early once the node is asked to stop."""
        hashes = await self._header()
        seed = self.node.config.run.seed
        async with open_feed(self.node, self.folder.path, hashes, seed=seed, state=self.start.curriculum) as self._feed:
            self._samples = Samples.after(self.start, self._feed)
            await self._run()

    async def _run(self) -> None:
        config, stop = self.node.config, self.node.stop
        if "before" not in self.evals:
            await self._evaluate("before")
        scheduler = self._scheduler()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scheduler.run)
            nursery.start_soon(self._close_on_stop, scheduler)
            while self.step < config.run.steps and not stop.event.is_set():
                if self.node.head is not None:
                    groups = await self.node.head.batch(scheduler, config.rollout.groups_per_step)
                else:
                    groups = await scheduler.batch(config.rollout.groups_per_step)
                if not groups or stop.event.is_set():
                    scheduler.leftover.extend(groups)
                    break
                await self._train(groups, scheduler)
                best = False
                if config.eval.every and self.step % config.eval.every == 0 and self.step < config.run.steps:
                    best = await self._evaluate(f"step-{self.step}")
                if config.checkpoint.every and (best or self.step % config.checkpoint.every == 0):
                    await self.checkpoints.save(self.step, self._position())
            scheduler.close()
            if self.step == config.run.steps:  # what still runs will not be trained on
                nursery.cancel_scope.cancel()
            elif not stop.event.is_set():
                raise UserError(f"tasks.data ended after {self.step} of {config.run.steps} steps: give more samples")
            with stop.draining():
                await scheduler.ended.wait()
            nursery.cancel_scope.cancel()
        await self._record(scheduler.leftover)
        await self._feed.write(scheduler.leftover)
        await self.checkpoints.save(self.step, self._position())
        await self.checkpoints.written()
        if self.step == config.run.steps and "after" not in self.evals:
            await self._evaluate("after")

    def summary(self) -> dict[str, Any]:
        """What summary.json holds."""
        return {
            "steps": self.step,
            "seed": self.node.config.run.seed,
            "interrupted": self.node.stop.event.is_set(),
            "stopped": self.node.stop.reason or self._problem,
            "eval": self.evals,
            **self._spent(),
            "policy_version": self.node.version,
            "checkpoint": str(self.checkpoints.newest) if self.checkpoints.newest else None,
        }

    # ------------------------------------------------------------ one step

    def _scheduler(self) -> Scheduler:
        node, rollout = self.node, self.node.config.rollout
        parts = SessionParts(node.gateway, node.tasks, node.providers, rollout.session_timeout_s)

        async def one(row: Mapping[str, Json], sample: int, replica: int) -> Episode:
            if node.head is not None:
                episode = await node.head.session(row, sample, replica)
            else:
                name = f"train-{sample}-{replica}"
                episode = await run_session(parts, row, name=name, sample=sample, replica=replica)
            self._ended += 1
            node.progress.phase("rollout", self._ended, rollout.groups_per_step * rollout.group_size)
            return episode

        admission = Admission(rollout.groups_per_step, rollout.sync_every, rollout.staleness_threshold)
        admission.restore(self.start.admission())
        return Scheduler(
            self._samples,
            one,
            admission,
            size=rollout.group_size,
            limit=rollout.max_sessions,
            wanted=self._unwanted,
            returned=self._give_back,
            memory=self._memory(),
        )

    def _memory(self) -> Memory | None:
        if not (share := self.node.config.rollout.memory_share):
            return None

        def total() -> int:  # all nodes have engines alike
            head = self.node.head
            return self.node.gate.capacity().kv_total * (max(1, head.desk.others()) if head is not None else 1)

        return Memory(total, share, longest)

    def _position(self) -> dict[str, Json]:
        """What a run needs to go on from a checkpoint, beside the trainer's state."""
        unsynced = self.step % self.node.config.rollout.sync_every != 0  # handing these weights over is a sync
        version = self.node.version + unsynced
        where = self._samples.position(step=self.step, policy_version=version, evals=self.evals, spent=self._spent())
        return evolve(where, curriculum=self._feed.curriculum.state()).as_json()

    def _spent(self) -> dict[str, float]:
        """Seconds and tokens of the whole run, as far as they led to the weights it has."""
        busy = self.node.accelerator.busy_s
        now = {
            "wall_s": trio.current_time() - self._started,
            "tokens": self.tokens,
            "sandbox_s": self.sandbox_s,
            "engine_s": busy.get("engine", 0.0),
            "learner_s": busy.get("learner", 0.0),
        }
        return {name: amount + self.start.spent.get(name, 0) for name, amount in now.items()}

    def _unwanted(self, group: Group) -> str | None:
        """Why a group fills no place in a batch."""
        counted = [e for e in group if e.counts]
        if not counted:
            self._failed_groups += 1
            if self._failed_groups >= self.node.config.rollout.groups_per_step:
                _refuse_if_nothing_works(group)
            return "infra"
        self._failed_groups = 0
        if self.node.config.rollout.on_no_signal == "refill" and len({e.result.solved for e in counted}) == 1:
            self._flat_groups += 1
            if self._flat_groups >= FLAT * self.node.config.rollout.groups_per_step:
                raise UserError(
                    f"the last {self._flat_groups} groups all came to one outcome each: the samples are too easy or "
                    "too hard for this model; uniagent difficulty says how hard, and chooses"
                )
            return "no_signal"
        self._flat_groups = 0
        return None

    def _give_back(self, group: Group, cause: str) -> None:
        self._feed.given_back(group)
        self._returned.append((group, cause))

    async def _close_on_stop(self, scheduler: Scheduler) -> None:
        await self.node.stop.event.wait()
        scheduler.close()

    async def _record(self, groups: Iterable[Group], cause: str | None = None) -> None:
        """Episodes that no batch was made of."""
        for group in groups:
            await self.journal.append([Record(e, Use(self.step, tokens=_lost(e, cause))) for e in group])

    async def _record_batch(self, episodes: Iterable[Episode], batch: Batch, step: int) -> None:
        assert self.node.team is not None
        uses = moved(batch.uses, self.node.team.trainer.lost if batch.tokens else {})
        await self.journal.append([Record(e, Use(step, tokens=uses[e.session])) for e in episodes])

    async def _train(self, groups: list[Group], scheduler: Scheduler) -> None:
        node, rollout = self.node, self.node.config.rollout
        episodes = [e for group in groups for e in group]
        started = trio.current_time()
        batch = await trio.to_thread.run_sync(self._batch, groups)
        sync = (self.step + 1) % rollout.sync_every == 0
        try:
            learned = await node.learn(batch, sync=sync) if batch.tokens else {}
        except UserError as problem:  # no step can be taken: which sessions it was is kept
            self._problem = str(problem)
            await self._record_batch(episodes, batch, self.step + 1)
            raise
        self.step += 1
        for group in groups:
            self._samples.done(group[0].sample, trained=True)
            self._feed.done(group)
        self._feed.advance(node.version)
        self._ended = 0
        if sync:
            scheduler.synced()
        self.tokens += sum(e.export.ledger.sampled for e in episodes)
        self.sandbox_s += sum(e.timings.get("sandbox", 0.0) for e in episodes)
        numbers = {
            **of_episodes(episodes),
            **of_answers(episodes),
            **of_agents(episodes),
            **of_tasks(episodes),
            **staleness(episodes, batch.version),
            **learned,
            **node.lag.metrics(),
            **(node.head.metrics() if node.head is not None else {}),
            **self._feed.curriculum.metrics(),
            **{f"groups/{name}": n for name, n in scheduler.admission.counters().items()},
            "rollout_s": started - self._trained_at,
            "training_s": trio.current_time() - started,
            "version": node.version,
        }
        now = trio.current_time()
        numbers["tokens_per_s"] = numbers["tokens/sampled"] / max(now - self._trained_at, 1e-9)
        self._trained_at = now
        self.metrics.log(numbers, step=self.step)
        node.progress.step(self.step, numbers)
        self._heed(numbers)
        await self._record_batch(episodes, batch, self.step)
        for group, cause in [self._returned.popleft() for _ in range(len(self._returned))]:
            await self._record([group], "filtered" if cause == "no_signal" else cause)
            self._samples.done(group[0].sample, trained=False)
            self._feed.done(group)
        await self._feed.write()

    def _batch(self, groups: Sequence[Group]) -> Batch:
        learner = self.node.config.learner
        return build(
            groups,
            recipe(learner).advantage,
            version=self.node.version,
            max_staleness=self.node.config.rollout.max_staleness,
            overlong_limit=learner.overlong_limit,
            overlong_buffer=learner.overlong_buffer,
        )

    def _heed(self, numbers: Mapping[str, float]) -> None:
        for alarm in self._alarms.look(numbers):
            self.node.progress.note(f"{'stopped' if alarm.stops else 'warning'}: {alarm.text}")
            if alarm.stops:
                self.node.stop.end(f"alarm {alarm.name}: {alarm.text}")

    # ------------------------------------------------------------ around the steps

    def _rows(self) -> Iterator[Mapping[str, Json]]:
        """The data, from its start."""
        config = self.node.config
        if not config.tasks.data:
            raise UserError("tasks.data is not set: name the samples to train on (a JSONL file, or NAME/SPLIT)")
        return iter(self.node.rows(config.tasks.data, seed=config.run.seed, repeat=True))

    async def _evaluate(self, name: str) -> bool:
        """Whether it is the best so far."""
        node, best = self.node, False
        if not node.config.eval.data:
            return False
        with node.stop.draining():
            async with node.own_sessions():
                result = await evaluate(node, self.journal, name=name, step=self.step, history=self._feed.history)
            if not node.stop.event.is_set():
                self.evals[name] = result
                best = self.checkpoints.best(self.step, result["success"])
                greedy = f", greedy {result['success_greedy']:.3f}" if "success_greedy" in result else ""
                node.progress.note(
                    f"evaluation {name}: success {result['success']:.3f} ± {result['stderr']:.3f}{greedy} "
                    f"(n = {result['n']:.0f})"
                )
        return best

    async def _header(self) -> dict[str, str]:
        node = self.node

        def hashes() -> dict[str, str]:
            template = node.gateway.parts.codec.template_source
            first = itertools.islice(self._rows(), node.config.rollout.groups_per_step)
            return of_run(config=dump(node.config), model=node.model_folder, template=template, rows=first)

        found = await trio.to_thread.run_sync(hashes)
        if self.resumed:
            await trio.to_thread.run_sync(_refuse_other, self.folder, found)
        start = evolve(self.start, curriculum={}).as_json() if self.resumed else None
        await self.journal.header(found, software(), resumed=start)
        return found


def _refuse_other(folder: RunFolder, hashes: Mapping[str, str]) -> None:
    """A run goes on with the data and the model it began with."""
    before = next(lines(folder.episodes), {}).get("hashes", hashes)
    for what in ("dataset", "template", "tokenizer", "model"):
        if before.get(what) != hashes[what]:
            raise UserError(
                f"cannot resume {folder.path}: the {what} is not the one this run began with; put it back, or start a "
                "run of its own from the checkpoint (--checkpoint)"
            )


def _lost(episode: Episode, cause: str | None) -> dict[str, int]:
    trainable = episode.export.ledger.trainable
    return {cause: trainable} if cause and trainable else {}


def _refuse_if_nothing_works(episodes: Sequence[Episode]) -> None:
    """As many groups in a row as a batch has failed outside the model: training on is no use."""
    if episodes:
        first = next((e.error for e in episodes if e.error), "no cause was recorded")
        raise UserError(f"every session of a whole batch failed outside the model; the last group's first: {first}")
