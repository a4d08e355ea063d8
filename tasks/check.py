"""Task quality: does each sample reward the right thing, and only that, every time?

A sample is played by scripted attempts in place of an agent, each in a sandbox of its own: ``nothing`` (the agent ends
at once), and those the task offers: ``oracle`` and every name that begins with ``solution`` (independent correct
solutions) must succeed and set off no leak rule; every other name is a plausible mistake or a way to cheat that must
not succeed. The verifier runs several times on each final state and must not change its mind, nor its time limit.

A task that tells its hidden tests is read, too: every name they need must stand in the statement or in what the agent
is given, and a judge, if there is one, traces each test to a sentence. Knows no particular task.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import trio
from attrs import field, frozen

from uniagent.engine.errors import InfraError
from uniagent.engine.ports import AgentResult, Failure, Json, Providers, Sandbox, TaskResult
from uniagent.tasks.base import infra_failure, open_sandbox
from uniagent.tasks.check_judge import Opinion
from uniagent.tasks.check_names import untold
from uniagent.tasks.config import ENDPOINT, TaskConfig, TaskConfigResolver

Attempt = Callable[[Sandbox], Awaitable[AgentResult]]


@runtime_checkable
class Checkable(Protocol):
    """A task that can be checked: its stages, and the attempts it offers by name."""

    async def setup(self, sandbox: Sandbox) -> None: ...
    async def verify(self, sandbox: Sandbox, acted: AgentResult) -> TaskResult: ...
    def attempts(self) -> Mapping[str, Attempt]: ...


@runtime_checkable
class Specified(Protocol):
    """A task whose hidden tests can be compared with its statement."""

    def statement(self) -> str: ...
    async def hidden_tests(self) -> Mapping[str, str]:
        """Text by the test's name."""
        ...

    async def given_texts(self) -> Mapping[str, str]:
        """Code that the agent can read, by path."""
        ...


@frozen
class Checked:
    """What one sample's check found. ``problems`` are sentences, none when all is well; rewards by attempt; the judge's
    ``opinion``, where one was asked."""

    number: int
    row: Mapping[str, Json] = field(repr=False)
    problems: tuple[str, ...]
    rewards: Mapping[str, float]
    slowest_verify_s: float
    opinion: Opinion | None = None


Ask = Callable[[str, Mapping[str, str]], Awaitable[Opinion]]  # (statement, tests)


async def check_samples(
    rows: Sequence[Mapping[str, Json]],
    resolver: TaskConfigResolver,
    providers: Providers,
    *,
    runs: int,
    at_once: int = 8,
    ask: Ask | None = None,
) -> list[Checked]:
    """Every row, ``at_once`` at a time; the verifier runs ``runs`` times on each final state, ``ask`` is the judge."""
    found: dict[int, Checked] = {}
    places = trio.CapacityLimiter(at_once)

    async def one(number: int, row: Mapping[str, Json]) -> None:
        async with places:
            config = resolver.resolve(row, dict.fromkeys(ENDPOINT, "unused"), where=f"sample {number}")
            found[number] = await check_sample(number, row, config, providers, runs=runs, ask=ask)

    async with trio.open_nursery() as nursery:
        for number, row in enumerate(rows):
            nursery.start_soon(one, number, row)
    return [found[number] for number in range(len(rows))]


async def check_sample(
    number: int,
    row: Mapping[str, Json],
    config: TaskConfig,
    providers: Providers,
    *,
    runs: int,
    ask: Ask | None = None,
) -> Checked:
    task = config.build(providers)
    if not isinstance(task, Checkable):
        problem = f"the task {config.task or config.name!r} offers no attempts(): nothing can be checked"
        return Checked(number, row, (problem,), {}, 0.0)
    attempts = {"nothing": _nothing, **task.attempts()}
    problems = [] if "oracle" in attempts else ["no oracle: nothing shows that it can be solved"]
    said = None
    if isinstance(task, Specified):
        untold_names, said = await _read(task, ask)
        problems += untold_names
    rewards: dict[str, float] = {}
    slowest = 0.0
    for name, attempt in attempts.items():
        fresh = config.build(providers)  # a task keeps what it knows of its sandbox
        assert isinstance(fresh, Checkable)
        verdicts, seconds = await _play(fresh, config, providers, fresh.attempts().get(name, attempt), runs)
        slowest = max(slowest, seconds)
        rewards[name] = verdicts[0].reward
        problems += [f"{name}: {problem}" for problem in _problems(name, verdicts)]
    return Checked(number, row, tuple(problems), rewards, slowest, said)


async def _read(task: Specified, ask: Ask | None) -> tuple[list[str], Opinion | None]:
    """What is wrong with the statement, as sentences; and the judge's opinion."""
    statement, tests = task.statement(), await task.hidden_tests()
    missing = untold(tests, statement, (await task.given_texts()).values())
    problems = [f"statement: {test} needs {', '.join(names)}, which nothing names" for test, names in missing.items()]
    if ask is None or not tests:
        return problems, None
    said = await ask(statement, tests)
    problems += [f"judge: {test} follows from no sentence of the statement" for test in said.untraced]
    problems += [f"judge: contradictory readings: {reading}" for reading in said.contradictions]
    return problems, said


async def _nothing(sandbox: Sandbox) -> AgentResult:
    return AgentResult(finished=True)


async def _play(
    task: Checkable, config: TaskConfig, providers: Providers, attempt: Attempt, runs: int
) -> tuple[list[TaskResult], float]:
    """The verdicts on one attempt's final state, and the seconds of the slowest."""
    verdicts: list[TaskResult] = []
    slowest = 0.0
    try:
        async with open_sandbox(getattr(task, "config", config), providers) as sandbox:
            await task.setup(sandbox)
            acted = await attempt(sandbox)
            for _ in range(runs):
                started = trio.current_time()
                with trio.fail_after(config.verifier.timeout_s):
                    verdicts.append(await task.verify(sandbox, acted))
                slowest = max(slowest, trio.current_time() - started)
    except* (InfraError, OSError) as problems:
        verdicts.append(infra_failure("the sandbox failed", problems))
    except* trio.TooSlowError as problems:
        verdicts.append(infra_failure(f"over verifier.timeout_s = {config.verifier.timeout_s:g} s", problems))
    return verdicts, slowest


def _problems(name: str, verdicts: Sequence[TaskResult]) -> list[str]:
    failed = [v for v in verdicts if v.failure is Failure.INFRA]
    if failed:
        return [str(failed[0].details.get("error"))]
    problems = []
    if len({(v.reward, v.outcome) for v in verdicts}) > 1:
        problems.append(f"the verifier changes its mind: rewards {[v.reward for v in verdicts]}")
    succeeded = verdicts[0].reward > 0 if verdicts[0].outcome is None else verdicts[0].outcome
    right = name == "oracle" or name.startswith("solution")
    if succeeded != right:
        problems.append("does not succeed" if right else f"earns {verdicts[0].reward:g} and counts as success")
    leaks = {f"{one['kind']} ({one['where']})": None for v in verdicts for one in v.details.get("leakage", ())
             if one["leak"]}  # fmt: skip
    if right and leaks:
        problems.append(f"sets off a leak rule: {', '.join(leaks)}")
    return problems
