"""Bugs of a project that make samples: tried, and kept where they are worth a task.

A bug is kept when tests that cover its function fail with it and pass without it, the same ones in three processes with
three hash seeds; when no test module fails to load; when few tests fail; and when a statement can be written that says
what is right. Only tests that pass three times without any bug count. Every test runs in a sandbox.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import trio
from attrs import evolve, field, frozen

from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import Sandbox
from uniagent.tasks.bugfix import place
from uniagent.tasks.bugfix.mutate import Bug, bugs
from uniagent.tasks.bugfix.project import Files, Project
from uniagent.tasks.bugfix.recipe import Recipe, Repair, Wrong
from uniagent.tasks.bugfix.statement import Broken, Failure, statement
from uniagent.tasks.config import SandboxConfig

WORKER = Path(__file__).with_name("worker.py")
SEEDS = ("1", "2", "3")  # of the hashes of three processes: what depends on them is not stable
EXEC_S = 3600.0
Open = Callable[[], AbstractAsyncContextManager[Sandbox]]
Say = Callable[[str], None]
Writer = Callable[[Repair], Awaitable[str | None]]  # another statement, or None to keep the template's


@frozen
class Wanted:
    """How many samples, and how hard to look: ``tries`` bugs a function, at most ``per_function`` kept; ``most_tests``
    test functions may fail (parameters aside), ``most_failing`` tests."""

    samples: int = 100
    tries: int = 6
    per_function: int = 2
    most_tests: int = 6
    most_failing: int = 60
    seed: int = 0
    limit_s: float = math.inf  # then what was found by then is all
    cpu_s: float = 8.0  # of the tests of one bug, beyond which it hangs
    wall_s: float = 120.0


@frozen
class Survey:
    """``tests`` pass every time; ``covering``: function (path:first line) -> those that call it; ``importing``: what
    runs when test modules are loaded."""

    tests: tuple[str, ...] = field(repr=False)
    covering: Mapping[str, tuple[str, ...]] = field(repr=False)
    importing: frozenset[str] = field(repr=False)
    cpu_s: float


@frozen
class Tried:
    """A bug with the tests that failed with it, and what they raised; or why it is no good."""

    path: str
    bug: Bug
    failed: Mapping[str, Any] = field(factory=dict, repr=False)
    rejected: str | None = None


class Generator:
    """One project's bugs. ``open_box`` gives a sandbox in which the tests can run."""

    def __init__(self, project: Project, files: Files, wanted: Wanted, open_box: Open, sandbox: SandboxConfig) -> None:
        self.project, self.files, self.wanted = project, files, wanted
        self.open_box, self.sandbox = open_box, sandbox
        self.rejected: Counter[str] = Counter()
        self.draw = random.Random(wanted.seed)

    async def make(self, say: Say, writer: Writer | None = None, at_once: int = 2) -> Recipe:
        """Raises UserError where the project's tests do not pass as they are."""
        survey = await self.survey()
        say(f"{self.project.name}: {len(survey.tests)} tests pass three times, {survey.cpu_s:.1f} s of CPU")
        repairs: list[Repair] = []
        places = trio.CapacityLimiter(at_once)
        sources = list(self.files.sources)
        self.draw.shuffle(sources)

        async def one(path: str) -> None:
            async with places:
                if len(repairs) < self.wanted.samples:
                    found = await self.of_file(path, survey, writer)
                    repairs.extend(found)
                    say(f"{self.project.name}: {path}: {len(found)} samples, {len(repairs)} in all")

        with trio.move_on_after(self.wanted.limit_s):
            async with trio.open_nursery() as nursery:
                for path in sources:
                    nursery.start_soon(one, path)
        repairs.sort(key=lambda repair: (repair.path, repair.line, repair.operator))
        kept = repairs[: self.wanted.samples] if len(repairs) <= self.wanted.samples else self._sampled(repairs)
        return Recipe(self.project, survey.tests, tuple(kept), dict(self.rejected.most_common()), survey.cpu_s)

    def _sampled(self, repairs: Sequence[Repair]) -> list[Repair]:
        kept = self.draw.sample(range(len(repairs)), self.wanted.samples)
        return [repairs[number] for number in sorted(kept)]

    # ------------------------------------------------------------ the project as it is

    async def survey(self) -> Survey:
        async with self.open_box() as box:
            await self.put(box)
            job = self.job(self.files.tests, None, cpu_s=1200.0)
            runs = [(await self.work(box, {**job, "cover": "" if not n else None}, seed))[0]
                    for n, seed in enumerate(SEEDS)]  # fmt: skip
        for run in runs:
            if "broken" in run or not run["outcomes"]:
                said = run.get("broken") or "\n".join(run.get("collection", [])) or "no tests were found"
                raise UserError(f"{self.project.source}: its tests do not run: {said}")
        passed = [{test for test, how in run["outcomes"].items() if how == "passed"} for run in runs]
        stable = passed[0] & passed[1] & passed[2]
        self.rejected["tests left out: they do not pass three times"] += len(runs[0]["outcomes"]) - len(stable)
        covering: dict[str, list[str]] = defaultdict(list)
        for test, called in runs[0]["covered"].items():
            for function in called if test in stable else ():
                covering[function].append(test)
        importing = frozenset(runs[0]["covered"].get("", ()))
        tests = tuple(test for test in runs[0]["outcomes"] if test in stable)
        return Survey(tests, {f: tuple(some) for f, some in covering.items()}, importing, runs[1]["cpu_s"])

    async def put(self, box: Sandbox) -> None:
        root = place.root(box.workdir)
        for path, content in self.files.texts.items():
            await box.write(root / path, content)

    def job(self, paths: Sequence[str], tests: Sequence[str] | None, *, cpu_s: float) -> dict[str, Any]:
        return {"mode": "run", "paths": list(paths), "tests": tests, "edits": [None], "cpu_s": cpu_s,
                "wall_s": self.wanted.wall_s + cpu_s}  # fmt: skip

    async def work(self, box: Sandbox, job: Mapping[str, Any], seed: str) -> list[Any]:
        """The worker's results for one job. Raises InfraError where it says nothing."""
        env = {**place.environment(self.sandbox, self.project), "PYTHONHASHSEED": seed}
        inside = str(place.root(box.workdir))
        env["PYTHONPATH"] = ":".join(filter(None, [inside, f"{inside}/src", env.get("PYTHONPATH", "")]))
        argv = [place.python(self.sandbox), "-c", WORKER.read_text(encoding="utf-8")]
        feed = json.dumps(job).encode()
        done = await box.exec(argv, stdin=feed, timeout_s=EXEC_S, cwd=place.root(box.workdir), env=env)
        if done.code != 0 or done.dropped:
            raise InfraError(f"the tests' worker failed ({done.code}): {done.errors.decode(errors='replace')[-800:]}")
        return [json.loads(line) for line in done.output.splitlines()]

    # ------------------------------------------------------------ one file's bugs

    async def of_file(self, path: str, survey: Survey, writer: Writer | None) -> list[Repair]:
        text = self.text(path)
        chosen = self.choose(path, text, survey)
        if not chosen:
            return []
        async with self.open_box() as box:
            await self.put(box)
            screened = await self.screen(box, path, text, chosen, survey)
            alive = [tried for tried in screened if tried.rejected is None]
            promising = self.few_a_function(alive)
            confirmed = await self.confirm(box, path, text, promising, survey)
        self.rejected.update(t.rejected for t in [*screened, *confirmed] if t.rejected)
        good = [tried for tried in confirmed if tried.rejected is None]
        repairs = []
        for tried in good:
            made = await self.repair(tried, text, survey, writer, [*alive, *good])
            if made is None:
                self.rejected["no statement would say what is right"] += 1
            else:
                repairs.append(made)
        return repairs

    def choose(self, path: str, text: str, survey: Survey) -> list[Bug]:
        """Some bugs of each function that tests call, and that does not run while they are loaded."""
        try:
            found = list(bugs(text))
        except SyntaxError:
            return []
        by_function: dict[str, list[Bug]] = defaultdict(list)
        for bug in found:
            by_function[f"{path}:{bug.first_line}"].append(bug)
        chosen: list[Bug] = []
        for function, some in by_function.items():
            if function in survey.importing:
                self.rejected["not tried: the function runs while tests are loaded"] += len(some)
            elif function not in survey.covering:
                self.rejected["not tried: no test calls the function"] += len(some)
            else:
                picked = _varied(some, self.wanted.tries, self.draw)
                self.rejected["not tried: enough of the function's bugs were"] += len(some) - len(picked)
                chosen += picked
        return chosen

    async def screen(self, box: Sandbox, path: str, text: str, chosen: Sequence[Bug], survey: Survey) -> list[Tried]:
        jobs: list[dict[str, Any]] = []
        for bug in chosen:
            tests = survey.covering[f"{path}:{bug.first_line}"]
            jobs.append({"function": bug.function, "line": bug.first_line, "text": bug.edit.apply(text),
                         "tests": list(tests)})  # fmt: skip
        files = sorted({test.partition("::")[0] for job in jobs for test in job["tests"]})
        job = {**self.job(files, None, cpu_s=self.wanted.cpu_s), "mode": "screen", "path": path, "bugs": jobs}
        results = await self.work(box, job, SEEDS[0])
        return [self.judged(path, bug, result, survey) for bug, result in zip(chosen, results, strict=True)]

    def judged(self, path: str, bug: Bug, result: Mapping[str, Any], survey: Survey) -> Tried:
        if result.get("unscreened"):
            return Tried(path, bug)
        if "broken" in result:
            return Tried(path, bug, rejected=result["broken"])
        if result.get("collection") or result.get("status", 0) > 1:
            return Tried(path, bug, rejected="test modules no longer load")
        known = set(survey.tests)
        failed = {t: how for t, how in result["outcomes"].items() if t in known and how not in ("passed", "skipped")}
        if not failed:
            return Tried(path, bug, rejected="no test fails")
        if len({test.partition("[")[0] for test in failed}) > self.wanted.most_tests:
            return Tried(path, bug, failed, "too many tests fail")
        if len(failed) > self.wanted.most_failing:
            return Tried(path, bug, failed, "too many tests fail")
        return Tried(path, bug, failed)

    def few_a_function(self, alive: Sequence[Tried]) -> list[Tried]:
        """At most ``per_function``, with different operators where there are some."""
        by_function: dict[str, list[Tried]] = defaultdict(list)
        for tried in alive:
            by_function[tried.bug.function].append(tried)
        kept = []
        for some in by_function.values():
            seen: Counter[str] = Counter()
            ranked: list[tuple[int, int, Tried]] = []
            for tried in some:
                ranked.append((seen[tried.bug.operator], len(ranked), tried))
                seen[tried.bug.operator] += 1
            few = [tried for _, _, tried in sorted(ranked, key=lambda one: one[:2])[: self.wanted.per_function]]
            self.rejected["left out: enough of the function's were kept"] += len(some) - len(few)
            kept += few
        return kept

    async def confirm(
        self, box: Sandbox, path: str, text: str, promising: Sequence[Tried], survey: Survey
    ) -> list[Tried]:
        """Each bug on the disk, in three processes that share nothing."""
        edits = []
        for tried in promising:
            tests = survey.covering[f"{path}:{tried.bug.first_line}"]
            paths = sorted({test.partition("::")[0] for test in tests})
            edits.append({"path": path, "text": tried.bug.edit.apply(text), "tests": tests, "paths": paths})
        if not edits:
            return []
        job = {**self.job((), None, cpu_s=self.wanted.cpu_s), "edits": edits}
        runs = [await self.work(box, job, seed) for seed in SEEDS]
        confirmed = []
        for tried, *results in zip(promising, *runs, strict=True):
            judged = [self.judged(path, tried.bug, result, survey) for result in results]
            problem = next((one.rejected for one in judged if one.rejected), None)
            if problem is None and any(set(one.failed) != set(judged[0].failed) for one in judged):
                problem = "not stable: other tests fail in another run"
            confirmed.append(Tried(path, tried.bug, judged[0].failed, problem))
        return confirmed

    async def repair(
        self, tried: Tried, text: str, survey: Survey, writer: Writer | None, others: Sequence[Tried]
    ) -> Repair | None:
        bug = tried.bug
        failures = [Failure(test, how["error"], how["line"], how["parameters"]) for test, how in tried.failed.items()]
        broken = Broken(tried.path, bug.function, bug.operator, text, failures)
        tests = {path: self.text(path) for path in {failure.path for failure in failures}}
        said = statement(broken, tests)
        if said is None:
            return None
        covering = survey.covering[f"{tried.path}:{bug.first_line}"]
        made = Repair(
            path=tried.path,
            function=bug.function,
            operator=bug.operator,
            line=bug.edit.line,
            old=bug.edit.old,
            new=bug.edit.new,
            fail_to_pass=tuple(sorted(tried.failed)),
            covering=tuple(test for test in covering if test not in tried.failed),
            statement=said,
            wrong=_wrong(bug, others),
        )
        written = await writer(made) if writer is not None else None
        return made if written is None else evolve(made, statement=written)

    def text(self, path: str) -> str:
        return self.files.texts[path].decode("utf-8")


def _varied(some: Sequence[Bug], count: int, draw: random.Random) -> list[Bug]:
    """``count`` bugs, round by round one of each operator, in random order."""
    by_operator: dict[str, list[Bug]] = defaultdict(list)
    for bug in draw.sample(some, len(some)):
        by_operator[bug.operator].append(bug)
    operators = draw.sample(sorted(by_operator), len(by_operator))
    rounds = max(len(found) for found in by_operator.values())
    ordered = [by_operator[o][n] for n in range(rounds) for o in operators if n < len(by_operator[o])]
    return ordered[:count]


def _wrong(bug: Bug, others: Sequence[Tried]) -> Wrong | None:
    """A plausible wrong fix: another bug of the same function that tests notice."""
    for other in others:
        same = other.bug.function == bug.function and other.bug.first_line == bug.first_line
        if same and other.failed and other.bug.edit != bug.edit and other.bug.operator not in ("body", "function"):
            return Wrong(other.bug.edit.line, other.bug.edit.old, other.bug.edit.new)
    return None
