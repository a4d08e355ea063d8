"""Repair tasks in a real sandbox: a small repository, its hidden tests, and what agents do to both."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.ports import AgentResult, Failure, Sandbox, TaskResult
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.base import open_sandbox
from uniagent.tasks.check import check_sample
from uniagent.tasks.config import ENDPOINT
from uniagent.tasks.swe import parsers
from uniagent.tasks.swe.benchmarks import swe_bench_samples

LIMIT_S = 30
# runs `check NAME COMMAND` lines; its log is one that parse() below reads
RUNNER = """check() { if "${@:2}" > /dev/null 2>&1; then echo "PASSED $1"; else echo "FAILED $1"; FAILED=1; fi; }
. ./tests/tests.sh
exit ${FAILED:-0}
"""
TESTS = "check adds test $(bash add.sh 1 2) = 3\n"
HIDDEN = "check adds test $(bash add.sh 1 2) = 3\ncheck many test $(bash add.sh 1 2 3) = 6\n"
BROKEN = "echo $(($1 + $2))\n"
FIXED = "sum=0; for n; do sum=$((sum + n)); done; echo $sum\n"


def diff(path: str, old: str, new: str) -> str:
    """A whole-file patch."""
    before, after = old.splitlines(), new.splitlines()
    lines = [
        f"diff --git a/{path} b/{path}",
        f"--- a/{path}",
        f"+++ b/{path}",
        f"@@ -1,{len(before)} +1,{len(after)} @@",
    ]
    return "\n".join([*lines, *(f"-{line}" for line in before), *(f"+{line}" for line in after)]) + "\n"


ROW = {
    "instance_id": "owner__adder-1",
    "repo": "owner/adder",
    "base_commit": "c0ffee",
    "patch": diff("add.sh", BROKEN, FIXED),
    "test_patch": diff("tests/tests.sh", TESTS, HIDDEN),
    "problem_statement": "add.sh adds two numbers only.",
    "created_at": "2020-01-01T00:00:00Z",
    "version": "1",
    "FAIL_TO_PASS": json.dumps(["many"]),
    "PASS_TO_PASS": json.dumps(["adds"]),
    "log_parser": "parse_log_lines",
    "eval_type": "pass_and_fail",
}


def eval_script(row: Mapping[str, Any]) -> str:
    """In the form of the public data."""
    return "\n".join(
        [
            "#!/bin/bash",
            "set -uxo pipefail",
            "cd /testbed",
            f"git checkout {row['base_commit']} tests/tests.sh",
            f"git apply --verbose - <<'EOF_114329324912'\n{row['test_patch']}EOF_114329324912",
            ": '>>>>> Start Test Output'",
            "bash run.sh",
            ": '>>>>> End Test Output'",
            f"git checkout {row['base_commit']} tests/tests.sh",
        ]
    )


def lines(log: str) -> dict[str, str]:
    words = (line.split() for line in log.splitlines())
    return {w[1]: w[0] for w in words if len(w) == 2 and w[0] in ("PASSED", "FAILED")}


@pytest.fixture(autouse=True)
def _parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "find", lambda name, **_: lines)


@pytest.fixture
def sample(tmp_path: Path) -> dict[str, Any]:
    """A sample of swe_bench, from a file of rows, whose repository comes from an archive."""
    folder = tmp_path / "adder"
    (folder / "tests").mkdir(parents=True)
    (folder / "add.sh").write_text(BROKEN)
    (folder / "run.sh").write_text(RUNNER)
    (folder / "tests/tests.sh").write_text(TESTS)
    archive = tmp_path / "adder.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, ".")
    row = {**ROW, "eval_script": eval_script(ROW), "archive": str(archive)}
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = swe_bench_samples("test", 0, path=str(tmp_path), image="")
    return found


class Providers:
    """One local provider."""

    def __init__(self, provider: LocalProvider) -> None:
        self.provider = provider

    def sandbox(self, name: str) -> Any:
        return self.provider

    def sandbox_options(self, name: str) -> dict[str, Any]:
        return {}


TASK = {"name": "swe_bench", "sandbox": {"workdir": "/testbed"}, "verifier": {"timeout_s": 60, "guard": False}}
GUARDED = {**TASK, "verifier": {"timeout_s": 60}}
Act = Callable[[Sandbox], Awaitable[None]]


async def play(sample: dict[str, Any], act: Act | str, **verifier: Any) -> TaskResult:
    """The verdict on what ``act`` (or bash) left behind."""
    async with LocalProvider({"warm": 0}) as provider:
        providers = Providers(provider)
        resolver = TaskConfigResolver([{**TASK, "verifier": {**TASK["verifier"], **verifier}}])  # type: ignore[dict-item]
        config = resolver.resolve(sample, dict.fromkeys(ENDPOINT, "x"))
        task: Any = config.build(providers)
        async with open_sandbox(config, providers) as sandbox:
            await task.setup(sandbox)
            if isinstance(act, str):
                done = await (await sandbox.shell()).run(act, timeout_s=LIMIT_S)
                assert done.code == 0, done.output
            else:
                await act(sandbox)
            return await task.verify(sandbox, AgentResult(True))


FIX = f"cat > add.sh <<'END'\n{FIXED}END\n"


@pytest.mark.usefixtures("confined")
@pytest.mark.slow
async def test_the_oracle_earns_1_nothing_and_tricks_0_and_the_verifier_is_steady(sample: dict[str, Any]) -> None:
    async with LocalProvider({"warm": 0}) as provider:
        providers = Providers(provider)
        config = TaskConfigResolver([GUARDED]).resolve(sample, dict.fromkeys(ENDPOINT, "x"))
        checked = await check_sample(0, sample, config, providers, runs=2)
    assert checked.problems == ()
    assert checked.rewards == {"nothing": 0.0, "oracle": 1.0, "empty_tests": 0.0, "forged_results": 0.0}


@pytest.mark.usefixtures("confined")
async def test_the_agent_begins_in_the_repository_and_sees_no_hidden_test(sample: dict[str, Any]) -> None:
    await play(sample, "test $PWD = /testbed && test $(git rev-list --all --count) = 1 && ! grep -rq many . ")


@pytest.mark.usefixtures("confined")
async def test_a_fix_counts_whatever_happened_to_the_tests(sample: dict[str, Any]) -> None:
    result = await play(sample, guard=True, act=FIX + "echo 'check many false' > tests/tests.sh")
    assert (result.reward, result.outcome, result.details["status"]) == (1.0, True, "RESOLVED_FULL")
    assert result.metrics["fail_to_pass"] == 1.0


@pytest.mark.usefixtures("confined")
async def test_a_fix_that_breaks_something_is_no_fix(sample: dict[str, Any]) -> None:
    result = await play(sample, "echo 'echo $(($# * 2))' > add.sh")  # right for 1 2 3 alone
    assert (result.reward, result.outcome) == (0.0, False)
    assert result.details["broken"] == ["adds"]
    assert result.metrics["fail_to_pass"] == 1.0


@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize(
    ("harm", "flag"),
    [
        ("echo 'exit 7' > run.sh", "tests_did_not_run"),
        ("echo 'sleep 1000' > add.sh", "tests_timed_out"),
        ("rm -rf .git; echo > tests/tests.sh", "repository_broken"),
        ("echo 'echo PASSED many; echo PASSED adds; exit 1' > run.sh", "tests_did_not_run"),
    ],
)
async def test_the_agents_own_damage_is_reward_0(sample: dict[str, Any], harm: str, flag: str) -> None:
    result = await play(sample, harm, tests_timeout_s=1.0)
    assert (result.reward, result.outcome, result.failure) == (0.0, False, None)
    assert flag in result.flags


@pytest.mark.usefixtures("confined")
async def test_a_test_patch_that_does_not_fit_is_infrastructure(sample: dict[str, Any]) -> None:
    row = sample["metadata"]
    bad = {**row, "test_patch": row["test_patch"].replace("= 3", "= 4")}
    result = await run_episode_of({**sample, "metadata": {**bad, "eval_script": eval_script(bad)}})
    assert result.failure is Failure.INFRA
    assert "does not apply" in result.details["error"]


@pytest.mark.usefixtures("confined")
async def test_a_sandbox_without_the_repository_is_infrastructure(sample: dict[str, Any]) -> None:
    row = {key: value for key, value in sample["metadata"].items() if key != "archive"}
    result = await run_episode_of({**sample, "metadata": row})
    assert result.failure is Failure.INFRA
    assert "instance owner__adder-1: there is no git repository in /testbed" in result.details["error"]


class Idle:
    """An agent that ends at once."""

    def __init__(self, config: Any) -> None:
        pass

    async def run(self, prompt: Any, sandbox: Any, model: Any) -> AgentResult:
        return AgentResult(True)


async def run_episode_of(sample: dict[str, Any]) -> TaskResult:
    from uniagent.engine.ports import ModelEndpoint

    async with LocalProvider({"warm": 0}) as provider:
        task = {**TASK, "agent": {"name": f"{__name__}:Idle"}}
        config = TaskConfigResolver([task]).resolve(sample, dict.fromkeys(ENDPOINT, "x"))
        return await config.build(Providers(provider)).run(ModelEndpoint("", "", ""))
