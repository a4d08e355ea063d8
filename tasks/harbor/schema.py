"""``task.toml`` of a Harbor task (schema 1.4, the package harbor's ``models/task/config.py``), and ``task.yaml`` of a
Terminal-Bench one, as attrs classes.

Invariants: every wrong value is an error that names the file and the key; what this version cannot do is an error too
and never passed over; unknown keys are kept in ``other`` and passed over, as Harbor does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli
import yaml
from attrs import field, fields, frozen, has
from attrs.validators import gt, in_, optional

from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json
from uniagent.tasks.structure import structure

NETWORKS = ("public", "no-network", "allowlist")
SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


@frozen
class Healthcheck:
    """A command that must succeed before the agent begins."""

    __rest__ = "other"
    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3
    other: Mapping[str, Json] = field(factory=dict)


@frozen
class Environment:
    """What the sandbox is. Sizes in MB; ``env`` may hold ``${VAR}`` and ``${VAR:-default}`` of this machine."""

    __rest__ = "other"
    network_mode: str = field(default="public", validator=in_(NETWORKS))
    allowed_hosts: tuple[str, ...] = ()
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = field(default=None, validator=optional(gt(0)))
    memory_mb: int | None = field(default=None, validator=optional(gt(0)))
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: Json = None
    mcp_servers: tuple[Mapping[str, Json], ...] = ()
    env: Mapping[str, str] = field(factory=dict)
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    other: Mapping[str, Json] = field(factory=dict)


@frozen
class AgentPart:
    """Limits of the agent."""

    __rest__ = "other"
    timeout_sec: float | None = field(default=None, validator=optional(gt(0)))
    user: Json = None
    network_mode: str | None = field(default=None, validator=optional(in_(NETWORKS)))
    allowed_hosts: tuple[str, ...] | None = None
    other: Mapping[str, Json] = field(factory=dict)


@frozen
class VerifierPart:
    """Limits of the tests, and their environment variables."""

    __rest__ = "other"
    timeout_sec: float = field(default=600.0, validator=gt(0))
    env: Mapping[str, str] = field(factory=dict)
    user: Json = None
    network_mode: str | None = field(default=None, validator=optional(in_(NETWORKS)))
    allowed_hosts: tuple[str, ...] | None = None
    environment_mode: str | None = field(default=None, validator=optional(in_(("shared", "separate"))))
    environment: Mapping[str, Json] | None = None
    collect: tuple[Mapping[str, Json], ...] = ()
    other: Mapping[str, Json] = field(factory=dict)


@frozen
class SolutionPart:
    __rest__ = "other"
    env: Mapping[str, str] = field(factory=dict)
    other: Mapping[str, Json] = field(factory=dict)


@frozen
class Step:
    """One of several turns in the same sandbox. ``min_reward`` (of ``reward``, or by name) ends the task when it is not
    met."""

    __rest__ = "other"
    name: str
    agent: AgentPart = field(factory=AgentPart)
    verifier: VerifierPart = field(factory=VerifierPart)
    min_reward: Json = None
    healthcheck: Healthcheck | None = None
    artifacts: Json = None
    other: Mapping[str, Json] = field(factory=dict)

    @property
    def thresholds(self) -> Mapping[str, float]:
        """By name of the reward."""
        if self.min_reward is None:
            return {}
        return dict(self.min_reward) if isinstance(self.min_reward, Mapping) else {"reward": self.min_reward}


@frozen
class HarborConfig:
    """The whole file. ``strategy`` makes one reward of the steps': their mean, or the last one's."""

    __rest__ = "other"
    schema_version: str = "1.4"
    task: Mapping[str, Json] | None = None
    metadata: Mapping[str, Json] = field(factory=dict)
    verifier: VerifierPart = field(factory=VerifierPart)
    agent: AgentPart = field(factory=AgentPart)
    environment: Environment = field(factory=Environment)
    solution: SolutionPart = field(factory=SolutionPart)
    source: str | None = None
    multi_step_reward_strategy: str = field(default="mean", validator=in_(("mean", "final")))
    steps: tuple[Step, ...] = ()
    artifacts: Json = None
    other: Mapping[str, Json] = field(factory=dict)


def read_toml(path: Path) -> HarborConfig:
    """Raises UserError that names the file and the key."""
    try:
        data = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{path}: cannot be read: {problem}") from None
    except tomli.TOMLDecodeError as problem:
        raise UserError(f"{path}: not valid TOML: {problem}") from None
    config = structure(HarborConfig, _modern(data, path), str(path))
    _refuse(config, path)
    return config


def read_yaml(path: Path) -> tuple[HarborConfig, str]:
    """(the config, the instruction) of a Terminal-Bench task; raises UserError."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        raise UserError(f"{path}: cannot be read: {' '.join(str(problem).split())}") from None
    instruction = data.get("instruction") if isinstance(data, Mapping) else None
    if not isinstance(instruction, str):
        raise UserError(f"{path}: instruction: is missing, or no text")
    known = {"agent": ("max_agent_timeout_sec", 360.0), "verifier": ("max_test_timeout_sec", 60.0)}
    limits = {part: {"timeout_sec": data.get(key, default)} for part, (key, default) in known.items()}
    metadata = {key: data[key] for key in ("difficulty", "category", "tags") if key in data}
    return structure(HarborConfig, {**limits, "metadata": metadata}, str(path)), instruction


def unknown(value: Any, prefix: str = "") -> list[str]:
    """The keys that nobody read, with the tables they stand in."""
    found = [prefix + key for key in getattr(value, "other", {})]
    for attribute in fields(type(value)):
        inner = getattr(value, attribute.name)
        for number, one in enumerate(inner if isinstance(inner, tuple) else [inner]):
            if has(type(one)):
                place = f"[{number}]" if isinstance(inner, tuple) else ""
                found += unknown(one, f"{prefix}{attribute.name}{place}.")
    return found


def _modern(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Keys of earlier schemas by their present names."""
    data = dict(data)
    if "version" in data:
        data.setdefault("schema_version", data.pop("version"))
    environment = data.get("environment")
    if isinstance(environment, Mapping):
        environment = dict(environment)
        for old in ("memory", "storage"):
            if old in environment:
                environment.setdefault(f"{old}_mb", _megabytes(environment.pop(old), f"{path}: environment.{old}"))
        internet = environment.pop("allow_internet", None)
        if internet is not None and "network_mode" not in environment:
            environment["network_mode"] = "public" if internet else "no-network"
        if isinstance(environment.get("os"), str):
            environment["os"] = environment["os"].lower()
        data["environment"] = environment
    if data.get("multi_step_reward_strategy", "") is None:
        del data["multi_step_reward_strategy"]
    return data


def _megabytes(size: Any, where: str) -> int:
    text = str(size).strip().upper()
    try:
        return int(float(text[:-1]) * SIZES[text[-1]])
    except (ValueError, KeyError, IndexError):
        raise UserError(f"{where} = {size!r} is no size, such as '2G' or '512M'") from None


def _refuse(config: HarborConfig, path: Path) -> None:
    """Raises UserError for what cannot be carried out here."""
    environment = config.environment
    if environment.allowed_hosts and environment.network_mode != "allowlist":
        raise UserError(f"{path}: environment.allowed_hosts needs environment.network_mode = 'allowlist'")
    names = [step.name for step in config.steps]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{path}: steps: the name {doubled!r} is given twice")
    unsupported: list[tuple[str, bool]] = [
        ("environment.os: only 'linux'", environment.os != "linux"),
        ("environment.tpu", environment.tpu is not None),
        ("environment.mcp_servers", bool(environment.mcp_servers)),
    ]
    parts = [("", config.agent, config.verifier)]
    parts += [(f"steps[{n}].", step.agent, step.verifier) for n, step in enumerate(config.steps)]
    for prefix, agent, verifier in parts:
        separate = verifier.environment_mode == "separate" or verifier.environment is not None
        unsupported += [
            (f"{prefix}agent.user", agent.user not in (None, "root", 0)),
            (f"{prefix}verifier.user", verifier.user not in (None, "root", 0)),
            (f"{prefix}verifier.environment: tests in a sandbox of their own", separate),
            (f"{prefix}agent.network_mode: another network for one phase", _differs(agent, environment)),
            (f"{prefix}verifier.network_mode: another network for one phase", _differs(verifier, environment)),
        ]
    if wrong := [what for what, there in unsupported if there]:
        raise UserError(f"{path}: not supported here: {'; '.join(wrong)}")
    for number, step in enumerate(config.steps):
        if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in step.thresholds.values()):
            raise UserError(f"{path}: steps[{number}].min_reward = {step.min_reward!r}: a number, or numbers by name")
        if "/" in step.name or step.name in ("", ".", ".."):
            raise UserError(f"{path}: steps[{number}].name = {step.name!r} is no name of a folder")


def _differs(part: AgentPart | VerifierPart, environment: Environment) -> bool:
    """Whether a phase asks for a network of its own."""
    hosts = part.allowed_hosts or ()
    return part.network_mode is not None and (part.network_mode, hosts) != (
        environment.network_mode,
        environment.allowed_hosts,
    )
