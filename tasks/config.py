"""Task Config: what one sample is, merged from two layers and checked.

The run's Task Config file gives named defaults; a sample row is laid on top: tables are merged key by key, lists
and single values replaced. The live endpoint comes last, from the caller, and neither layer may set it. Shape
is checked here, names of parts (a sandbox provider, an agent, a tool) when the part is built. Knows no part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen
from attrs.validators import ge, gt, le, optional

from uniagent.engine.errors import UserError, nearest
from uniagent.engine.ports import Json, Providers, SessionSampling, Task
from uniagent.engine.registry import load
from uniagent.engine.shaping import Shaping
from uniagent.tasks.structure import structure
from uniagent.tasks.task_file import read_tasks

ENDPOINT = ("base_url", "api_key", "model_name")


@frozen
class PromptMessage:
    """A chat message the agent starts from."""

    role: str
    content: Json  # a text, or parts as the chat API has them


@frozen
class SandboxConfig:
    """Which provider, which image; other keys are the provider's own."""

    __rest__ = "options"
    provider: str = "local"
    image: str | None = None
    options: Mapping[str, Json] = field(factory=dict)

    def as_json(self) -> dict[str, Json]:
        """What the provider opens a sandbox from: all but its name."""
        return {**self.options, **({} if self.image is None else {"image": self.image})}


@frozen
class ToolConfig:
    """A tool by its registry name; other keys are the tool's own."""

    __rest__ = "options"
    name: str
    options: Mapping[str, Json] = field(factory=dict)


@frozen
class ModelConfig:
    """How every generation is sampled, and the endpoint, which only the caller of ``resolve`` sets."""

    temperature: float = field(default=1.0, validator=ge(0))
    top_p: float = field(default=1.0, validator=[gt(0), le(1)])
    top_k: int = field(default=0, validator=ge(0))  # 0: off
    max_tokens: int = field(default=1024, validator=ge(1))  # of one generation
    max_total_tokens: int | None = field(default=None, validator=optional(ge(1)))  # prompt + generation of a request
    base_url: str = field(default="", metadata={"key": False})
    api_key: str = field(default="", repr=False, metadata={"key": False})
    model_name: str = field(default="", metadata={"key": False})


@frozen
class AgentConfig:
    """Who solves the task. ``max_steps`` bounds its generations, ``timeout_s`` its wall clock; ``options`` are the
    agent's own."""

    name: str = "react"
    tools: tuple[ToolConfig, ...] = ()
    max_steps: int | None = field(default=None, validator=optional(ge(1)))
    timeout_s: float | None = field(default=None, validator=optional(gt(0)))
    model: ModelConfig = ModelConfig()
    options: Mapping[str, Json] = field(factory=dict)


@frozen
class VerifierConfig:
    """How success is measured; other keys are the task's own."""

    __rest__ = "options"
    timeout_s: float = field(default=600.0, validator=gt(0))
    options: Mapping[str, Json] = field(factory=dict)


@frozen
class RewardConfig:
    """``weights`` of the verifier's components, by name, make the reward (none: the verifier's own); ``shaping`` is
    added for how the session went."""

    weights: Mapping[str, float] = field(factory=dict)
    shaping: Shaping = field(factory=Shaping)

    @weights.validator
    def _numbers(self, attribute: Any, value: Mapping[str, Any]) -> None:
        for name, weight in value.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise TypeError(f"the weight of {name!r} is {weight!r}, expected a number")


@frozen
class TaskConfig:
    """One sample, merged and checked. ``task`` names the implementation where it is not the route's name."""

    name: str
    task: str | None = None
    prompt: tuple[PromptMessage, ...] = ()
    metadata: Mapping[str, Json] = field(factory=dict)
    sandbox: SandboxConfig = SandboxConfig()
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    reward: RewardConfig = RewardConfig()
    merged: Mapping[str, Json] = field(factory=dict, repr=False, eq=False, metadata={"key": False})

    @property
    def sampling(self) -> SessionSampling:
        model = self.agent.model
        return SessionSampling(
            temperature=model.temperature,
            top_p=model.top_p,
            top_k=model.top_k,
            max_tokens=model.max_tokens,
            max_total_tokens=model.max_total_tokens,
            max_generations=self.agent.max_steps,
        )

    @property
    def shaping(self) -> Shaping:
        return self.reward.shaping

    @property
    def messages(self) -> list[dict[str, Json]]:
        """The prompt as chat messages."""
        return [{"role": m.role, "content": m.content} for m in self.prompt]

    def as_json(self) -> dict[str, Json]:
        """The two layers merged, as they were written; without the endpoint."""
        return copy.deepcopy(dict(self.merged))

    def build(self, providers: Providers) -> Task:
        """The task behind the name; raises UserError when the registry has none."""
        task: Task = load("tasks", self.task or self.name)(self, providers)
        return task


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``base``: tables recursively, everything else replaced. Neither is changed."""
    both = dict(base)
    for key, value in over.items():
        below = both.get(key)
        both[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return both


class TaskConfigResolver:
    """Routes sample rows to the named tasks of one Task Config, for evaluation and training alike."""

    def __init__(self, tasks: Iterable[Mapping[str, Json]], *, where: str = "Task Config") -> None:
        """Raises UserError for a task without a name, a name given twice, or a bad shape."""
        self.where = where
        self.tasks: dict[str, Mapping[str, Json]] = {}
        for number, task in enumerate(tasks):
            place = f"{where}: task {number + 1}"
            name = task.get("name")
            if not isinstance(name, str) or not name:
                raise UserError(f'{place} has no name; every task needs one, such as name = "shell_quest"')
            if name in self.tasks:
                raise UserError(f"{where}: the name {name!r} is given twice; the tasks are: {', '.join(self.tasks)}")
            checked(task, f"{where}: task {name!r}")
            self.tasks[name] = task
        if not self.tasks:
            raise UserError(f"{where} defines no task")

    @classmethod
    def from_file(cls, path: str | Path) -> TaskConfigResolver:
        """From TOML or YAML: a list of named tasks, or a single one."""
        return cls(read_tasks(Path(path)), where=str(path))

    def resolve(
        self, sample_config: Mapping[str, Json], runtime_model: Mapping[str, str], *, where: str = "sample"
    ) -> TaskConfig:
        """The sample on top of its task's defaults, with the live endpoint; UserError names what is wrong."""
        name = sample_config.get("name")
        if name is None:
            raise UserError(f"{where} names no task; {self.where} defines: {', '.join(self.tasks)}")
        if name not in self.tasks:
            raise UserError(f"{where}: there is no task {name!r} in {self.where}: {nearest(str(name), self.tasks)}")
        if set(runtime_model) != set(ENDPOINT):
            raise UserError(f"runtime_model has the keys {sorted(runtime_model)}, it needs exactly {sorted(ENDPOINT)}")
        _refuse_endpoint(sample_config, where)
        merged = merge(self.tasks[name], sample_config)
        config = evolve(checked(merged, f"{where}, merged with task {name!r} of {self.where}"), merged=merged)
        live = evolve(config.agent.model, **{key: runtime_model[key] for key in ENDPOINT})  # type: ignore[arg-type]
        return evolve(config, agent=evolve(config.agent, model=live))


def checked(layer: Mapping[str, Json], where: str) -> TaskConfig:
    """The shape of one layer, or of both merged; raises UserError that begins with ``where``."""
    _refuse_endpoint(layer, where)
    return structure(TaskConfig, layer, where)


def _refuse_endpoint(layer: Mapping[str, Json], where: str) -> None:
    agent = layer.get("agent")
    model = agent.get("model") if isinstance(agent, Mapping) else None
    for key in ENDPOINT:
        if isinstance(model, Mapping) and key in model:
            raise UserError(
                f"{where}: agent.model.{key} cannot be set: the endpoint is that of the policy being run; "
                "remove the key"
            )
