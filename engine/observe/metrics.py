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
from uniagent.engine.storage import LineFile, parse_line, plain, whole_lines, write_atomic
from uniagent.engine.trajectory.types import ActionSpan


class MetricsFile:
    """Appends to metrics.jsonl. ``clock`` gives seconds; ``wall_s`` counts from the opening of the file. A run that
    goes on ``after`` a step has spent ``spent_s`` before; the lines of later steps, which it takes again, are cut."""

    def __init__(
        self, path: Path, clock: Callable[[], float], *, after: int | None = None, spent_s: float = 0.0
    ) -> None:
        if after is not None and path.exists():
            kept = [line for n, line in enumerate(whole_lines(path), 1) if parse_line(path, n, line)["step"] <= after]
            write_atomic(path, "".join(line.decode() + "\n" for line in kept))
        self._file = LineFile(path)
        self._clock, self._start = clock, clock() - spent_s

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


def pass_at_k(episodes: Sequence[Episode], k: int) -> dict[str, float]:
    """``pass@k``, the chance that one of k episodes of a sample is solved, with its standard error over samples and
    the 95 % interval ``low``, ``high``; NaN where no sample has k episodes that count.

    The unbiased estimator of Chen et al. 2021 (Evaluating Large Language Models Trained on Code), 1 - C(n-c, k) /
    C(n, k) for a sample with c of n solved. The interval is Wilson's with the number of samples that has the same
    standard error, so that it stays within [0, 1] and is not empty where every sample agrees.
    """
    solved: dict[int, list[bool]] = {}
    for e in episodes:
        if e.counts:
            solved.setdefault(e.sample, []).append(e.result.solved)
    each = [1 - math.comb(len(s) - sum(s), k) / math.comb(len(s), k) for s in solved.values() if len(s) >= k]
    if not each:
        return dict.fromkeys(("value", "stderr", "low", "high"), math.nan)
    value = sum(each) / len(each)
    variance = sum((x - value) ** 2 for x in each) / max(len(each) - 1, 1) / len(each)
    n = value * (1 - value) / variance if variance and 0 < value < 1 else float(len(each))
    low, high = wilson(value, max(n, float(len(each))))
    return {"value": value, "stderr": math.sqrt(variance), "low": low, "high": high}


def wilson(share: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share seen in n trials (Wilson 1927); z = 1.96 is 95 %."""
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def of_answers(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of all answers: sampled tokens each; the share that ended at the token limit (``cut``) and that with calls that
    could not be parsed (``malformed``)."""
    turns = [turn for e in episodes for turn in e.turns]
    sampled = sum(e.export.ledger.sampled for e in episodes)
    return {
        "answers/tokens": _share(sampled, len(turns)),
        "answers/cut": _share(sum(turn["finish"] == "length" for turn in turns), len(turns)),
        "answers/malformed": _share(sum(turn["problem"] is not None for turn in turns), len(turns)),
    }


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


def of_tasks(episodes: Sequence[Episode]) -> dict[str, float]:
    """The same batch by task, as ``task/NAME/…``: episodes and success; the means of what its verifier measured
    (``TaskResult.metrics``), of the reward's components, and the share of each flag, of the episodes that count."""
    by_task: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task, []).append(episode)
    return {
        f"task/{name}/{key}": value for name, some in sorted(by_task.items()) for key, value in _of_task(some).items()
    }


def _of_task(episodes: Sequence[Episode]) -> dict[str, float]:
    results = [e.result for e in episodes if e.counts]
    found: dict[str, list[float]] = {}
    for result in results:
        measured = {name: value for name, value in result.metrics.items() if not name.endswith("_s")}
        for name, value in {**measured, **{f"component_{n}": v for n, v in result.components.items()}}.items():
            found.setdefault(name, []).append(value)
    flags = Counter(flag for result in results for flag in set(result.flags))
    return {
        "episodes": len(episodes),
        "success": success(episodes)["success"],
        **{name: _mean(values) for name, values in sorted(found.items())},
        **{f"flag_{name}": n / len(results) for name, n in sorted(flags.items())},
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
