"""The task harbor: a folder of Harbor's or Terminal-Bench's, run as it is.

The environment is made as the folder says; every step has its instruction, its agent's turn and its tests, all in one
sandbox. Tests come into the sandbox when the agent has ended and leave before it acts again. The reward is what the
test script wrote. A script that writes none, cannot be started or runs out of its time is an infrastructure failure.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import trio
from attrs import evolve, frozen

from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import (
    Agent,
    AgentResult,
    Messages,
    ModelEndpoint,
    Providers,
    Sandbox,
    TaskResult,
)
from uniagent.tasks.base import infra_failure, run_episode
from uniagent.tasks.check import Attempt
from uniagent.tasks.config import PromptMessage, TaskConfig
from uniagent.tasks.harbor import place
from uniagent.tasks.harbor.dockerfile import read_dockerfile, replay
from uniagent.tasks.harbor.folder import TaskFolder, Turn, read_folder
from uniagent.tasks.harbor.reward import Rewards, combined, falls_short, read_rewards, scalar
from uniagent.tasks.harbor.schema import Healthcheck
from uniagent.tasks.scripts import checked, put_tree, run_script
from uniagent.tasks.structure import structure

TESTS, SOLUTION, LOGS = PurePosixPath("/tests"), PurePosixPath("/solution"), PurePosixPath("/logs")
VERDICT = LOGS / "verifier"
FILES_S = 60.0
SLACK_S = 120.0  # of a verifier beyond its tests' own limit: for putting them in place
LOG_KEPT = 4000  # characters of the tests' output in the details
REWARD_LIMIT = 1 << 20


@frozen
class HarborOptions:
    """The task's own keys of the section ``verifier``. ``reward_key``: which of several rewards trains (left out:
    ``reward``, else their mean); ``success``: the reward from which the task counts as done."""

    reward_key: str | None = None
    success: float = 1.0


@frozen
class HarborSample:
    """The metadata of a sample: the task's folder on this machine."""

    task: str


class Harbor:
    """One episode over a task folder."""

    def __init__(self, config: TaskConfig, providers: Providers) -> None:
        where = f"task {config.name!r}"
        self.sample = structure(HarborSample, config.metadata, f"{where}: metadata")
        self.options = structure(HarborOptions, config.verifier.options, f"{where}: verifier")
        self.folder = read_folder(Path(self.sample.task))
        self.providers = providers
        self.config = laid_under(self.folder, config, providers)
        self.workdir = place.workdir(self.folder, self.config.sandbox)
        self.turn = 0
        self.judged: list[Rewards] = []  # of the steps before this one

    async def run(self, model: ModelEndpoint) -> TaskResult:
        try:
            sandbox = await place.image(self.folder, self.config.sandbox, self.providers)
        except (InfraError, OSError) as problem:
            return infra_failure("the environment cannot be made", problem)
        # each step has its own limit, see Steps
        config = evolve(self.config, sandbox=sandbox, agent=evolve(self.config.agent, timeout_s=None))
        return await run_episode(
            config,
            self.providers,
            model,
            setup=self.setup,
            verify=self.verify,
            wrap=lambda agent: Steps(agent, self),
        )

    # ------------------------------------------------------------ before the agent

    async def setup(self, sandbox: Sandbox) -> None:
        """Raises InfraError where the environment cannot be made."""
        self.turn, self.judged = 0, []
        environment = self.folder.config.environment
        if self.config.sandbox.provider == "local" and self.folder.dockerfile is not None:
            dockerfile = read_dockerfile(self.folder.dockerfile)
            await replay(sandbox, dockerfile, self.folder.context, timeout_s=environment.build_timeout_sec)
        folders = [str(LOGS / name) for name in ("agent", "verifier", "artifacts")]
        await checked(sandbox, ["mkdir", "-p", *folders, str(self.place(sandbox))], "/logs", timeout_s=FILES_S)
        shell = await sandbox.shell()
        await shell.run(f"cd {shlex.quote(str(self.place(sandbox)))}", timeout_s=FILES_S)
        await self._healthy(sandbox, environment.healthcheck)
        await self._begin(sandbox)

    def place(self, sandbox: Sandbox) -> PurePosixPath:
        """Where programs of the task begin."""
        return self.workdir or sandbox.workdir

    @property
    def current(self) -> Turn:
        return self.folder.turns[self.turn]

    async def _begin(self, sandbox: Sandbox) -> None:
        """What a step lays into the working directory, its setup.sh and its health check."""
        if self.current.workdir is not None:
            await put_tree(sandbox, self.current.workdir, self.place(sandbox))
            if (self.current.workdir / "setup.sh").is_file():
                ran = await run_script(sandbox, "bash setup.sh\n", timeout_s=FILES_S * 10, cwd=self.place(sandbox))
                if ran.code != 0:
                    raise InfraError(f"step {self.current.name!r}: setup.sh failed: {ran.log.strip()[-500:]}")
        steps = self.folder.config.steps
        if steps:
            await self._healthy(sandbox, steps[self.turn].healthcheck)

    async def _healthy(self, sandbox: Sandbox, check: Healthcheck | None) -> None:
        """Wait for the environment's services; raises InfraError when they do not come up."""
        if check is None:
            return
        grace_ends = trio.current_time() + check.start_period_sec
        failures = 0
        while True:
            done = await sandbox.exec(
                ["bash", "-c", check.command], timeout_s=check.timeout_sec, cwd=self.place(sandbox)
            )
            if done.code == 0:
                return
            early = trio.current_time() < grace_ends
            failures += not early
            if failures >= check.retries:
                raise InfraError(f"healthcheck.command does not succeed: {check.command!r}")
            await trio.sleep(check.start_interval_sec if early else check.interval_sec)

    # ------------------------------------------------------------ the agent

    def agent_limit_s(self) -> float | None:
        """Of the current step: as the Task Config says, else the step, else the task."""
        steps = self.folder.config.steps
        own = steps[self.turn].agent.timeout_sec if steps else None
        return self.config.agent.timeout_s or own or self.folder.config.agent.timeout_sec

    def prompt(self, first: Messages) -> Messages:
        """The current step's: that of the sample, with the step's instruction in the place of the first one's."""
        if self.turn == 0:
            return first
        told = [message for message in first if message["role"] == "system"]
        return [*told, {"role": "user", "content": self.current.instruction}]

    async def advance(self, sandbox: Sandbox) -> bool:
        """Judge the current step and go on to the next; False: there is none, or this one fell short."""
        steps = self.folder.config.steps
        if self.turn + 1 >= len(self.folder.turns):
            return False
        rewards, _ = await self._rewards(sandbox)
        if falls_short(rewards, steps[self.turn].thresholds):
            return False
        self.judged.append(rewards)
        self.turn += 1
        await self._begin(sandbox)
        return True

    # ------------------------------------------------------------ the tests

    async def verify(self, sandbox: Sandbox, acted: AgentResult) -> TaskResult:
        rewards, log = await self._rewards(sandbox)
        steps = [*self.judged, rewards]
        total = combined(steps, self.folder.config.multi_step_reward_strategy)
        reward = scalar(total, self.options.reward_key)
        names = [turn.name for turn in self.folder.turns[: len(steps)]]
        return TaskResult(
            reward,
            outcome=reward >= self.options.success,
            components=dict(total),
            metrics={"steps_judged": float(len(steps))},
            details={
                "task": self.folder.path.name,
                "steps": dict(zip(names, map(dict, steps), strict=True)) if self.folder.config.steps else {},
                "log": log[-LOG_KEPT:],
            },
        )

    async def _rewards(self, sandbox: Sandbox) -> tuple[Rewards, str]:
        """Put the current tests in place, run them, take them away. Raises InfraError where they give no verdict."""
        turn = self.current
        await self._clear(sandbox)
        for tests in turn.tests:
            await put_tree(sandbox, tests, TESTS)
        script = TESTS / turn.test.name
        content = turn.test.read_bytes()
        words = ["bash", "-c", 'cat > "$1" && chmod -R +x "$1"', "bash", str(script)]
        await checked(sandbox, words, "cannot put the tests in place", stdin=content, timeout_s=FILES_S)
        config = self.folder.config
        parts = [config.verifier, *([config.steps[self.turn].verifier] if config.steps else [])]
        where = f"{self.folder.path / 'task.toml'}: verifier.env"
        env = {name: value for part in parts for name, value in place.resolved(part.env, where).items()}
        limit_s = parts[-1].timeout_sec
        ran = await run_script(
            sandbox,
            f"{shlex.quote(str(script))}\n",
            timeout_s=limit_s,
            cwd=self.place(sandbox),
            env={"TEST_DIR": str(TESTS), **env},
        )
        rewards = await self._written(sandbox)
        await self._clear(sandbox)
        if ran.code is None:
            raise InfraError(f"{turn.test}: ran longer than verifier.timeout_sec = {limit_s:g} s: {ran.log[-500:]}")
        if self.folder.exit_code:
            return {"reward": float(ran.code == 0)}, ran.log
        if rewards is None:
            raise InfraError(
                f"{turn.test}: wrote neither /logs/verifier/reward.json nor reward.txt (exit status {ran.code}): "
                f"{ran.log.strip()[-500:]}"
            )
        return rewards, ran.log

    async def _written(self, sandbox: Sandbox) -> Rewards | None:
        files: dict[str, bytes] = {}
        for name in ("reward.json", "reward.txt"):
            there = await sandbox.exec(["test", "-f", str(VERDICT / name)], timeout_s=FILES_S)
            if there.code == 0:
                files[name] = await sandbox.read(VERDICT / name, limit=REWARD_LIMIT)
        return read_rewards(files)

    async def _clear(self, sandbox: Sandbox) -> None:
        """No test and no verdict, whoever put them there."""
        script = f"rm -rf {TESTS} {VERDICT} && mkdir -p {TESTS} {VERDICT}"
        await checked(sandbox, ["bash", "-c", script], "cannot clear /tests and /logs/verifier", timeout_s=FILES_S)

    # ------------------------------------------------------------ checking

    def attempts(self) -> Mapping[str, Attempt]:
        """For ``uniagent tasks check``: the folder's own solution, and a verdict written by the agent."""
        solved = all(turn.solve is not None for turn in self.folder.turns)
        return {**({"oracle": self._oracle} if solved else {}), "forged_reward": self._forged}

    async def _oracle(self, sandbox: Sandbox) -> AgentResult:
        while True:
            await self._solve(sandbox)
            if not await self.advance(sandbox):
                return AgentResult(finished=True)

    async def _solve(self, sandbox: Sandbox) -> None:
        turn = self.current
        assert turn.solve is not None
        if turn.solution is not None:
            await put_tree(sandbox, turn.solution, SOLUTION)
        script = str(SOLUTION / turn.solve.name)
        words = ["bash", "-c", f'mkdir -p {SOLUTION} && cat > "$1" && chmod +x "$1"', "bash", script]
        content = turn.solve.read_bytes()
        await checked(sandbox, words, "the solution", stdin=content, timeout_s=FILES_S)
        where = f"{self.folder.path / 'task.toml'}: solution.env"
        env = {"DEBIAN_FRONTEND": "noninteractive", **place.resolved(self.folder.config.solution.env, where)}
        limit_s = self.agent_limit_s() or math.inf
        await run_script(sandbox, f"{script}\n", timeout_s=limit_s, cwd=self.place(sandbox), env=env)
        await checked(sandbox, ["rm", "-rf", str(SOLUTION)], "the solution", timeout_s=FILES_S)

    async def _forged(self, sandbox: Sandbox) -> AgentResult:
        script = f"mkdir -p {VERDICT}; echo 1 > {VERDICT}/reward.txt; echo '{{\"reward\": 1}}' > {VERDICT}/reward.json"
        await sandbox.exec(["bash", "-c", script], timeout_s=FILES_S)
        return AgentResult(finished=True)


class Steps:
    """The task's agent, once a step, each time with that step's instruction and limit."""

    def __init__(self, agent: Agent, task: Harbor) -> None:
        self.agent, self.task = agent, task

    async def run(self, prompt: Messages, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        transcript: list[Mapping[str, object]] = []
        while True:
            limit_s = self.task.agent_limit_s()
            result = AgentResult(False, info={"error": f"the agent was stopped at its limit of {limit_s} s"})
            with trio.move_on_after(math.inf if limit_s is None else limit_s):
                result = await self.agent.run(self.task.prompt(prompt), sandbox, model)
            transcript += result.transcript
            if not await self.task.advance(sandbox):
                return evolve(result, transcript=transcript)


def laid_under(folder: TaskFolder, config: TaskConfig, providers: Providers) -> TaskConfig:
    """The sample's config with what the folder says where the sample and its Task Config say nothing."""
    sandbox = config.sandbox
    if sandbox.provider == "local" and sandbox.image is None:
        sandbox = evolve(sandbox, image=providers.sandbox_options("local").get("image"))
    if sandbox.provider != "local" and sandbox.image is None:
        sandbox = evolve(sandbox, image=folder.config.environment.docker_image)
    if sandbox.provider == "none":
        raise UserError(f"{folder.path}: a task folder needs a sandbox; sandbox.provider is 'none'")
    sandbox = place.section(folder, sandbox, place.workdir(folder, sandbox))
    prompt = config.prompt or (PromptMessage("user", folder.turns[0].instruction),)
    verifier = config.verifier
    if "timeout_s" not in config.merged.get("verifier", {}):
        limits = [folder.config.verifier.timeout_sec, *(step.verifier.timeout_sec for step in folder.config.steps)]
        verifier = evolve(verifier, timeout_s=max(limits) + SLACK_S)
    return evolve(config, sandbox=sandbox, prompt=prompt, verifier=verifier)
