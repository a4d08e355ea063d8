"""A head and its nodes on a virtual clock, with the real scheduler, desk, workers and moving engines, and a world that
loses messages, kills nodes and changes roles as a seed says. What may never happen is asserted where it would."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import trio
from attrs import define, field

from uniagent.engine.episode import Episode
from uniagent.engine.ports import (
    Capacity,
    Finish,
    Generation,
    Ids,
    Json,
    KvPolicy,
    OnTokens,
    Sampling,
    TaskResult,
    VersionSpan,
    Weights,
)
from uniagent.engine.rollout.admission import Admission
from uniagent.engine.rollout.roles import Roles
from uniagent.engine.rollout.scheduler import Scheduler
from uniagent.engine.separate.desk import Desk
from uniagent.engine.separate.leases import Kind
from uniagent.engine.separate.moving import MovingEngine
from uniagent.engine.separate.worker import Doings, Unreachable, Worker
from uniagent.engine.simulate import clock
from uniagent.engine.trajectory.types import Export, Ledger

SIZE, GROUPS = 2, 3
DEADLINE_S = 20_000.0
TURNS = 3
ANSWER = 6  # tokens of every answer


async def inline(function: Any, *args: Any) -> Any:
    return function(*args)


def said(prompt: Ids, n: int) -> Ids:
    """The next n tokens: each is one more than the one before, so that a splice shows where it went wrong."""
    return (prompt[-1] + 1 + np.arange(n)).astype(np.int32)


class PlayEngine:
    """An InferenceEngine: a token a second, of the version it has."""

    def __init__(self) -> None:
        self.version = -1
        self.stop = trio.Event()
        self.running = 0

    def interrupt(self) -> None:
        self.stop.set()
        self.stop = trio.Event()

    async def generate(
        self,
        prompt: Ids,
        sampling: Sampling,
        *,
        session: str,
        on_tokens: OnTokens | None = None,
        on_abort: Any = None,
    ) -> Generation:
        stop, versions = self.stop, []
        self.running += 1
        try:
            while len(versions) < sampling.max_tokens and not stop.is_set():
                with trio.move_on_after(1.0):
                    await stop.wait()
                    break
                versions.append(self.version)
                if on_tokens is not None:
                    on_tokens(said(prompt, len(versions))[-1:])
        except trio.Cancelled:
            if on_abort is not None:
                on_abort(self.made(prompt, versions, Finish.ABORTED))
            raise
        finally:
            self.running -= 1
        whole = len(versions) == sampling.max_tokens
        return self.made(prompt, versions, Finish.STOP if whole else Finish.ABORTED)

    @staticmethod
    def made(prompt: Ids, versions: list[int], finish: Finish) -> Generation:
        n = len(versions)
        spans = tuple(VersionSpan(v, i, i + 1) for i, v in enumerate(versions))
        ids = said(prompt, n)
        return Generation(ids, -ids.astype(np.float32), spans, (), finish, 0)

    async def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        assert version >= self.version
        self.version = version

    def capacity(self) -> Capacity:
        return Capacity(100, 100, self.running, 0, 100)

    def resident(self, prompt: Ids) -> int:
        return 0


@define(eq=False)
class Play:
    """One run. ``faults``: chances of each thing going wrong."""

    seed: int
    steps: int = 5
    threshold: float = 1.0
    loss: float = 0.1  # of a message, and of an answer
    kills: bool = True
    meshes: int = 1
    nodes: int = 2
    relief: bool = False
    draw: random.Random = field(init=False)
    desk: Desk = field(init=False)
    scheduler: Scheduler = field(init=False)
    _nursery: trio.Nursery = field(init=False)
    trained: Counter[int] = field(factory=Counter)
    began: Counter[tuple[int, int]] = field(factory=Counter)
    tokens: int = 0
    switches: int = 0
    moved: int = 0
    killed: int = 0
    _names: Iterator[int] = field(factory=itertools.count)
    engines: dict[str, MovingEngine] = field(factory=dict)
    scopes: dict[str, trio.CancelScope] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def run(self) -> Play:
        clock.run(self._main, seed=self.seed)
        return self

    async def _main(self) -> None:
        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                mesh = frozenset(f"mesh-{i}" for i in range(self.meshes))
                self.desk = Desk(SIZE, 20.0, nursery, mesh, inline)
                nursery.start_soon(self.desk.watch)
                admission = Admission(GROUPS, 1, self.threshold)
                self.scheduler = Scheduler(
                    ((i, {"n": i}) for i in itertools.count()),
                    self.desk.session,
                    admission,
                    size=SIZE,
                    limit=1000,
                    wanted=lambda group: None,
                    returned=lambda group, cause: None,
                )
                self.desk.announce(version=0)
                for name in sorted(mesh):
                    nursery.start_soon(self._node, name, True)
                for _ in range(self.nodes):
                    nursery.start_soon(self._node, f"node-{next(self._names)}", False)
                nursery.start_soon(self.scheduler.run)
                if self.kills:
                    nursery.start_soon(self._trouble, nursery)
                await self._train(Roles(self.meshes, 2.0))
                self.scheduler.close()
                self.desk.announce(ending=True)
                nursery.cancel_scope.cancel()

    # ------------------------------------------------------------ the head

    async def _train(self, roles: Roles) -> None:
        for step in range(self.steps):
            roles.note(trio.current_time(), self.scheduler.admission.consumed)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._roles, roles)
                groups = await self.scheduler.batch(GROUPS)
                nursery.cancel_scope.cancel()
            await self._serve(roles, False)
            for group in groups:
                self.trained[group[0].sample] += 1
                assert [e.replica for e in group] == list(range(SIZE))
                for episode in group:
                    self._look_at(episode, step)
            assert all(not e.is_open or not n.startswith("mesh") for n, e in self.engines.items())
            await trio.sleep(self.draw.uniform(1, 20))
            self.desk.announce(version=self.desk.version + 1)
            self.scheduler.synced()
        self.switches = roles.switches

    def _look_at(self, episode: Episode, version: int) -> None:
        assert len(episode.turns) == TURNS
        for turn in episode.turns:
            assert turn["ids"] == list(range(turn["ids"][0], turn["ids"][0] + ANSWER))
            assert turn["logprobs"] == [-i for i in turn["ids"]]
            assert turn["versions"] == sorted(turn["versions"])
            assert len(turn["versions"]) == ANSWER
            if not self.threshold:
                assert set(turn["versions"]) == {version}
        self.tokens += TURNS * ANSWER

    async def _roles(self, roles: Roles) -> None:
        while True:
            missing = GROUPS - self.scheduler.admission.buffered
            wanted = roles.wanted(missing=missing, others=self.desk.others())
            await self._serve(roles, wanted)
            await trio.sleep(1.0)

    async def _serve(self, roles: Roles, serving: bool) -> None:
        if roles.serving != serving:
            with trio.CancelScope(shield=True):
                roles.switched(serving)
                self.desk.announce(shift=self.desk.shift + 1)
                for name, engine in self.engines.items():
                    if name in self.desk.mesh and serving:
                        engine.open()
                    elif name in self.desk.mesh:
                        await engine.close()

    # ------------------------------------------------------------ nodes

    async def _node(self, name: str, mesh: bool) -> None:
        core = PlayEngine()
        engine = MovingEngine(core, core.interrupt)
        asks = itertools.count()

        async def elsewhere(prompt: Ids, sampling: Sampling, session: str) -> Generation:
            self.moved += 1
            return await worker.ask(f"{name}-{next(asks)}", prompt, sampling, session)

        async def session(row: Mapping[str, Json], sample: int, replica: int) -> Episode:
            assert row == {"n": sample}
            self.began[sample, replica] += 1
            return await self._session(engine, sample, replica)

        async def update(version: int) -> int:
            await trio.sleep(self.draw.uniform(0, 3))
            await engine.update(None, version, KvPolicy.RECOMPUTE)
            return version

        async def nothing(_: Any) -> None: ...

        doings = Doings(session, engine.generate_here, update, nothing, nothing, inline)
        capacity = {Kind.GROUP: self.draw.randint(1, 4), Kind.ASK: 4}
        call = self.desk.handle if name == "mesh-0" else self._lossy  # the head's own node is in its process
        worker = Worker(name, call, doings, capacity, wait_s=5.0, patience_s=1e6, mesh=mesh)
        if mesh and self.desk.shift % 2 == 0:
            await engine.close()
        engine.elsewhere = elsewhere if mesh or self.relief else None
        if self.relief and not mesh:
            engine.crowded = lambda: self.desk.shift % 2 and self.draw.random() < 0.5
        self.engines[name] = engine
        with trio.CancelScope() as self.scopes[name]:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._drains, worker, name)
                await worker.run()
                nursery.cancel_scope.cancel()
        self.scopes.pop(name)
        self.engines.pop(name)

    async def _session(self, engine: MovingEngine, sample: int, replica: int) -> Episode:
        turns, prompt = [], np.array([1000 * sample + 100 * replica], np.int32)
        for _ in range(TURNS):
            made = await engine.generate(prompt, Sampling(ANSWER), session=f"{sample}-{replica}")
            versions = [s.version for s in made.versions for _ in range(s.start, s.end)]
            turns.append({"ids": made.token_ids.tolist(), "logprobs": made.logprobs.tolist(), "versions": versions})
            prompt = np.concatenate([prompt, made.token_ids])
            await trio.sleep(self.draw.uniform(0, 8))
        export = Export((), (), Ledger(0, 0, 0, {}))
        return Episode(f"{sample}-{replica}", "play", sample, replica, TaskResult(1.0), export, turns=tuple(turns))

    async def _drains(self, worker: Worker, name: str) -> None:
        await trio.sleep(self.draw.uniform(20, 400))
        if self.kills and not worker.mesh:
            await self._another()
            await worker.drain(self.draw.uniform(0, 30))

    async def _trouble(self, nursery: trio.Nursery) -> None:
        """Kills nodes; others come, late."""
        self._nursery = nursery
        while True:
            await trio.sleep(self.draw.uniform(5, 60))
            alive = sorted(n for n in self.scopes if n not in self.desk.mesh)
            if alive and self.draw.random() < 0.5:
                self.killed += 1
                self.scopes[self.draw.choice(alive)].cancel()
                await self._another()

    async def _another(self) -> None:
        if self.draw.random() < 0.7:
            await trio.sleep(self.draw.uniform(0, 30))
            self._nursery.start_soon(self._node, f"node-{next(self._names)}", False)

    async def _lossy(self, verb: str, body: Mapping[str, Json]) -> dict[str, Json]:
        """A message and its answer as JSON, sometimes late, lost on the way there or back, or said twice."""
        body = json.loads(json.dumps(body))
        await trio.sleep(self.draw.uniform(0, 0.2))
        if self.draw.random() < self.loss:
            raise Unreachable("the message was lost")
        if self.draw.random() < self.loss and verb != "pull":
            await self.desk.handle(verb, {**body, "wait_s": 0})
        answer = await self.desk.handle(verb, body)
        await trio.sleep(self.draw.uniform(0, 0.2))
        if self.draw.random() < self.loss:
            raise Unreachable("the answer was lost")
        return dict(json.loads(json.dumps(answer)))
