"""Harbor's task folders in a real sandbox: environment, agent, tests, verdict; steps; what goes wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import harbor_folders as folders

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.ports import AgentResult, Failure, ModelEndpoint, TaskResult
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.check import check_sample
from uniagent.tasks.config import ENDPOINT
from uniagent.tasks.harbor.data import sample

pytestmark = pytest.mark.usefixtures("confined")


class Types:
    """An agent that types into the sandbox's shell: the next of its commands at every step."""

    def __init__(self, config: Any) -> None:
        self.commands = list(config.options["commands"])

    async def run(self, prompt: Any, sandbox: Any, model: ModelEndpoint) -> AgentResult:
        said = [{"role": "user", "content": prompt[-1]["content"]}]
        done = await (await sandbox.shell()).run(self.commands.pop(0), timeout_s=20)
        return AgentResult(True, [*said, {"role": "assistant", "content": done.output.decode()}])


class Providers:
    def __init__(self, provider: LocalProvider) -> None:
        self.provider = provider

    def sandbox(self, name: str) -> Any:
        return self.provider

    def sandbox_options(self, name: str) -> dict[str, Any]:
        return {}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(folders.image(tmp_path_factory.mktemp("image")))


def resolved(task: Path, image: str, *commands: str, **verifier: Any) -> Any:
    layer = {
        "name": "harbor",
        "sandbox": {"image": image, "read_only": ["/usr"]},
        "agent": {"name": f"{__name__}:Types", "options": {"commands": list(commands)}},
        "verifier": verifier,
    }
    return TaskConfigResolver([layer]).resolve(sample(task), dict.fromkeys(ENDPOINT, "x"))


async def play(task: Path, image: str, *commands: str, **verifier: Any) -> TaskResult:
    async with LocalProvider({"warm": 0}) as provider:
        config = resolved(task, image, *commands, **verifier)
        return await config.build(Providers(provider)).run(ModelEndpoint("", "", ""))


async def check(task: Path, image: str) -> Any:
    async with LocalProvider({"warm": 0}) as provider:
        config = resolved(task, image)
        return await check_sample(0, {}, config, Providers(provider), runs=2)


async def test_oracle_nothing_and_forger(tmp_path: Path, image: str) -> None:
    found = await check(folders.single(tmp_path), image)
    assert found.problems == ()
    assert found.rewards == {"nothing": 0.0, "oracle": 1.0, "forged_reward": 0.0}


async def test_the_environment_is_made_as_the_dockerfile_says(tmp_path: Path, image: str) -> None:
    look = "echo $PWD $NAME $SECOND $PLACE; cat made.txt data/a.txt note.txt /opt/ready; ls -A /tests /logs/verifier"
    wanted = "/app world two words here world two words a note ready"
    toml = folders.TOML.replace('"hello"', f'"{wanted}"')
    command = f"({look}) | grep -v : | xargs > greeting.txt"
    result = await play(folders.single(tmp_path, task_toml=toml), image, command)
    assert result.reward == 1.0, result.details


async def test_an_episode_with_its_verdict(tmp_path: Path, image: str) -> None:
    result = await play(folders.single(tmp_path), image, "echo hello > greeting.txt")
    assert (result.reward, result.outcome, result.failure) == (1.0, True, None)
    assert result.components == {"reward": 1.0}


async def test_terminal_bench(tmp_path: Path, image: str) -> None:
    found = await check(folders.terminal_bench(tmp_path), image)
    assert found.problems == ()
    assert found.rewards == {"nothing": 0.0, "oracle": 1.0, "forged_reward": 0.0}


# ---------------------------------------------------------------- steps


async def test_steps_are_played_in_one_sandbox_each_with_its_tests(tmp_path: Path, image: str) -> None:
    hidden = "ls /tests | wc -l; touch "
    result = await play(folders.steps(tmp_path), image, hidden + "a", hidden + "b", hidden + "c")
    assert result.details["steps"] == {
        "first": {"reward": 1.0},
        "second": {"reward": 1.0, "words": 2.0},
        "third": {"reward": 1.0},
    }
    assert (result.reward, result.components) == (1.0, {"reward": 1.0, "words": pytest.approx(2 / 3)})


async def test_the_oracle_plays_every_step(tmp_path: Path, image: str) -> None:
    found = await check(folders.steps(tmp_path), image)
    assert found.problems == ()
    assert found.rewards["oracle"] == 1.0


async def test_a_step_that_falls_short_is_the_last(tmp_path: Path, image: str) -> None:
    result = await play(folders.steps(tmp_path), image, "touch a", "touch nothing", "touch c")
    assert list(result.details["steps"]) == ["first", "second", "third"]
    assert result.reward == pytest.approx(2 / 3), "words = 2 meets its own threshold"
    result = await play(folders.steps(tmp_path), image, "touch nothing", "touch b", "touch c")
    assert (result.details["steps"], result.reward) == ({"first": {"reward": 0.0}}, 0.0)


async def test_the_last_step_may_decide(tmp_path: Path, image: str) -> None:
    task = folders.steps(tmp_path, 'multi_step_reward_strategy = "final"\n')
    result = await play(task, image, "touch a", "touch nothing", "touch c")
    assert result.components == {"reward": 1.0}


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tests__test_sh": "#!/bin/bash\necho checked; exit 3\n"}, r"wrote neither .*exit status 3.*checked"),
        ({"tests__test_sh": "#!/bin/bash\necho x > /logs/verifier/reward.txt\n"}, "holds no number"),
        ({"tests__test_sh": "#!/bin/bash\nsleep 100\n", "task_toml": "[verifier]\ntimeout_sec = 0.5\n"},
         "ran longer than verifier.timeout_sec = 0.5 s"),
        ({"environment__Dockerfile": "FROM x\nRUN echo no network; exit 1\n"}, r"Dockerfile:2: RUN failed.*no network"),
        ({"task_toml": folders.TOML + 'healthcheck = { command = "false", retries = 1 }\n'}, "healthcheck.command"),
    ],
)  # fmt: skip
async def test_what_is_not_the_agents_fault_is_infrastructure(
    tmp_path: Path, image: str, changes: dict[str, str], said: str
) -> None:
    result = await play(folders.single(tmp_path, **changes), image, "true")
    assert result.failure is Failure.INFRA
    assert re.search(said, result.details["error"], re.DOTALL), result.details["error"]


async def test_an_agent_is_stopped_at_the_folders_limit_and_judged(tmp_path: Path, image: str) -> None:
    toml = folders.TOML.replace("timeout_sec = 20.0", "timeout_sec = 1.0")
    result = await play(folders.single(tmp_path, task_toml=toml), image, "echo hello > greeting.txt; sleep 15")
    assert (result.reward, result.failure) == (1.0, Failure.AGENT)
    assert "limit of 1.0 s" in result.details["error"]
