"""Colocated training on a virtual clock through random schedules: updates that fall anywhere into generations, a drain
or a kill at any moment, and a resume from the last checkpoint, with the real scheduler, admission, router, gate and
position. No schedule hangs, loses or repeats a token of an answer, trains a sample twice or leaves one out."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import trio
from attrs import define, field

from tests.separate.play import PlayEngine
from uniagent.engine.episode import Episode
from uniagent.engine.ports import Finish, Generation, Ids, Json, KvPolicy, Sampling, TaskResult
from uniagent.engine.position import Position, Samples
from uniagent.engine.rollout.admission import Admission
from uniagent.engine.rollout.gate import GatedEngine
from uniagent.engine.rollout.memory import Memory
from uniagent.engine.rollout.router import Router
from uniagent.engine.rollout.scheduler import Scheduler
from uniagent.engine.simulate import clock
from uniagent.engine.trajectory.types import Export, Ledger

SIZE, GROUPS, TURNS, ANSWER, STEPS = 2, 3, 3, 6, 6


@define(eq=False)
class Play:
    """A run that is begun as often as it is ended before its time. ``trained`` counts samples in the line of weights
    that goes on: what came after the last checkpoint is taken back."""

    seed: int
    draw: random.Random = field(init=False)
    position: Position = field(factory=Position)
    trained: Counter[int] = field(factory=Counter)
    kept: Counter[int] = field(factory=Counter)  # as of the checkpoint
    lives: int = 0
    crossed: int = 0  # answers with tokens of several versions

    def __attrs_post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def run(self) -> Play:
        while self.position.step < STEPS:
            self.lives += 1
            clock.run(self._life, seed=self.seed + self.lives)
        return self

    async def _life(self) -> None:
        draw, start = self.draw, self.position
        self.trained = Counter(self.kept)
        cores = [PlayEngine() for _ in range(draw.randint(1, 3))]
        engine = GatedEngine(Router(cores))
        for core in cores:
            core.version = start.policy_version
        drains = draw.random() < 0.5
        scope, stop = trio.CancelScope(), trio.Event()
        threshold = draw.choice([0.0, 0.4, 1.0, 2.0])
        partial = draw.random() < 0.7
        admission = Admission(GROUPS, 1, threshold)
        admission.restore(start.admission())
        rows = itertools.chain(start.again, itertools.count(start.next))
        samples = Samples.after(start, ((i, {"n": i}) for i in rows))

        async def one(row: Mapping[str, Json], sample: int, replica: int) -> Episode:
            return await self._session(engine, sample, replica)

        scheduler = Scheduler(
            samples,
            one,
            admission,
            size=SIZE,
            limit=draw.randint(SIZE, 20),
            wanted=lambda group: "no_signal" if draw.random() < 0.15 else None,
            returned=lambda group, cause: samples.done(group[0].sample, trained=False),
            memory=Memory(lambda: 60, 1.0, lambda e: TURNS * ANSWER) if draw.random() < 0.5 else None,
        )

        async def ends() -> None:
            await trio.sleep(draw.uniform(20, 600))
            if drains:
                stop.set()
                scheduler.close()
            else:
                scope.cancel()

        async def train() -> None:
            step, version = start.step, start.policy_version
            while step < STEPS and not stop.is_set():
                groups = await scheduler.batch(GROUPS)
                if stop.is_set():
                    scheduler.leftover.extend(groups)
                    break
                assert len(groups) == GROUPS
                await trio.sleep(draw.uniform(0, 10))
                for group in groups:
                    samples.done(group[0].sample, trained=True)
                    self.trained[group[0].sample] += 1
                    self._look_at(group, threshold, version)
                step, version = step + 1, version + 1
                if partial:
                    await engine.update(None, version, KvPolicy.RECOMPUTE)
                else:
                    async with engine.shut():
                        await engine.update(None, version, KvPolicy.RECOMPUTE)
                scheduler.synced()
                assert admission.outstanding <= admission.limit
                if draw.random() < 0.5 or step == STEPS:
                    self._save(samples, step, version)
            scheduler.close()
            if step == STEPS:
                scope.cancel()
            await scheduler.ended.wait()
            self._save(samples, step, version)
            scope.cancel()

        with trio.fail_after(100_000), scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ends)
                nursery.start_soon(scheduler.run)
                nursery.start_soon(train)
        assert sum(core.running for core in cores) == 0

    def _save(self, samples: Samples, step: int, version: int) -> None:
        self.position = samples.position(step=step, policy_version=version)
        self.kept = Counter(self.trained)

    def _look_at(self, group: Any, threshold: float, version: int) -> None:
        assert [e.replica for e in group] == list(range(SIZE))
        for episode in group:
            assert len(episode.turns) == TURNS
            for turn in episode.turns:
                first = turn["ids"][0]
                assert turn["ids"] == list(range(first, first + ANSWER))  # one answer, whatever came between
                assert turn["versions"] == sorted(turn["versions"])
                assert turn["versions"][-1] <= version
                self.crossed += turn["versions"][0] != turn["versions"][-1]
                if not threshold:
                    assert set(turn["versions"]) == {version}

    async def _session(self, engine: GatedEngine, sample: int, replica: int) -> Episode:
        turns, prompt = [], np.array([1000 * sample + 100 * replica], np.int32)
        for _ in range(TURNS):
            streamed: list[int] = []

            def heard(ids: Ids, streamed: list[int] = streamed) -> None:
                streamed.extend(ids.tolist())

            made: Generation = await engine.generate(
                prompt, Sampling(ANSWER), session=f"{sample}-{replica}", on_tokens=heard
            )
            assert made.finish is Finish.STOP
            assert streamed == made.token_ids.tolist()
            versions = [s.version for s in made.versions for _ in range(s.start, s.end)]
            turns.append({"ids": made.token_ids.tolist(), "versions": versions})
            prompt = np.concatenate([prompt, made.token_ids])
            await trio.sleep(self.draw.uniform(0, 8))
        return Episode(
            f"{sample}-{replica}",
            "play",
            sample,
            replica,
            TaskResult(1.0),
            Export((), (), Ledger()),
            turns=tuple(turns),
        )


def check(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        play = Play(seed).run()
        assert sum(play.trained.values()) == STEPS * GROUPS, f"seed {seed}"
        assert set(play.trained.values()) == {1}, f"seed {seed}: {play.trained}"
        done = play.position.next - len(play.position.again)
        assert done == play.position.trained + play.position.given_back, f"seed {seed}: {play.position}"
        seen["resumed"] += play.lives > 1
        seen["crossed"] += bool(play.crossed)
    return seen


def test_random_schedules_of_updates_drains_kills_and_resumes() -> None:
    seen = check(range(40))
    assert seen["resumed"] > 5
    assert seen["crossed"] > 5


@pytest.mark.slow
def test_thousands_of_them() -> None:
    check(range(1000, 4000))
