"""metrics.jsonl and the numbers that come from episodes.

``MetricsFile`` is a Tracker: one JSON line a step, ``step`` and ``wall_s`` first. The aggregators are pure. Sessions
whose infrastructure failed count in no success or reward.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from uniagent.engine.episode import Episode
from uniagent.engine.ports import Failure
from uniagent.engine.storage import LineFile, plain
from uniagent.engine.trajectory.types import ActionSpan


class MetricsFile:
    """Appends to metrics.jsonl. ``clock`` gives seconds; ``wall_s`` counts from the opening of the file."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._file = LineFile(path)
        self._clock, self._start = clock, clock()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """One line; a number that is not finite becomes null."""
        line = {"step": step, "wall_s": round(self._clock() - self._start, 3), **metrics}
        self._file.append([json.dumps(plain(line)).encode() + b"\n"])

    def close(self) -> None:
        self._file.close()


def success(episodes: Sequence[Episode]) -> dict[str, float]:
    """``success`` (share solved), ``n`` and ``stderr`` (binomial) of the episodes that count; NaN where none does."""
    solved = [e.result.solved for e in episodes if e.counts]
    n = len(solved)
    share = sum(solved) / n if n else math.nan
    return {"success": share, "n": n, "stderr": math.sqrt(share * (1 - share) / n) if n else math.nan}


def of_episodes(episodes: Sequence[Episode]) -> dict[str, float]:
    """What a batch of episodes looks like: success and reward, failures, actions and chains a session, tokens by the
    ledger, mean seconds a session by part."""
    if not episodes:
        return {}
    rewards = [e.result.reward for e in episodes if e.counts]
    ledgers = [e.export.ledger for e in episodes]
    discarded = sum((Counter(ledger.discarded) for ledger in ledgers), Counter[str]())
    parts = sorted({part for e in episodes for part in e.timings})
    return {
        "success": success(episodes)["success"],
        "reward": _mean(rewards),
        "reward_std": float(np.std(rewards)) if rewards else math.nan,
        "episodes": len(episodes),
        "infra_failures": sum(not e.counts for e in episodes),
        "agent_failures": sum(e.result.failure is Failure.AGENT for e in episodes),
        "actions": _mean([len(e.export.fates) for e in episodes]),
        "chains": _mean([len(e.export.trajectories) for e in episodes]),
        "tokens/sampled": sum(ledger.sampled for ledger in ledgers),
        "tokens/trainable": sum(ledger.trainable for ledger in ledgers),
        "tokens/context": sum(ledger.context for ledger in ledgers),
        **{f"tokens/discarded_{cause}": n for cause, n in sorted(discarded.items())},
        **{f"seconds/{part}": _mean([e.timings.get(part, 0.0) for e in episodes]) for part in parts},
    }


def of_agents(episodes: Sequence[Episode]) -> dict[str, float]:
    """The same batch by agent, as ``agent/NAME/…``: success; answers, chains and sampled tokens a session; shares of
    these tokens that can be trained or were discarded, by cause; shares of the echoed answers by tier."""
    by_agent: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_agent.setdefault(agent_of(episode), []).append(episode)
    return {
        f"agent/{name}/{key}": value
        for name, some in sorted(by_agent.items())
        for key, value in _of_agent(some).items()
    }


def agent_of(episode: Episode) -> str:
    """Name of the agent in the sample's merged config."""
    return str((episode.row.get("agent") or {}).get("name", "react"))


def _of_agent(episodes: Sequence[Episode]) -> dict[str, float]:
    ledgers = [e.export.ledger for e in episodes]
    sampled = sum(ledger.sampled for ledger in ledgers)
    discarded = sum((Counter(ledger.discarded) for ledger in ledgers), Counter[str]())
    tiers = Counter(a.tier for e in episodes for a in _actions(e) if a.tier is not None)
    return {
        "episodes": len(episodes),
        "success": success(episodes)["success"],
        "agent_failures": sum(e.result.failure is Failure.AGENT for e in episodes),
        "infra_failures": sum(not e.counts for e in episodes),
        "actions": _mean([len(e.export.fates) for e in episodes]),
        "chains": _mean([len(e.export.trajectories) for e in episodes]),
        "tokens": sampled / len(episodes),
        "trainable": _share(sum(ledger.trainable for ledger in ledgers), sampled),
        **{f"discarded_{cause}": _share(n, sampled) for cause, n in sorted(discarded.items())},
        **{f"echo_{tier}": _share(n, tiers.total()) for tier, n in sorted(tiers.items())},
    }


def _actions(episode: Episode) -> Iterable[ActionSpan]:
    """Every action of the episode that stands in a chain, once: where it was sampled."""
    return {a.order: a for t in episode.export.trajectories for a in t.actions if a.home}.values()


def staleness(episodes: Sequence[Episode], version: int) -> dict[str, float]:
    """Age in policy versions of the tokens to be trained, relative to the learner's ``version``: mean and maximum."""
    ages = [version - t.versions[t.loss_mask] for e in episodes for t in e.export.trajectories]
    every = np.concatenate(ages) if ages else np.empty(0)
    return {"staleness": float(every.mean()), "staleness_max": float(every.max())} if len(every) else {}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
