"""What a test script left as its verdict, and one reward of several; pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from uniagent.engine.errors import InfraError

Rewards = Mapping[str, float]
TEXT, JSON = "reward.txt", "reward.json"


def read_rewards(files: Mapping[str, bytes]) -> Rewards | None:
    """By name (``reward`` where there is only one), from reward.json, else reward.txt; None: neither is there. Raises
    InfraError for one that cannot be read."""
    if JSON in files:
        return _from_json(files[JSON])
    return _from_text(files[TEXT]) if TEXT in files else None


def _from_text(content: bytes) -> Rewards:
    try:
        value = float(content.decode())
    except ValueError:
        raise InfraError(f"the tests' {TEXT} holds no number: {content[:80]!r}") from None
    return {"reward": _finite(value, TEXT)}


def _from_json(content: bytes) -> Rewards:
    try:
        found = json.loads(content)
    except ValueError:
        raise InfraError(f"the tests' {JSON} is not valid JSON: {content[:80]!r}") from None
    values = found if isinstance(found, dict) else {"reward": found}
    if not values or not all(isinstance(value, int | float) for value in values.values()):
        raise InfraError(f"the tests' {JSON} holds no number, or no numbers by name: {content[:80]!r}")
    return {name: _finite(float(value), JSON) for name, value in values.items()}


def _finite(value: float, where: str) -> float:
    if not math.isfinite(value):
        raise InfraError(f"the tests' {where} holds {value}, which is no reward")
    return value


def combined(steps: Sequence[Rewards], strategy: str) -> Rewards:
    """Of the steps that were judged: the last one's, or by name the mean, a name that a step lacks counting 0."""
    if strategy == "final":
        return steps[-1]
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}


def scalar(rewards: Rewards, key: str | None) -> float:
    """The one that trains: ``key``, else ``reward``, else the mean of all. Raises InfraError where ``key`` is not
    there."""
    if key is not None and key not in rewards:
        raise InfraError(f"the tests gave no reward {key!r}; they gave: {', '.join(rewards)}")
    chosen = key or ("reward" if "reward" in rewards else None)
    return rewards[chosen] if chosen else sum(rewards.values()) / len(rewards)


def falls_short(rewards: Rewards, thresholds: Mapping[str, float]) -> bool:
    """Whether a step's rewards are below its ``min_reward``; a name that is not there is below any."""
    return any(rewards.get(name, -math.inf) < least for name, least in thresholds.items())
