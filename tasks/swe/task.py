"""The life of a repair: the repository made ready, the agent, then the hidden tests run and their log graded.

Reward 1 when every test of FAIL_TO_PASS passes and none of PASS_TO_PASS was broken, else 0. What the agent's code does
to the run (it hangs, it cannot be imported) is reward 0; an evaluation that could not be carried out (no repository, a
test patch that does not apply, a missing test runner) is an infrastructure failure.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import PurePosixPath

import trio

from uniagent.engine.errors import InfraError
from uniagent.engine.ports import AgentResult, Json, ModelEndpoint, Providers, Sandbox, TaskResult
from uniagent.tasks.base import run_episode
from uniagent.tasks.check import Attempt
from uniagent.tasks.config import TaskConfig
from uniagent.tasks.leakage import Prepared, prepare, seal, settle
from uniagent.tasks.scripts import Ran, checked, run_script, unpack
from uniagent.tasks.swe import parsers
from uniagent.tasks.swe.case import Case
from uniagent.tasks.swe.grade import FULL, Statuses, report
from uniagent.tasks.swe.logs import read_log
from uniagent.tasks.swe.options import guard, repair_options, tests_timeout_s
from uniagent.tasks.swe.patches import touched
from uniagent.tasks.swe.script import START

GIT_S = 120.0
GIT = ("git", "-c", "safe.directory=*")
LOG_KEPT = 4000  # characters of the test log in the details
FORGED = """import os
def pytest_sessionfinish(session, exitstatus):
    for name in {names!r}:
        print("PASSED " + name)
    os._exit(0)
"""


class Repair:
    """The task behind swe_bench, swe_rebench and swe_bench_multilingual."""

    def __init__(self, config: TaskConfig, providers: Providers, case: Case) -> None:
        self.config, self.providers, self.case = config, providers, case
        self.options = repair_options(config)
        self.tests_timeout_s = tests_timeout_s(config, self.options)
        self.head = ""  # the commit that the agent started from
        self.protected: Prepared | None = None

    async def run(self, model: ModelEndpoint) -> TaskResult:
        return await run_episode(self.config, self.providers, model, setup=self.setup, verify=self.verify)

    # ------------------------------------------------------------ before the agent

    async def setup(self, sandbox: Sandbox) -> None:
        """Raises InfraError where the sandbox holds no repository."""
        case = self.case
        self.head = await stand_ready(sandbox, case)
        if self.options.guard:
            hidden = touched(case.test_patch)
            rules = guard(
                case.row,
                repo=case.repo,
                head=self.head,
                date=case.created_at,
                problem=case.problem,
                tests=tuple(dict.fromkeys([*hidden.before, *hidden.after])),
                root=PurePosixPath(case.workdir),
                consequence=self.options.leakage,
            )
            self.protected = await prepare(sandbox, rules)

    # ------------------------------------------------------------ after it

    async def verify(self, sandbox: Sandbox, acted: AgentResult) -> TaskResult:
        found = await seal(sandbox, self.protected, acted) if self.protected else ()
        return settle(await self._graded(sandbox), found, self.options.leakage)

    async def _graded(self, sandbox: Sandbox) -> TaskResult:
        case = self.case
        find = partial(parsers.find, instance_id=case.instance_id, repo=case.repo, version=case.version)
        parse = await trio.to_thread.run_sync(find, case.parser)
        ran = await run_script(sandbox, self.script(), timeout_s=self.tests_timeout_s, cwd=PurePosixPath(case.workdir))
        if ran.code is None and START in ran.log:
            return self._result(None, ran, "tests_timed_out")
        try:
            statuses = await trio.to_thread.run_sync(read_log, ran.log, parse)
        except InfraError:
            if await self._repository_is_whole(sandbox):
                raise
            return self._result(None, ran, "repository_broken")
        return self._result(statuses, ran, *(() if statuses is not None else ("tests_did_not_run",)))

    def script(self) -> str:
        """The evaluation script, with the commit that is really there: an archive has no history of its own."""
        case = self.case
        return case.script.replace(case.base_commit, self.head) if case.archive else case.script

    async def _repository_is_whole(self, sandbox: Sandbox) -> bool:
        """Whether the commit that the agent started from can still be read."""
        argv = [*GIT, "-C", self.case.workdir, "rev-parse", "--verify", f"{self.head}^{{tree}}"]
        return (await sandbox.exec(argv, timeout_s=GIT_S)).code == 0

    def _result(self, statuses: Statuses | None, ran: Ran, *flags: str) -> TaskResult:
        case = self.case
        found = report(statuses or {}, case.fail_to_pass, case.pass_to_pass, fail_only=case.fail_only)
        resolved = statuses is not None and found.status == FULL
        details: dict[str, Json] = {
            "instance_id": case.instance_id,
            "status": found.status if statuses is not None else "no test results",
            "not_fixed": list(found.not_fixed),
            "broken": list(found.broken),
            "log": ran.log[-LOG_KEPT:],
        }
        metrics = {
            "resolved": float(resolved),
            "fail_to_pass": found.fail_to_pass if statuses is not None else 0.0,
            "pass_to_pass": found.pass_to_pass if statuses is not None else 0.0,
            "tests_s": ran.duration_s,
        }
        return TaskResult(float(resolved), outcome=resolved, flags=flags, metrics=metrics, details=details)

    # ------------------------------------------------------------ checking

    def attempts(self) -> Mapping[str, Attempt]:
        """For ``uniagent tasks check``: the reference patch; the tests emptied; results printed instead of earned."""
        return {"oracle": self._oracle, "empty_tests": self._empty_tests, "forged_results": self._forged}

    async def _oracle(self, sandbox: Sandbox) -> AgentResult:
        argv = [*GIT, "-C", self.case.workdir, "apply", "-v", "-"]
        patch = (self.case.gold.rstrip("\n") + "\n").encode()
        await checked(sandbox, argv, "the reference patch does not apply", stdin=patch, timeout_s=GIT_S)
        return AgentResult(finished=True)

    async def _empty_tests(self, sandbox: Sandbox) -> AgentResult:
        files = [f"{self.case.workdir}/{path}" for path in touched(self.case.test_patch).after]
        script = "; ".join(f"mkdir -p $(dirname {shlex.quote(f)}); : > {shlex.quote(f)}" for f in files)
        await run_script(sandbox, script, timeout_s=GIT_S)
        return AgentResult(finished=True)

    async def _forged(self, sandbox: Sandbox) -> AgentResult:
        names = [*self.case.fail_to_pass, *self.case.pass_to_pass]
        argv = ["bash", "-c", 'cat > "$1"', "bash", f"{self.case.workdir}/conftest.py"]
        await sandbox.exec(argv, stdin=FORGED.format(names=names).encode(), timeout_s=GIT_S)
        return AgentResult(finished=True)


async def stand_ready(sandbox: Sandbox, case: Case) -> str:
    """The repository in its place, the shell in the repository; gives the commit that is checked out. Raises
    InfraError."""
    place = PurePosixPath(case.workdir)
    where = f"instance {case.instance_id}"
    if case.archive is not None:
        await unpack(sandbox, await trio.to_thread.run_sync(case.archive.read_bytes), place)
        await run_script(sandbox, _COMMIT, timeout_s=GIT_S, cwd=place)
    argv = [*GIT, "-C", str(place), "rev-parse", "--verify", "HEAD"]
    head = await checked(sandbox, argv, f"{where}: there is no git repository in {place}", timeout_s=GIT_S)
    shell = await sandbox.shell()
    await shell.run(f"cd {shlex.quote(str(place))}", timeout_s=GIT_S)
    return head.strip()


_COMMIT = """set -e
git init -q .
git add -A -f
git -c user.name=base -c user.email=base@localhost commit -q -m base --allow-empty
"""
