"""Simulated gateway, tasks and sandboxes, of the shape that ``engine.session.run_session`` asks for.

The session code is the real one; here are its parts without sockets, text or processes: an agent that follows its plan.
Invariants: every token that an engine gave a session is in that session's ledger; an answer that is interrupted goes
on from where it was, wherever the router sends it; every sandbox that opens closes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio
from attrs import define, field, frozen

from uniagent.engine.errors import InfraError
from uniagent.engine.ports import (
    Failure,
    Generation,
    InferenceEngine,
    Json,
    ModelEndpoint,
    Sampling,
    SessionSampling,
    TaskResult,
)
from uniagent.engine.shaping import Shaping
from uniagent.engine.simulate.costs import Costs
from uniagent.engine.simulate.tokens import Prompt, as_ids
from uniagent.engine.simulate.workload import Plan
from uniagent.engine.trajectory.types import Export, Ledger

GONE_S = 0.2  # a client that leaves does so this long into its answer


@frozen
class Ask:
    """One model call: so many tokens after this prompt."""

    prompt: Prompt
    tokens: int


@define(eq=False)
class SimulatedSession:
    """``versions`` counts sampled tokens by the policy that sampled them; ``context`` is the last prompt and answer."""

    id: str
    gateway: SimulatedGateway
    engine_s: float = 0.0
    sampled: int = 0
    aborted: int = 0
    answers: int = 0
    context: int = 0
    versions: Counter[int] = field(factory=Counter)

    def endpoint(self) -> ModelEndpoint:
        return ModelEndpoint("http://simulated", "", self.id, complete=self.complete)

    @property
    def turns(self) -> tuple[Mapping[str, Json], ...]:
        return ({"versions": dict(self.versions), "context": self.context},)

    async def complete(self, ask: Any) -> None:
        """Returns once all tokens asked for are there, from however many generations."""
        prompt, left = ask.prompt, ask.tokens
        self.gateway.expect(prompt, self.context)
        started = trio.current_time()
        try:
            while left:
                answer = await self.gateway.engine.generate(
                    as_ids(prompt), Sampling(left), session=self.id, on_abort=self._lost
                )
                came = self._take(answer)
                left -= came
                prompt = Prompt(prompt.group, prompt.session, prompt.shared, prompt.length + came)
                self.context = prompt.length
        finally:
            self.engine_s += trio.current_time() - started
        self.answers += 1

    def _take(self, answer: Generation) -> int:
        for span in answer.versions:
            self.versions[span.version] += span.end - span.start
        self.sampled += len(answer.token_ids)
        return len(answer.token_ids)

    def _lost(self, answer: Generation) -> None:
        self.sampled += len(answer.token_ids)
        self.aborted += len(answer.token_ids)


@define(eq=False)
class SimulatedGateway:
    """``ideal`` are prompt tokens that one endless cache would have had, of ``asked`` in all."""

    engine: InferenceEngine
    forget: Callable[[str], None]
    open_sessions: dict[str, SimulatedSession] = field(factory=dict)
    finished: int = 0
    asked: int = 0
    ideal: int = 0
    sampled: int = 0
    lost: int = 0  # sampled by sessions whose node went
    _groups: set[str] = field(factory=set)
    _going: set[str] = field(factory=set)

    def runtime(self, session_id: str) -> dict[str, str]:
        return {"model_name": session_id}

    def open(self, session_id: str, sampling: SessionSampling, *, training: bool = True) -> SimulatedSession:
        if session_id in self.open_sessions:
            raise AssertionError(f"session {session_id} began twice")
        session = self.open_sessions[session_id] = SimulatedSession(session_id, self)
        return session

    async def finish(self, session_id: str, reward: float | None = None) -> Export:
        session = self.open_sessions.pop(session_id)
        self.finished += 1
        self.sampled += session.sampled
        if session_id in self._going:
            self._going.remove(session_id)
            self.lost += session.sampled
        self.forget(session_id)
        discarded = {"aborted": session.aborted} if session.aborted else {}
        ledger = Ledger(session.sampled, session.sampled - session.aborted, 0, discarded)
        return Export((), ("live",) * session.answers, ledger)

    def lose(self, session_id: str) -> None:
        """What this session has sampled and samples until it ends is lost with its node."""
        if session_id in self.open_sessions:
            self._going.add(session_id)

    def expect(self, prompt: Prompt, before: int) -> None:
        self.asked += prompt.length
        self.ideal += before or (prompt.common if prompt.group in self._groups else 0)
        self._groups.add(prompt.group)


@define(eq=False)
class SimulatedSandboxes:
    """Opens sandboxes at the cost model's price. One that leaks is closed by its provider, at the end: ``open_now`` is
    then ``leaked``."""

    costs: Costs
    opened: int = 0
    open_now: int = 0
    leaked: int = 0

    @asynccontextmanager
    async def open(self, *, leaks: bool = False) -> AsyncIterator[None]:
        self.opened += 1
        self.open_now += 1
        try:
            await trio.sleep(self.costs.sandbox_start_s)
            yield
        finally:
            self.open_now -= not leaks
            self.leaked += leaks


@frozen(eq=False)
class SimulatedTask:
    """Follows a plan. ``faults``: turn -> kind."""

    name: str
    group: str
    plan: Plan
    sandboxes: SimulatedSandboxes
    faults: Mapping[int, str]
    sampling: SessionSampling = field(factory=SessionSampling)
    shaping: Shaping = field(factory=Shaping)

    def as_json(self) -> dict[str, Json]:
        return {}

    def build(self, providers: Any) -> SimulatedTask:
        return self

    async def run(self, model: ModelEndpoint) -> TaskResult:
        started = trio.current_time()
        try:
            async with self.sandboxes.open(leaks="sandbox_leaks" in self.faults.values()):
                finished = await self._turns(model)
        except InfraError as problem:
            return TaskResult(0.0, failure=Failure.INFRA, details={"error": str(problem)})
        outside = {"sandbox_s": trio.current_time() - started}
        return TaskResult(float(finished), metrics=outside, failure=None if finished else Failure.AGENT)

    async def _turns(self, model: ModelEndpoint) -> bool:
        assert model.complete is not None
        length = self.plan.prompt
        for number, turn in enumerate(self.plan.turns):
            fault = self.faults.get(number)
            ask: Any = Ask(Prompt(self.group, model.model_name, self.plan.prompt, length), turn.tokens)
            if fault == "client_gone":
                with trio.move_on_after(GONE_S):
                    await model.complete(ask)
                return False
            await model.complete(ask)
            if fault == "sandbox_dies":
                raise InfraError(f"the sandbox of {model.model_name} died at turn {number}")
            if fault == "sandbox_hangs":
                await trio.sleep_forever()
            if number + 1 < len(self.plan.turns):
                await trio.sleep(self.sandboxes.costs.sandbox_exec_s + turn.tool_s)
            length += turn.tokens + turn.observed
        return True


@frozen(eq=False)
class SimulatedTasks:
    """Rows hold a session's place in the data; its plan is drawn from there when it starts."""

    plan: Callable[[int, int], Plan]
    sandboxes: SimulatedSandboxes
    faults: Mapping[int, Mapping[int, str]]
    size: int

    def resolve(self, sample: Mapping[str, Json], runtime_model: Mapping[str, str]) -> SimulatedTask:
        number, replica = sample["sample"], sample["replica"]
        return SimulatedTask(
            "simulated",
            f"g{number}",
            self.plan(number, replica),
            self.sandboxes,
            self.faults.get(number * self.size + replica, {}),
        )
