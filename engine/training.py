"""The training loop of every mode: take a batch of complete groups, train on it, hand the new weights to the engine.

Sessions run beside it, as far as the scheduler's admission allows: in sync mode none while training, in colocated mode
those of the next batches. Invariants: no trained token is older than ``max_staleness``; every episode that ended is in
the record, with what became of its tokens; a run that is asked to stop leaves a checkpoint and a summary of what it
did. A sample's sessions are named by its number in the data and not by the step, so that a run is repeatable.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import trio
from attrs import define, field

from uniagent.engine.checkpointing import Checkpoints
from uniagent.engine.config_file import dump
from uniagent.engine.episode import Episode
from uniagent.engine.errors import UserError
from uniagent.engine.evaluation import evaluate
from uniagent.engine.fingerprint import of_run, software
from uniagent.engine.journal import Journal, Record, Use
from uniagent.engine.learner.batch import Batch, build
from uniagent.engine.learner.recipe import recipe
from uniagent.engine.node import Node
from uniagent.engine.observe.metrics import MetricsFile, of_agents, of_episodes, staleness
from uniagent.engine.ports import Json
from uniagent.engine.rollout.admission import Admission
from uniagent.engine.rollout.scheduler import Group, Scheduler
from uniagent.engine.run_folder import RunFolder
from uniagent.engine.session import SessionParts, run_session


@define(eq=False)
class Training:
    """One run of training on an open node."""

    node: Node
    folder: RunFolder
    journal: Journal
    metrics: MetricsFile
    checkpoints: Checkpoints
    step: int = 0
    tokens: int = 0  # sampled, all phases
    sandbox_s: float = 0.0
    evals: dict[str, dict[str, float]] = field(factory=dict)
    _started: float = field(factory=trio.current_time)
    _trained_at: float = field(factory=trio.current_time)
    _ended: int = 0  # sessions since the last step
    _failed_groups: int = 0  # in a row, all of whose sessions failed outside the model
    _returned: deque[tuple[Group, str]] = field(factory=deque)

    async def run(self) -> None:
        """Evaluate, train run.steps batches, evaluate, save. Returns early once the node is asked to stop."""
        config, stop = self.node.config, self.node.stop
        first, samples = _peek(self._samples(), config.rollout.groups_per_step)
        await self._header(first)
        await self._evaluate("before")
        scheduler = self._scheduler(samples)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scheduler.run)
            nursery.start_soon(self._close_on_stop, scheduler)
            while self.step < config.run.steps and not stop.event.is_set():
                groups = await scheduler.batch(config.rollout.groups_per_step)
                if not groups or stop.event.is_set():
                    scheduler.leftover.extend(groups)
                    break
                await self._train(groups, scheduler)
                if config.checkpoint.every and self.step % config.checkpoint.every == 0:
                    await self.checkpoints.save(self.step, self._position(scheduler))
                if config.eval.every and self.step % config.eval.every == 0 and self.step < config.run.steps:
                    await self._evaluate(f"step-{self.step}")
            scheduler.close()
            if self.step == config.run.steps:  # what still runs will not be trained on
                nursery.cancel_scope.cancel()
            elif not stop.event.is_set():
                raise UserError(f"tasks.data ended after {self.step} of {config.run.steps} steps: give more samples")
            with stop.draining():
                await scheduler.ended.wait()
            nursery.cancel_scope.cancel()
        await self._record(scheduler.leftover)
        await self.checkpoints.save(self.step, self._position(scheduler))
        await self.checkpoints.written()
        if self.step == config.run.steps:
            await self._evaluate("after")

    def summary(self) -> dict[str, Any]:
        """What summary.json holds."""
        busy = self.node.accelerator.busy_s
        return {
            "steps": self.step,
            "seed": self.node.config.run.seed,
            "interrupted": self.node.stop.event.is_set(),
            "eval": self.evals,
            "wall_s": trio.current_time() - self._started,
            "tokens": self.tokens,
            "sandbox_s": self.sandbox_s,
            "engine_s": busy.get("engine", 0.0),
            "learner_s": busy.get("learner", 0.0),
            "policy_version": self.node.version,
            "checkpoint": str(self.checkpoints.newest) if self.checkpoints.newest else None,
        }

    # ------------------------------------------------------------ one step

    def _scheduler(self, samples: Iterator[tuple[int, Mapping[str, Json]]]) -> Scheduler:
        node, rollout = self.node, self.node.config.rollout
        parts = SessionParts(node.gateway, node.tasks, node.providers, rollout.session_timeout_s)

        async def one(row: Mapping[str, Json], sample: int, replica: int) -> Episode:
            episode = await run_session(parts, row, name=f"train-{sample}-{replica}", sample=sample, replica=replica)
            self._ended += 1
            node.progress.phase("rollout", self._ended, rollout.groups_per_step * rollout.group_size)
            return episode

        return Scheduler(
            samples,
            one,
            Admission(rollout.groups_per_step, rollout.sync_every, rollout.staleness_threshold),
            size=rollout.group_size,
            limit=rollout.max_sessions,
            wanted=self._unwanted,
            returned=lambda group, cause: self._returned.append((group, cause)),
        )

    def _position(self, scheduler: Scheduler) -> dict[str, Json]:
        """What a run needs to go on from a checkpoint, beside the trainer's state."""
        return {
            "step": self.step,
            "policy_version": self.node.version,
            "samples": scheduler.admission.admitted,
            "admission": scheduler.admission.counters(),
        }

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
            return "no_signal"
        return None

    async def _close_on_stop(self, scheduler: Scheduler) -> None:
        await self.node.stop.event.wait()
        scheduler.close()

    async def _record(self, groups: Iterable[Group], cause: str | None = None) -> None:
        """Episodes that no batch was made of."""
        for group in groups:
            await self.journal.append([Record(e, Use(self.step, tokens=_lost(e, cause))) for e in group])

    async def _train(self, groups: list[Group], scheduler: Scheduler) -> None:
        node, rollout = self.node, self.node.config.rollout
        episodes = [e for group in groups for e in group]
        started = trio.current_time()
        batch = await trio.to_thread.run_sync(self._batch, groups)
        sync = (self.step + 1) % rollout.sync_every == 0
        learned = await node.learn(batch, sync=sync) if batch.tokens else {}
        self.step += 1
        self._ended = 0
        if sync:
            scheduler.synced()
        self.tokens += sum(e.export.ledger.sampled for e in episodes)
        self.sandbox_s += sum(e.timings.get("sandbox", 0.0) for e in episodes)
        numbers = {
            **of_episodes(episodes),
            **of_agents(episodes),
            **staleness(episodes, batch.version),
            **learned,
            **node.lag.metrics(),
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
        await self.journal.append([Record(e, Use(self.step, tokens=batch.uses[e.session])) for e in episodes])
        for group, cause in [self._returned.popleft() for _ in range(len(self._returned))]:
            await self._record([group], "filtered" if cause == "no_signal" else cause)

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

    # ------------------------------------------------------------ around the steps

    def _samples(self) -> Iterator[tuple[int, Mapping[str, Json]]]:
        config = self.node.config
        if not config.tasks.data:
            raise UserError("tasks.data is not set: name the samples to train on (a JSONL file, or NAME/SPLIT)")
        return enumerate(self.node.rows(config.tasks.data, seed=config.run.seed, repeat=True))

    async def _evaluate(self, name: str) -> None:
        node = self.node
        if not node.config.eval.data:
            return
        with node.stop.draining():
            result = await evaluate(node, self.journal, name=name, step=self.step)
            if not node.stop.event.is_set():
                self.evals[name] = result
                self.checkpoints.best(self.step, result["success"])
                greedy = f", greedy {result['success_greedy']:.3f}" if "success_greedy" in result else ""
                node.progress.note(
                    f"evaluation {name}: success {result['success']:.3f} ± {result['stderr']:.3f}{greedy} "
                    f"(n = {result['n']:.0f})"
                )

    async def _header(self, rows: list[tuple[int, Mapping[str, Json]]]) -> None:
        node = self.node

        def hashes() -> dict[str, str]:
            template = node.gateway.parts.codec.template_source
            return of_run(
                config=dump(node.config), model=node.model_folder, template=template, rows=[row for _, row in rows]
            )

        await self.journal.header(await trio.to_thread.run_sync(hashes), software())


def _peek(
    samples: Iterator[tuple[int, Mapping[str, Json]]], n: int
) -> tuple[list[tuple[int, Mapping[str, Json]]], Iterator[tuple[int, Mapping[str, Json]]]]:
    first = list(itertools.islice(samples, n))
    return first, itertools.chain(first, samples)


def _lost(episode: Episode, cause: str | None) -> dict[str, int]:
    trainable = episode.export.ledger.trainable
    return {cause: trainable} if cause and trainable else {}


def _refuse_if_nothing_works(episodes: Sequence[Episode]) -> None:
    """As many groups in a row as a batch has failed outside the model: training on is no use."""
    if episodes:
        first = next((e.error for e in episodes if e.error), "no cause was recorded")
        raise UserError(f"every session of a whole batch failed outside the model; the last group's first: {first}")
