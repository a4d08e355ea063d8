"""R2E-Gym in a real sandbox: tests that lie in the image until the agent comes, and an expected output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.errors import InfraError
from uniagent.engine.ports import AgentResult, TaskResult
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.base import open_sandbox
from uniagent.tasks.check import check_sample
from uniagent.tasks.config import ENDPOINT
from uniagent.tasks.swe import r2e_gym

RUNNER = """if [ "$(cat lib.txt)" = fixed ]; then NEW=PASSED; else NEW=FAILED; fi
echo '=== short test summary info ==='
echo "$NEW $(ls r2e_tests)::test_new - said so"
echo "FAILED r2e_tests/test_1.py::test_known_to_fail - assert 0"
"""
ROW = {
    "repo_name": "numpy",
    "docker_image": "namanjain12/numpy_final:abc",
    "commit_hash": "abc",
    "problem_statement": "[ISSUE]lib.txt should say fixed[/ISSUE]",
    "expected_output_json": json.dumps({"test_new": "PASSED", "test_known_to_fail": "FAILED"}),
    "parsed_commit_content": json.dumps(
        {"file_diffs": [{"header": {"file": {"path": "lib.txt"}}, "new_file_content": "fixed\n", "plus_file": None}]}
    ),
}
IMAGE = {"lib.txt": "broken\n", "run_tests.sh": RUNNER, "r2e_tests/test_1.py": "hidden\n"}


class Providers:
    def __init__(self, provider: LocalProvider) -> None:
        self.provider = provider

    def sandbox(self, name: str) -> Any:
        return self.provider

    def sandbox_options(self, name: str) -> dict[str, Any]:
        return {"workdir": "/testbed"}


TASK = {"name": "r2e_gym", "sandbox": {"files": IMAGE}, "verifier": {"timeout_s": 60, "guard": False}}
SAMPLE = {key: value for key, value in r2e_gym.sample(ROW).items() if key != "sandbox"}


async def play(command: str, image: dict[str, str] = IMAGE, **verifier: Any) -> TaskResult:
    async with LocalProvider({"warm": 0}) as provider:
        providers = Providers(provider)
        task = {**TASK, "verifier": {"timeout_s": 60, "guard": False, **verifier}, "sandbox": {"files": image}}
        config = TaskConfigResolver([task]).resolve(SAMPLE, dict.fromkeys(ENDPOINT, "x"))
        built: Any = config.build(providers)
        async with open_sandbox(config, providers) as sandbox:
            await built.setup(sandbox)
            done = await (await sandbox.shell()).run(command, timeout_s=30)
            assert done.code == 0, done.output
            return await built.verify(sandbox, AgentResult(True))


@pytest.mark.usefixtures("confined")
async def test_oracle_nothing_and_forger() -> None:
    async with LocalProvider({"warm": 0}) as provider:
        providers = Providers(provider)
        config = TaskConfigResolver([TASK]).resolve(SAMPLE, dict.fromkeys(ENDPOINT, "x"))
        checked = await check_sample(0, SAMPLE, config, providers, runs=2)
    assert checked.problems == ()
    assert checked.rewards == {"nothing": 0.0, "oracle": 1.0, "forged_results": 0.0}


@pytest.mark.usefixtures("confined")
async def test_the_tests_are_not_in_the_sandbox_while_the_agent_is() -> None:
    result = await play("test ! -e r2e_tests && test ! -e run_tests.sh && ! grep -rq hidden /testbed /tmp")
    assert result.details["not_as_expected"] == ["test_new"]


@pytest.mark.usefixtures("confined")
async def test_more_tests_than_expected_are_no_success() -> None:
    more = RUNNER + "echo 'PASSED r2e_tests/test_1.py::test_more'\n"
    result = await play("echo fixed > lib.txt", {**IMAGE, "run_tests.sh": more})
    assert (result.reward, result.details["not_as_expected"]) == (0.0, ["test_more"])


@pytest.mark.usefixtures("confined")
async def test_a_run_without_a_summary_is_the_codes_fault_and_without_a_runner_infrastructure() -> None:
    result = await play("true", {**IMAGE, "run_tests.sh": "echo ImportError; exit 1"})
    assert (result.reward, result.failure, result.flags) == (0.0, None, ("tests_did_not_run",))
    with pytest.raises(InfraError, match="did not run"):
        await play("true", {**IMAGE, "run_tests.sh": "/nosuch/python -m pytest"})
    with pytest.raises(InfraError, match=r"cannot read r2e_tests, run_tests.sh|no image of R2E-Gym"):
        await play("true", {"lib.txt": "x"})
