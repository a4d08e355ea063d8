"""Where a training run takes its samples from: the curriculum over ``tasks.data``, and the history that it writes.

Invariants: the loop reads no data and hashes no rows (a thread does); a sample's trials are written once, at the end of
the step that took or gave back its group; trials of groups that no batch took are written too, when the run ends.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import define, field

from uniagent.engine.config import Curriculum as CurriculumConfig
from uniagent.engine.curriculum.curriculum import Curriculum, open_curriculum
from uniagent.engine.curriculum.history import History, RunIdentity, Store
from uniagent.engine.curriculum.pool import Row
from uniagent.engine.curriculum.trials import Trial, harness_hash, trial_of
from uniagent.engine.episode import Episode
from uniagent.engine.fingerprint import of_rows, of_run, of_text
from uniagent.engine.node import Node
from uniagent.engine.ports import Json


@define(eq=False)
class Feed:
    """An iterator of (number, row). ``given_back`` when a group came back for nothing; at every step ``done`` for each
    that was trained on or came back, ``advance``, and ``write`` to keep the trials."""

    curriculum: Curriculum
    history: History
    config: CurriculumConfig
    batch: int  # groups
    _version: int = 0
    _back: int = 0  # groups given back since the last advance
    _ended: list[tuple[Episode, Row]] = field(factory=list)

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        return self

    def __next__(self) -> tuple[int, Row]:
        return next(self.curriculum)

    def done(self, group: Sequence[Episode]) -> None:
        """A group that will not be run again."""
        self._keep(group)
        self.curriculum.done(group[0].sample, [e.result.solved for e in group if e.counts])

    def given_back(self, group: Sequence[Episode]) -> None:
        """A group that fills no place. When as many as a batch has came back, what they showed counts at once: where
        most samples teach nothing a batch may be long in coming."""
        self.curriculum.observe(group[0].sample, [e.result.solved for e in group if e.counts])
        self._back += 1
        if self._back == self.batch:
            self.advance(self._version)

    def advance(self, version: int) -> None:
        """What was done counts from now on, under the engine's policy version."""
        self._version, self._back = version, 0
        self.curriculum.advance(version)

    async def write(self, left: Iterable[Sequence[Episode]] = ()) -> None:
        """Keep the trials of what was done, and of ``left``: groups that will be run again."""
        for group in left:
            self._keep(group)
        ended, self._ended = self._ended, []
        await self.history.add(await trio.to_thread.run_sync(self._trials, ended))

    def _keep(self, group: Sequence[Episode]) -> None:
        row = self.curriculum.row(group[0].sample)
        self._ended.extend((episode, row) for episode in group)

    def _trials(self, ended: Sequence[tuple[Episode, Row]]) -> list[Trial]:
        family, version = self.config.family, self._version
        return [trial_of(e, row, family=family, purpose="train", version=version) for e, row in ended]


@asynccontextmanager
async def open_feed(
    node: Node, folder: Path, hashes: Mapping[str, str], *, seed: int, state: Mapping[str, Json]
) -> AsyncIterator[Feed]:
    """The feed of a run in ``folder`` whose model and template have these fingerprints; ``state`` is that of the
    checkpoint it goes on from, if any."""
    config = node.config.curriculum
    source = node.config.tasks.data

    def opened() -> tuple[Curriculum, Store, RunIdentity, set[str]]:
        curriculum = open_curriculum(lambda repeat: node.rows(source, seed=seed, repeat=repeat), config, seed=seed)
        sight = curriculum.pool.sight()
        run = RunIdentity(str(folder.resolve()), of_rows(sight), hashes["template"], hashes["model"])
        agents = {harness_hash(node.tasks.resolve(row, node.gateway.runtime("")).as_json()) for row in sight[:64]}
        return curriculum, Store(Path(config.history) if config.history else folder / "trials.db"), run, agents

    curriculum, store, run, agents = await trio.to_thread.run_sync(opened)
    try:
        history = History(store, run, time.time)
        await history.begin()
        if state:
            await trio.to_thread.run_sync(curriculum.restore, state)
        elif config.warm_start and config.history:
            await _warm(curriculum, history, agents, config.half_life)
        yield Feed(curriculum, history, config, node.config.rollout.groups_per_step, node.version)
    finally:
        store.close()


def identity(node: Node, purpose: str, rows: Sequence[Row]) -> RunIdentity:
    """Of trials outside training: the same for the same model, template and Task Config, so that they are kept once.
    Blocking."""
    hashes = of_run(config="", model=node.model_folder, template=node.gateway.parts.codec.template_source, rows=rows)
    tasks = of_text(Path(node.config.tasks.file).read_text())
    name = of_text(" ".join([hashes["model"], hashes["template"], tasks]))[:16]
    return RunIdentity(f"{purpose}-{name}", hashes["dataset"], hashes["template"], hashes["model"])


@asynccontextmanager
async def shared_history(node: Node, purpose: str) -> AsyncIterator[History | None]:
    """``curriculum.history``, where the config names one, for trials outside training."""
    path = node.config.curriculum.history
    if not path:
        yield None
        return
    store = await trio.to_thread.run_sync(Store, Path(path))
    try:
        history = History(store, await trio.to_thread.run_sync(identity, node, purpose, ()), time.time)
        await history.begin()
        yield history
    finally:
        store.close()


async def _warm(curriculum: Curriculum, history: History, agents: set[str], half_life: float) -> None:
    """Begin with what other runs of the same model and template showed with the same agents; a policy that had learned
    for n versions is as far from this one as one of n versions ago."""
    cells = await history.known(agents)
    keys = await trio.to_thread.run_sync(curriculum.keys)
    for cell in cells:
        outcomes = [True] * cell.passes + [False] * (cell.trials - cell.passes)
        curriculum.learn(cell.sample, cell.family, outcomes, 0.5 ** (cell.version / half_life), keys)
