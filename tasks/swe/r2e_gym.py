"""R2E-Gym: repairs whose tests lie in the image, and whose verdict is an expected output.

Until the agent has ended the tests are taken out of the sandbox, not merely moved: an agent that is root finds them
anywhere. Reward 1 when every test of ``expected_output_json`` has the status it says, no more and no fewer tests
(R2E-Gym, ``agenthub/runtime/docker.py``).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from attrs import field, frozen

from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import AgentResult, Json, ModelEndpoint, Providers, Sandbox, TaskResult
from uniagent.tasks.base import run_episode
from uniagent.tasks.check import Attempt
from uniagent.tasks.config import TaskConfig
from uniagent.tasks.leakage import Guard, Prepared, prepare, seal, settle
from uniagent.tasks.scripts import checked, pack, run_script, unpack
from uniagent.tasks.swe.benchmarks import PROMPT, SYSTEM_PATH
from uniagent.tasks.swe.case import text
from uniagent.tasks.swe.logs import ENVIRONMENT, MISSING_RUNNER
from uniagent.tasks.swe.options import guard, repair_options, tests_timeout_s
from uniagent.tasks.swe.rows import samples
from uniagent.tasks.swe.task import GIT, GIT_S, LOG_KEPT

WORKDIR = "/testbed"
TESTS = "r2e_tests"
RUNNER = "run_tests.sh"
SUMMARY = "short test summary info"
COLOUR = re.compile(r"\x1b\[[0-9;]*m|\r")
ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
PATH = f"{WORKDIR}/.venv/bin:/root/.local/bin:/root/.cargo/bin:{SYSTEM_PATH}"

REPOSITORIES = {
    "sympy": "sympy/sympy",
    "pandas": "pandas-dev/pandas",
    "pillow": "python-pillow/Pillow",
    "scrapy": "scrapy/scrapy",
    "pyramid": "Pylons/pyramid",
    "tornado": "tornadoweb/tornado",
    "datalad": "datalad/datalad",
    "aiohttp": "aio-libs/aiohttp",
    "coveragepy": "nedbat/coveragepy",
    "numpy": "numpy/numpy",
    "orange3": "biolab/orange3",
}


@frozen
class R2eCase:
    """What a row says: tests -> status, and the reference fix as path -> text (None: removed)."""

    repo: str
    expected: Mapping[str, str]
    fix: Mapping[str, str | None] = field(factory=dict, repr=False)


def case(row: Mapping[str, Json]) -> R2eCase:
    """Raises UserError that names the field."""
    expected = _json(row, "expected_output_json")
    if not expected or not all(isinstance(status, str) for status in expected.values()):
        raise UserError(f"{_where(row)}: expected_output_json must be an object of test -> status, and have some")
    return R2eCase(text(row, "repo_name"), {plain(test): status for test, status in expected.items()}, _fix(row))


def statuses(log: str) -> dict[str, str] | None:
    """Tests of pytest's summary by name (``Class.test``, without what follows `` - ``); None: there is no summary."""
    _, found, rest = COLOUR.sub("", log).partition(SUMMARY)
    if not found:
        return None
    read: dict[str, str] = {}
    for line in rest.partition(SUMMARY)[0].strip().splitlines():
        status = next((s for s in ("PASSED", "FAILED", "ERROR") if s in line), None)
        if status is not None:
            read[plain(".".join(line.split("::")[1:]))] = status
    return read


def plain(test: str) -> str:
    """A test's name without colours and without the message after it."""
    return COLOUR.sub("", test).split(" - ")[0]


class R2eGym:
    """The task r2e_gym."""

    def __init__(self, config: TaskConfig, providers: Providers) -> None:
        self.config, self.providers = config, providers
        self.case = case(config.metadata)
        self.options = repair_options(config)
        self.tests_timeout_s = tests_timeout_s(config, self.options)
        self.tests = b""  # the hidden tests, packed
        self.protected: Prepared | None = None

    async def run(self, model: ModelEndpoint) -> TaskResult:
        return await run_episode(self.config, self.providers, model, setup=self.setup, verify=self.verify)

    async def setup(self, sandbox: Sandbox) -> None:
        """Take the tests out. Raises InfraError where the image has none."""
        gather = (
            f"set -e; cd {WORKDIR}; [ ! -d /{TESTS} ] || {{ rm -rf {TESTS}; mv /{TESTS} {TESTS}; }}; "
            f"find . -name '*.pyc' -delete; find {TESTS} -name __pycache__ -prune -exec rm -rf {{}} +"
        )
        what = "this is no image of R2E-Gym"
        await checked(sandbox, ["bash", "-c", gather], what, timeout_s=GIT_S)
        self.tests = await pack(sandbox, PurePosixPath(WORKDIR), [TESTS, RUNNER])
        await self._remove(sandbox)
        if self.options.guard:
            self.protected = await prepare(sandbox, await self._rules(sandbox))
        shell = await sandbox.shell()
        await shell.run(f"cd {WORKDIR}", timeout_s=GIT_S)

    async def _rules(self, sandbox: Sandbox) -> Guard:
        row = self.config.metadata
        argv = [*GIT, "-C", WORKDIR, "rev-parse", "--verify", "HEAD"]
        head = await checked(sandbox, argv, "this is no image of R2E-Gym", timeout_s=GIT_S)
        return guard(
            {"fix_commits": [row["commit_hash"]] if row.get("commit_hash") else [], **row},
            repo=REPOSITORIES.get(self.case.repo, ""),
            head=head.strip(),
            date="",
            problem=text(row, "problem_statement"),
            tests=(),
            root=PurePosixPath(WORKDIR),
            consequence=self.options.leakage,
        )

    async def verify(self, sandbox: Sandbox, acted: AgentResult) -> TaskResult:
        found = await seal(sandbox, self.protected, acted) if self.protected else ()
        return settle(await self._graded(sandbox), found, self.options.leakage)

    async def _graded(self, sandbox: Sandbox) -> TaskResult:
        await self._remove(sandbox)
        await unpack(sandbox, self.tests, PurePosixPath(WORKDIR))
        ran = await run_script(
            sandbox, f"bash {RUNNER}\n", timeout_s=self.tests_timeout_s, cwd=PurePosixPath(WORKDIR), env={"PATH": PATH}
        )
        await self._remove(sandbox)
        found = statuses(ran.log)
        if found is None and ran.code is not None:
            _refuse_environment(ran.code, ran.log)
        expected = self.case.expected
        solved = found is not None and found == expected
        read = found or {}
        wrong = sorted(test for test in {*expected, *read} if expected.get(test) != read.get(test))
        flags = ("tests_timed_out",) if ran.code is None else ("tests_did_not_run",) if found is None else ()
        return TaskResult(
            float(solved),
            outcome=solved,
            flags=flags,
            metrics={"resolved": float(solved), "tests_s": ran.duration_s},
            details={"not_as_expected": wrong, "log": ran.log[-LOG_KEPT:]},
        )

    def attempts(self) -> Mapping[str, Attempt]:
        """For ``uniagent tasks check``: the reference fix, and a runner that prints what is expected."""
        forged = {"forged_results": self._forged}
        return {"oracle": self._oracle, **forged} if self.case.fix else forged

    async def _oracle(self, sandbox: Sandbox) -> AgentResult:
        for path, content in self.case.fix.items():
            place = f"{WORKDIR}/{path}"
            words = f"rm -f {shlex.quote(place)}" if content is None else 'mkdir -p "$(dirname "$1")" && cat > "$1"'
            stdin = (content or "").encode()
            await checked(sandbox, ["bash", "-c", words, "bash", place], "the fix", stdin=stdin, timeout_s=GIT_S)
        return AgentResult(finished=True)

    async def _forged(self, sandbox: Sandbox) -> AgentResult:
        lines = [SUMMARY, *(f"{status} {TESTS}/test_1.py::{test}" for test, status in self.case.expected.items())]
        script = "".join(f"echo {shlex.quote(line)}\n" for line in lines)
        argv = ["bash", "-c", 'cat > "$1"', "bash", f"{WORKDIR}/{RUNNER}"]
        await sandbox.exec(argv, stdin=script.encode(), timeout_s=GIT_S)
        return AgentResult(finished=True)

    async def _remove(self, sandbox: Sandbox) -> None:
        argv = ["rm", "-rf", f"{WORKDIR}/{TESTS}", f"{WORKDIR}/{RUNNER}"]
        await checked(sandbox, argv, "cannot take the tests out", timeout_s=GIT_S)


def _refuse_environment(code: int, log: str) -> None:
    """Raises InfraError where it is not the code under test that kept the tests from running."""
    if code in MISSING_RUNNER or ENVIRONMENT.search(log):
        raise InfraError(f"the tests did not run (exit status {code}): {log.strip()[-600:]}")


def _fix(row: Mapping[str, Json]) -> dict[str, str | None]:
    """The files of the row's commit that are no tests, as they are after it."""
    if "parsed_commit_content" not in row:
        return {}
    fix: dict[str, str | None] = {}
    for change in _json(row, "parsed_commit_content").get("file_diffs", []):
        path = change["header"]["file"]["path"]
        if not is_test(path):
            removed = (change.get("plus_file") or {}).get("path") == "/dev/null"
            fix[path] = None if removed else change["new_file_content"]
    return fix


def is_test(path: str) -> bool:
    """As R2E-Gym draws the line (``commit_models/diff_classes.py``)."""
    parts = path.split("/")
    named = parts[-1].startswith("test_") or path.startswith("test_") or path.endswith("_test.py")
    return named or bool({"tests", "Tests", "test", "Test"} & set(parts))


def _json(row: Mapping[str, Json], name: str) -> dict[str, Any]:
    try:
        value = json.loads(text(row, name))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{_where(row)}: {name} is no JSON object")
    return value


def _where(row: Mapping[str, Json]) -> str:
    return f"R2E-Gym row of {row.get('docker_image', 'an unnamed image')!r}"


def sample(row: Mapping[str, Json]) -> dict[str, Any]:
    """A row as a sample."""
    statement = text(row, "problem_statement")
    issue = ISSUE.search(statement)
    problem = (issue.group(1) if issue else statement).strip()
    prompt = PROMPT.format(repo=text(row, "repo_name"), workdir=WORKDIR, problem=problem)
    return {
        "name": "r2e_gym",
        "prompt": [{"role": "user", "content": prompt}],
        "sandbox": {"image": text(row, "docker_image"), "workdir": WORKDIR, "env": {"PATH": PATH}},
        "metadata": dict(row),
    }


r2e_gym_samples = partial(samples, sample)
