"""bugfix: repair a project so that hidden tests pass and the others still do.

The agent gets the project with the bug and without the tests that show it; no version control, no compiled files. What
it leaves is judged in a second sandbox that it never saw: the project as it was published, with the bug, and on top the
agent's own changes to files that are neither tests nor what steers a test runner. The tests that cover the broken
function run first, all others only when those pass. Reward 1 when all do, else 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import PurePosixPath

import trio
from attrs import field, frozen

from uniagent.engine.ports import AgentResult, Json, ModelEndpoint, Providers, Sandbox, TaskResult
from uniagent.tasks.base import open_sandbox, run_episode
from uniagent.tasks.bugfix import hide, place
from uniagent.tasks.bugfix.mutate import Edit
from uniagent.tasks.bugfix.project import REQUIREMENT, Files, Project, files_of, is_test, make_runtime
from uniagent.tasks.bugfix.solutions import rewritten
from uniagent.tasks.check import Attempt
from uniagent.tasks.config import TaskConfig
from uniagent.tasks.guards.grader import Graded, run_tests
from uniagent.tasks.guards.scan import interpreter
from uniagent.tasks.guards.tampering import RUNNER_FILES, RUNNER_SECTIONS
from uniagent.tasks.leakage import Guard, Origin, Prepared, Tests, prepare, seal, settle
from uniagent.tasks.structure import structure
from uniagent.tasks.swe.options import repair_options, tests_timeout_s

PYTEST = "-c /dev/null --rootdir . --import-mode prepend"  # whatever the project's own settings are
FORGED = "import os, pytest\n\n\ndef pytest_runtest_protocol(item, nextitem):\n    os._exit(0)\n"


@frozen
class Case:
    """The metadata of a sample; ``old`` stood at ``line`` of ``path`` before ``new`` did. ``covering``: tests that call
    the function beside those of FAIL_TO_PASS. Keys in capitals are SWE-bench's."""

    instance_id: str
    source: str
    path: str
    function: str
    line: int
    old: str
    new: str
    FAIL_TO_PASS: tuple[str, ...]
    PASS_TO_PASS: tuple[str, ...]
    problem_statement: str = ""
    covering: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    operator: str = ""
    patch: str = ""
    wrong: Edit | None = None

    @property
    def project(self) -> Project:
        return Project(self.source, self.requires)


@frozen
class Verdict:
    """What the tests said, as far as they were run; ``outcomes`` by id."""

    outcomes: Mapping[str, str] = field(repr=False)
    graded: Graded

    @property
    def cheated(self) -> bool:
        return any(finding.leak for finding in self.graded.findings)

    def failing(self, tests: Sequence[str]) -> list[str]:
        return [test for test in tests if self.outcomes.get(test) != "passed"]


class BugFix:
    """One broken project."""

    def __init__(self, config: TaskConfig, providers: Providers) -> None:
        self.case = structure(Case, config.metadata, f"task {config.name!r}: metadata")
        self.given, self.providers = config, providers
        self.config = place.shown_in(config, self.case.project)
        self.options = repair_options(config)
        self.protected: Prepared | None = None

    async def run(self, model: ModelEndpoint) -> TaskResult:
        return await run_episode(self.config, self.providers, model, setup=self.setup, verify=self.verify)

    # ------------------------------------------------------------ before the agent

    async def setup(self, sandbox: Sandbox) -> None:
        """Raises UserError where the project cannot be fetched, or is not the one that the sample was made from."""
        files = await self.files()
        root = place.root(sandbox.workdir)
        for path, content in self.broken(files).items():
            await sandbox.write(root / path, content)
        for path, names in hide.hidden_functions(self.case.FAIL_TO_PASS).items():
            await sandbox.write(root / path, hide.without(files.texts[path].decode(), names).encode())
        if self.options.guard:
            self.protected = await prepare(sandbox, self.guard(files, root))

    async def files(self) -> Files:
        await trio.to_thread.run_sync(make_runtime, self.case.requires)
        return await trio.to_thread.run_sync(_files, self.case.project)

    def broken(self, files: Files) -> dict[str, bytes]:
        """The published project with the bug in."""
        case = self.case
        text = Edit(case.line, case.old, case.new).apply(files.texts[case.path].decode())
        return {**files.texts, case.path: text.encode()}

    def guard(self, files: Files, root: PurePosixPath) -> Guard:
        """The project itself, of any version, is where the fix is."""
        case = self.case
        named = case.source.partition("[")[0].partition("==")[0] if REQUIREMENT.match(case.source) else ""
        origin = Origin(distributions=(named,) if named else (), packages=files.packages)
        tests = tuple(path for path in files.texts if is_test(path))
        return Guard(origin, tests, case.problem_statement, root, history=False, consequence=self.options.leakage)

    # ------------------------------------------------------------ after it

    async def verify(self, sandbox: Sandbox, acted: AgentResult) -> TaskResult:
        found = await seal(sandbox, self.protected, acted) if self.protected else ()
        files = await self.files()
        left = await sandbox.files(place.root(sandbox.workdir))
        verdict = await self.judged(files, self.repaired(files, {str(path): text for path, text in left.items()}))
        result = self.result(verdict)
        return settle(result, (*found, *verdict.graded.findings), self.options.leakage)

    def repaired(self, files: Files, left: Mapping[str, bytes]) -> dict[str, bytes]:
        """The broken project with what the agent did to it, but for tests and what steers their runner."""
        broken = self.broken(files)
        own = {path: text for path, text in left.items() if not steers(path) and not text.startswith(b"<symlink>")}
        kept = {path: text for path, text in broken.items() if steers(path) or path in own}
        return {**kept, **own}

    async def judged(self, files: Files, tree: Mapping[str, bytes]) -> Verdict:
        case = self.case
        first = [*case.FAIL_TO_PASS, *case.covering]
        rest = sorted(set(case.PASS_TO_PASS) - set(case.covering))
        async with open_sandbox(self.config, self.providers) as fresh:
            root = place.root(fresh.workdir)
            for path, text in tree.items():
                await fresh.write(root / path, text)
            python = await interpreter(fresh)
            run = partial(self.tested, fresh, python, root)
            verdict = await run(first)
            rest = [test for test in rest if test not in verdict.outcomes]
            if rest and not verdict.failing(first) and not verdict.cheated:
                others = await run(rest)
                verdict = Verdict({**others.outcomes, **verdict.outcomes}, others.graded)
        return verdict

    async def tested(self, fresh: Sandbox, python: str, root: PurePosixPath, tests: Sequence[str]) -> Verdict:
        files = tuple(sorted({test.partition("::")[0] for test in tests}))
        env = {**place.environment(self.config.sandbox, self.case.project), "PYTEST_ADDOPTS": PYTEST}
        limit = tests_timeout_s(self.config, self.options) / 2  # there may be two runs
        asked = Tests(files, runner="pytest", env=env, timeout_s=limit)
        graded = await run_tests(fresh, python, root, asked)
        return Verdict(graded.tests, graded)

    def result(self, verdict: Verdict) -> TaskResult:
        case = self.case
        not_fixed = verdict.failing(case.FAIL_TO_PASS)
        seen = [test for test in case.PASS_TO_PASS if not_fixed == [] or test in verdict.outcomes]
        broken = verdict.failing(seen) if not verdict.graded.timed_out else []
        resolved = not (not_fixed or broken or verdict.cheated or verdict.graded.timed_out)
        share = 1 - len(not_fixed) / len(case.FAIL_TO_PASS)
        details: dict[str, Json] = {"instance_id": case.instance_id, "not_fixed": not_fixed, "broken": broken[:50]}
        if not resolved:
            details["log"] = verdict.graded.output[-4000:]
        flags = ("tests_timed_out",) if verdict.graded.timed_out else ()
        metrics = {"resolved": float(resolved), "fail_to_pass": share}
        return TaskResult(float(resolved), outcome=resolved, flags=flags, metrics=metrics, details=details)

    # ------------------------------------------------------------ checking

    def attempts(self) -> Mapping[str, Attempt]:
        """The reference; the same function written anew; another bug in place of this one; two ways to cheat."""
        found: dict[str, Attempt] = {"oracle": partial(self._writes, self._fixed), "solution": self._solution}
        if self.case.wrong is not None:
            found["wrong_fix"] = partial(self._writes, self.case.wrong.apply)
        return {**found, "forged_results": self._forged, "tests_removed": self._tests_removed}

    def _fixed(self, published: str) -> str:
        return published

    async def _writes(self, change: Callable[[str], str], sandbox: Sandbox) -> AgentResult:
        text = (await self.files()).texts[self.case.path].decode()
        await sandbox.write(place.root(sandbox.workdir) / self.case.path, change(text).encode())
        return AgentResult(finished=True)

    async def _solution(self, sandbox: Sandbox) -> AgentResult:
        return await self._writes(lambda text: rewritten(text, self.case.function) or text, sandbox)

    async def _forged(self, sandbox: Sandbox) -> AgentResult:
        await sandbox.write(place.root(sandbox.workdir) / "conftest.py", FORGED.encode())
        return AgentResult(finished=True)

    async def _tests_removed(self, sandbox: Sandbox) -> AgentResult:
        files = (await self.files()).tests
        root = place.root(sandbox.workdir)
        await sandbox.exec(["rm", "-f", "--", *(str(root / path) for path in files)], timeout_s=60)
        return AgentResult(finished=True)

    def statement(self) -> str:
        return "\n".join(str(message["content"]) for message in self.given.messages)

    async def hidden_tests(self) -> Mapping[str, str]:
        """The text of the tests that must pass, by id."""
        texts = (await self.files()).texts
        paths = {test.partition("::")[0] for test in self.case.FAIL_TO_PASS}
        return hide.sources(self.case.FAIL_TO_PASS, {path: texts[path].decode() for path in paths})

    async def given_texts(self) -> Mapping[str, str]:
        """The Python files that the agent is given, but for tests."""
        broken = self.broken(await self.files())
        return {path: text.decode() for path, text in broken.items() if path.endswith(".py") and not is_test(path)}


def steers(path: str) -> bool:
    """Whether a file is a test, or what a test runner or the interpreter reads by itself."""
    name = PurePosixPath(path)
    judges = any(name.match(pattern) for pattern in (*RUNNER_FILES, *RUNNER_SECTIONS, "*.pth", "sitecustomize.py"))
    return judges or is_test(path) or path.endswith((".pyc", ".so"))


@lru_cache(maxsize=16)
def _files(project: Project) -> Files:
    return files_of(project)
