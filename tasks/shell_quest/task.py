"""shell_quest: a file job in a directory, judged by the directory's final state and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import PurePosixPath

from attrs import field, frozen
from attrs.validators import deep_mapping, instance_of

from uniagent.engine.errors import UserError
from uniagent.engine.ports import AgentResult, ModelEndpoint, Providers, Sandbox, TaskResult
from uniagent.tasks.base import run_episode
from uniagent.tasks.check import Attempt
from uniagent.tasks.config import TaskConfig
from uniagent.tasks.shell_quest.players import MISTAKES, Player, Turn, right
from uniagent.tasks.structure import structure
from uniagent.tasks.verify import tree_differences

_texts = deep_mapping(instance_of(str), instance_of(str))


@frozen
class Quest:
    """The metadata of a sample: the files before the job, and after it."""

    family: str
    files: Mapping[str, str] = field(validator=_texts)
    expected: Mapping[str, str] = field(validator=_texts)
    job: Mapping[str, str] = field(factory=dict, validator=_texts)  # what the prompt was made from, for players


class ShellQuest:
    """Reward 1 when every path and content is as expected (``answer.txt`` without white space around it), else 0."""

    def __init__(self, config: TaskConfig, providers: Providers) -> None:
        if not config.prompt:
            raise UserError(f"task {config.name!r}: the sample has no prompt")
        self.config, self.providers = config, providers
        self.quest = structure(Quest, config.metadata, f"task {config.name!r}: metadata")

    async def run(self, model: ModelEndpoint) -> TaskResult:
        return await run_episode(self.config, self.providers, model, setup=self.setup, verify=self.verify)

    async def setup(self, sandbox: Sandbox) -> None:
        for path, text in self.quest.files.items():
            await sandbox.write(sandbox.workdir / path, text.encode())

    def attempts(self) -> Mapping[str, Attempt]:
        """The scripted players that ``uniagent tasks check`` tries."""
        return {name: partial(self._played, player) for name, player in {"oracle": right, **MISTAKES}.items()}

    async def _played(self, player: Player, sandbox: Sandbox) -> AgentResult:
        shell = await sandbox.shell()
        seen: tuple[str, ...] = ()
        for number in range(4):
            command = player(Turn(self.quest.family, **self.quest.job, number=number, seen=seen))
            if command is None:
                break
            seen = tuple((await shell.run(command, timeout_s=10)).output.decode(errors="replace").splitlines())
        return AgentResult(finished=True)

    async def verify(self, sandbox: Sandbox, acted: AgentResult) -> TaskResult:
        found: Mapping[PurePosixPath, bytes] = await sandbox.files(sandbox.workdir)
        differences = tree_differences(found, self.quest.expected, trimmed=("answer.txt",))
        success = not differences
        return TaskResult(
            float(success),
            outcome=success,
            metrics={f"success/{self.quest.family}": float(success)},
            details={"family": self.quest.family, "differences": differences},
        )
