"""The synchronous training loop: roll out a batch of groups, train on it, hand the new weights to the engine.

Invariants: with one optimizer step a batch every trained token is of the current policy version; every episode that
ended is in the record, with what became of its tokens; a run that is asked to stop, or is refused by the disk, leaves
checkpoints and a summary of what it did. A sample's sessions are named by its number in the data and not by the step,
so that a run is repeatable. Knows no gradient and no engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
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
from uniagent.engine.observe.metrics import MetricsFile, of_episodes, staleness
from uniagent.engine.ports import Json
from uniagent.engine.rollout.groups import run_groups
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

    async def run(self) -> None:
        """Evaluate, train run.steps batches, evaluate, save. Returns early once the node is asked to stop."""
        config = self.node.config
        samples = self._samples()
        first, samples = _peek(samples, config.rollout.groups_per_step)
        await self._header(first)
        await self._evaluate("before")
        while self.step < config.run.steps and not self.node.stop.event.is_set():
            groups = await self._roll_out(list(itertools.islice(samples, config.rollout.groups_per_step)))
            if groups is None:
                break
            await self._train(groups)
            if config.checkpoint.every and self.step % config.checkpoint.every == 0:
                await self.checkpoints.save(self.step)
            if config.eval.every and self.step % config.eval.every == 0 and self.step < config.run.steps:
                await self._evaluate(f"step-{self.step}")
        await self.checkpoints.save(self.step)
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

    async def _roll_out(self, samples: list[tuple[int, Mapping[str, Json]]]) -> list[list[Episode]] | None:
        """A batch of complete groups; None when the node was asked to stop before they were complete."""
        node, config = self.node, self.node.config
        parts = SessionParts(node.gateway, node.tasks, node.providers, config.rollout.session_timeout_s)
        total, done = len(samples) * config.rollout.group_size, 0

        async def one(row: Mapping[str, Json], sample: int, replica: int) -> Episode:
            nonlocal done
            episode = await run_session(parts, row, name=f"train-{sample}-{replica}", sample=sample, replica=replica)
            done += 1
            node.progress.phase("rollout", done, total)
            return episode

        rollout = config.rollout
        with node.stop.draining() as limit:
            groups = await run_groups(
                samples, one, size=rollout.group_size, limit=rollout.max_sessions, stop=node.stop.event
            )
        if limit.cancelled_caught or node.stop.event.is_set():
            if not limit.cancelled_caught:
                await self.journal.append([Record(e, Use(self.step)) for g in groups for e in g])
            return None
        return groups

    async def _train(self, groups: list[list[Episode]]) -> None:
        node = self.node
        episodes = [e for group in groups for e in group]
        _refuse_if_nothing_works(episodes)
        started = trio.current_time()
        batch = await trio.to_thread.run_sync(self._batch, groups)
        learned = await self._learn(batch) if batch.tokens else {}
        self.step += 1
        self.tokens += sum(e.export.ledger.sampled for e in episodes)
        self.sandbox_s += sum(e.timings.get("sandbox", 0.0) for e in episodes)
        ended = trio.current_time()
        numbers = {
            **of_episodes(episodes),
            **staleness(episodes, node.version - 1),
            **learned,
            **node.lag.metrics(),
            "learner_s": ended - started,
            "version": node.version,
        }
        self.metrics.log(numbers, step=self.step)
        node.progress.step(self.step, numbers)
        await self.journal.append([Record(e, Use(self.step, tokens=_use(e, batch))) for e in episodes])

    def _batch(self, groups: list[list[Episode]]) -> Batch:
        learner = self.node.config.learner
        return build(
            groups,
            recipe(learner).advantage,
            version=self.node.version,
            max_staleness=0,
            overlong_limit=learner.overlong_limit,
            overlong_buffer=learner.overlong_buffer,
        )

    async def _learn(self, batch: Batch) -> dict[str, float]:
        node, trainer = self.node, self.node.trainer
        assert trainer is not None
        pieces = await node.accelerator.run(trainer.plan, batch)
        for done, piece in enumerate(pieces):
            node.progress.phase("training", done, len(pieces))
            await node.accelerator.run(trainer.micro, piece)
        metrics = await node.accelerator.run(trainer.apply)
        await node.sync_weights()
        return metrics

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


def _use(episode: Episode, batch: Batch) -> dict[str, int]:
    """Where the batch put the episode's trainable tokens."""
    trainable = episode.export.ledger.trainable
    if not episode.counts:
        return {"infra": trainable} if trainable else {}
    if episode.session in batch.sessions:
        return {"trained": trainable}
    return {"no_signal": trainable} if trainable else {}


def _refuse_if_nothing_works(episodes: list[Episode]) -> None:
    """A batch in which no session could run is the environment's fault; training on is no use."""
    if episodes and not any(e.counts for e in episodes):
        first = next((e.error for e in episodes if e.error), "no cause was recorded")
        raise UserError(f"all {len(episodes)} sessions of the batch failed outside the model; the first: {first}")
