"""One simulated run: the real Scheduler, Admission, Router and run_session, over simulated engines, learner and tools.

The loop is that of ``engine.training``: take a batch of complete groups, train, update the engines, free places. The
modes differ in who trains where, and in one step off in the order. Invariants, checked at the end (``problems``):
every session that began ended once; no request is left in an engine and no sandbox open; every sampled token is in a
ledger or was lost to a fault; KV adds up; no trained token is older than the bound; a run that hangs meets its
deadline and fails. The trace hash is over what happened when, so that two runs can be told apart.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import trio
from attrs import define, evolve, field

from uniagent.engine.crash import innermost
from uniagent.engine.episode import Episode
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Failure, InferenceEngine, Json
from uniagent.engine.rollout.admission import Admission
from uniagent.engine.rollout.gate import GatedEngine
from uniagent.engine.rollout.memory import Memory
from uniagent.engine.rollout.router import Router
from uniagent.engine.rollout.scheduler import Group, Scheduler
from uniagent.engine.session import SessionParts, run_session
from uniagent.engine.simulate import clock, faults, report
from uniagent.engine.simulate.engine import SimulatedEngine
from uniagent.engine.simulate.mesh import Mesh
from uniagent.engine.simulate.scenario import Mode, Scenario
from uniagent.engine.simulate.sessions import SimulatedGateway, SimulatedSandboxes, SimulatedTasks
from uniagent.engine.simulate.workload import Plan


class Hung(AssertionError):
    """The run did not end within its virtual deadline."""


def simulate(scenario: Scenario) -> report.Report:
    """Run it to its end. UserError where the run itself would end with one (a whole batch failed outside the model)."""
    try:
        return clock.run(lambda: World(scenario).run(), seed=scenario.seed)
    except BaseExceptionGroup as several:
        mistake = next((p for p in innermost(several) if isinstance(p, UserError)), None)
        if mistake is None:
            raise
        raise mistake from several


@define(eq=False)
class World:
    """One run, used once."""

    scenario: Scenario
    timers: clock.Timers = field(factory=clock.Timers)
    version: int = 0
    step: int = 0
    started: int = 0
    ended: Counter[str] = field(factory=Counter)
    ages: Counter[int] = field(factory=Counter)
    stale: int = 0
    trained: int = 0
    skipped: int = 0
    bound: float = 0.0
    admitted: float = 0.0
    places: dict[str, float] = field(factory=lambda: defaultdict(float))  # seconds
    _nodes: list[dict[trio.CancelScope, str]] = field(init=False)  # the sessions of each
    _times: dict[tuple[int, int], tuple[float, float]] = field(factory=dict)
    problems: list[str] = field(factory=list)
    _failed_groups: int = 0
    _trace: Any = field(factory=lambda: hashlib.blake2b(digest_size=16))
    engines: list[SimulatedEngine] = field(init=False)
    router: Router = field(init=False)
    engine: InferenceEngine = field(init=False)
    gate: GatedEngine | None = field(init=False)
    gateway: SimulatedGateway = field(init=False)
    sandboxes: SimulatedSandboxes = field(init=False)
    scheduler: Scheduler = field(init=False)
    mesh: Mesh = field(init=False)

    def __attrs_post_init__(self) -> None:
        s = self.scenario
        serving = s.accelerators // s.costs.accelerators if s.mode is Mode.SEPARATE else s.rollout_replicas
        self.engines = [SimulatedEngine(self.timers, s.costs) for _ in range(serving)]
        self._nodes = [{} for _ in self.engines]
        self.router = Router(self.engines, s.router)
        self.gate = None if s.partial_rollout else GatedEngine(self.router)
        self.gateway = SimulatedGateway(self.gate or self.router, self.router.forget)
        self.sandboxes = SimulatedSandboxes(s.costs)
        self.scheduler = self._scheduler()
        self.mesh = Mesh(s, self.engines, self.router, self.scheduler)

    async def run(self) -> report.Report:
        s = self.scenario
        with trio.move_on_after(s.deadline_s) as limit:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.timers.run)
                for fault in s.faults:
                    if fault.kind in faults.OF_REPLICAS:
                        nursery.start_soon(self._break, fault)
                nursery.start_soon(self.scheduler.run)
                await self._train()
                made = self._report()
                self.scheduler.close()
                nursery.cancel_scope.cancel()
        if limit.cancelled_caught:
            raise Hung(f"no end after {s.deadline_s:g} virtual seconds, at step {self.step}: {self._counters()}")
        self._check_ended()
        lost = sum(e.tokens for e in self.engines) - self.gateway.sampled
        return evolve(made, problems=tuple(self.problems), tokens_lost=lost)

    # ------------------------------------------------------------ the loop

    async def _train(self) -> None:
        s = self.scenario
        nan = {int(f.at) for f in s.faults if f.kind == "nan_step"}
        slow: dict[int, float] = defaultdict(float)
        for fault in s.faults:
            if fault.kind == "slow_disk":
                slow[int(fault.at)] += fault.seconds
        while self.step < s.steps:
            groups = await self.mesh.batch(s.groups_per_step)
            if s.mode is Mode.ONE_STEP_OFF:  # the weights of the batch before, to roll out the next one with
                await self._sync()
            tokens = self._consume(groups, skip=self.step in nan)
            await self.mesh.train(tokens)
            await trio.sleep(slow[self.step])  # a checkpoint, the record
            self.step += 1
            self._log("step", self.step)
            if s.mode is not Mode.ONE_STEP_OFF and self.step % s.sync_every == 0:
                await self._sync()

    async def _sync(self) -> None:
        self.version += 1
        if self.gate is None:
            await self.router.update(None, self.version, self.scenario.kv)
        else:
            async with self.gate.shut():
                await self.router.update(None, self.version, self.scenario.kv)
        self.scheduler.synced()

    def _consume(self, groups: list[Group], *, skip: bool) -> int:
        """Count a batch's tokens by what becomes of them; the tokens that the learner runs over."""
        s, context, plans = self.scenario, 0, []
        for group in groups:
            self._place(group)
            for episode in group:
                if not episode.counts:
                    continue
                turn = episode.turns[0]
                for version, tokens in turn["versions"].items():
                    age = self.version - version
                    if age > s.staleness:
                        self.stale += tokens
                    elif skip:
                        self.skipped += tokens
                    else:
                        self.ages[age] += tokens
                        self.trained += tokens
                context += turn["context"]
                plans.append(self._plan(episode.sample, episode.replica))
        known = {"size": s.group_size, "accelerators": s.accelerators, "max_staleness": s.staleness}
        self.bound += report.bound_s(plans, s.costs, **known)
        self.admitted += report.admitted_s(plans, s.costs, sessions=self._sessions(), **known) if plans else 0.0
        return context

    def _place(self, group: Group) -> None:
        """What the sessions of a group did with their places until now."""
        times = [self._times.pop((e.sample, e.replica)) for e in group]
        complete = max(end for _, end in times)
        for episode, (began, ended) in zip(group, times, strict=True):
            engine = episode.timings["engine"]
            self.places["engine"] += engine
            self.places["outside"] += ended - began - engine
            self.places["siblings"] += complete - ended
            self.places["buffered"] += trio.current_time() - complete

    def _sessions(self) -> int:
        """Most sessions under way at once."""
        return min(self.scheduler.admission.limit * self.scenario.group_size, self.scenario.max_sessions)

    def _emptiest(self) -> int:
        """The node with fewest sessions; each replica is on one of its own."""
        alive = [i for i, e in enumerate(self.engines) if not e.lost] or [0]
        return min(alive, key=lambda i: len(self._nodes[i]))

    def _scheduler(self) -> Scheduler:
        s = self.scenario
        tasks: Any = SimulatedTasks(self._plan, self.sandboxes, faults.of_session(s.faults), s.group_size)
        gateway: Any = self.gateway
        providers: Any = None
        parts = SessionParts(gateway, tasks, providers, s.session_timeout_s)

        async def one(row: Mapping[str, Json], sample: int, replica: int) -> Episode:
            began = trio.current_time()
            name, place = f"s{sample}-{replica}", {"sample": sample, "replica": replica}
            while True:  # a session whose node is lost begins anew, elsewhere
                node = self._emptiest()
                with trio.CancelScope() as life:
                    self._nodes[node][life] = name
                    self.started += 1
                    try:
                        episode = await run_session(parts, place, name=name, sample=sample, replica=replica)
                    finally:
                        del self._nodes[node][life]
                    break
                self._log(name, "node_lost")
            ending = str(episode.result.failure or "done")
            self.ended[ending] += 1
            self._times[sample, replica] = began, trio.current_time()
            self._log(name, ending, episode.export.ledger.sampled)
            return episode

        def rows() -> Iterator[tuple[int, Mapping[str, Json]]]:
            sample = 0
            while True:
                yield sample, {}
                sample += 1

        admission = Admission(s.groups_per_step, s.sync_every, s.threshold)
        return Scheduler(
            rows(),
            one,
            admission,
            size=s.group_size,
            limit=s.max_sessions,
            wanted=self._unwanted,
            returned=lambda group, cause: self._log("returned", group[0].sample, cause),
            memory=Memory(self._kv, s.memory_share, _length) if s.memory_share else None,
        )

    def _kv(self) -> int:
        """Of the replicas that always roll out."""
        return sum(e.costs.kv_tokens for e in self.engines[: self.scenario.rollout_replicas] if not e.lost)

    def _plan(self, sample: int, replica: int) -> Plan:
        return self.scenario.workload.plan(self.scenario.seed, sample, replica)

    def _unwanted(self, group: Group) -> str | None:
        if any(e.counts for e in group):
            self._failed_groups = 0
            return None
        self._failed_groups += 1
        if self._failed_groups >= self.scenario.groups_per_step:
            raise UserError(f"every session of a whole batch failed outside the model; the first: {group[0].error}")
        return "infra"

    async def _break(self, fault: faults.Fault) -> None:
        await trio.sleep(fault.at)
        if fault.target >= len(self.engines):
            return
        engine = self.engines[fault.target]
        self._log(fault.kind, fault.target)
        if fault.kind == "node_lost":
            engine.lose()
            for life, name in tuple(self._nodes[fault.target].items()):
                self.gateway.lose(name)
                life.cancel()
        elif fault.kind == "replica_lost":
            engine.lose()
        else:
            engine.pause()
            await trio.sleep(fault.seconds)
            engine.resume()

    # ------------------------------------------------------------ the end

    def _report(self) -> report.Report:
        s, wall = self.scenario, trio.current_time()
        machine = s.accelerators * wall
        engine_s = sum(e.busy_s for e in self.engines) * s.costs.accelerators
        sampled = sum(e.tokens for e in self.engines)
        prefilled_again = sum(e.prefilled_again for e in self.engines)
        if late := [age for age in self.ages if age > s.staleness]:
            self.problems.append(f"tokens {max(late)} versions old were trained; the bound is {s.staleness}")
        idle = 1 - (engine_s + self.mesh.learner_s) / machine if wall else 0.0
        again = prefilled_again * s.costs.prefill_token_s * s.costs.accelerators / machine if wall else 0.0
        untrained = (engine_s / machine - again) * (1 - self.trained / max(1, sampled)) if wall else 0.0
        low = 1 - (self.bound / wall if wall else 0.0) - idle - again - untrained
        return report.Report(
            mode=s.mode.value,
            steps=self.step,
            wall_s=wall,
            t_star_s=self.bound,
            eta=self.bound / wall if wall else math.nan,
            t_admitted_s=self.admitted,
            eta_admitted=self.admitted / wall if wall else math.nan,
            tokens_per_s=self.trained / wall if wall else math.nan,
            sessions=self.started,
            engine_busy=engine_s / machine if wall else 0.0,
            learner_busy=self.mesh.learner_s / machine if wall else 0.0,
            idle=idle,
            places={k: v / (self._sessions() * wall) for k, v in sorted(self.places.items())} if wall else {},
            gaps={"idle": idle, "prefilled_again": again, "untrained": untrained, "low_batch": low},
            staleness=dict(self.ages),
            stale_tokens=self.stale,
            tokens_sampled=sampled,
            tokens_trained=self.trained,
            tokens_lost=0,  # known when everything has ended
            lost_to_faults=self.router.lost_tokens + self.gateway.lost,
            update_stall=max(e.paused_s for e in self.engines) / wall if wall else 0.0,
            hit_ratio_of_ideal=sum(e.cached for e in self.engines) / max(1, self.gateway.ideal),
            prefill_again=prefilled_again,
            sandboxes_leaked=self.sandboxes.leaked,
            infra_failures=self.ended[str(Failure.INFRA)],
            agent_failures=self.ended[str(Failure.AGENT)],
            groups_given_back=self.scheduler.admission.given_back,
            switches=self.mesh.roles.switches,
            trace=self._trace.hexdigest(),
        )

    def _check_ended(self) -> None:
        """After everything was cancelled."""
        if self.gateway.open_sessions or self.gateway.finished != self.started:
            self.problems.append(f"{self.started} sessions began, {self.gateway.finished} ended")
        if left := sum(e.requests() for e in self.engines):
            self.problems.append(f"{left} requests are left in the engines")
        if self.sandboxes.open_now != self.sandboxes.leaked:
            self.problems.append(f"{self.sandboxes.open_now} sandboxes are open")
        if not all(e.balanced() for e in self.engines):
            self.problems.append("KV does not add up")
        counted, sampled = self.gateway.sampled, sum(e.tokens for e in self.engines)
        if counted != sampled:
            self.problems.append(f"{sampled} tokens were sampled, the ledgers hold {counted}")
        a = self.scheduler.admission
        buffered = a.buffered + a.running
        if a.admitted != a.consumed + a.given_back + buffered:
            self.problems.append(f"groups do not add up: {a.counters()}")

    def _counters(self) -> dict[str, Any]:
        return {"sessions": self.started, "ended": dict(self.ended), **self.scheduler.admission.counters()}

    def _log(self, *what: Any) -> None:
        self._trace.update(repr((round(trio.current_time(), 6), *what)).encode())


def _length(episode: Episode) -> int:
    return int(episode.turns[0]["context"])
