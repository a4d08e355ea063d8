"""How hard are samples for a policy? Offline best-of-n rollouts: pass rates with intervals, and a first training set.

Invariants: nothing is trained; every session that ended is in the history at once, so that an interrupted estimate
goes on where it was; a sample whose sessions all failed outside the model has no rate and joins no training set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import trio
from attrs import frozen

from uniagent.engine.curriculum.history import History
from uniagent.engine.curriculum.pool import Row, family_of
from uniagent.engine.curriculum.significance import wilson
from uniagent.engine.curriculum.trials import key_of, trial_of
from uniagent.engine.episode import Episode
from uniagent.engine.node import Node
from uniagent.engine.rollout.groups import run_groups
from uniagent.engine.session import SessionParts, run_session


@frozen
class Difficulty:
    """One sample's pass rate: ``rate`` is ``passes`` of ``trials``, None without any; ``low`` and ``high`` bound it
    with 95 % (Wilson)."""

    row: Row
    family: str
    passes: int
    trials: int

    @property
    def rate(self) -> float | None:
        return self.passes / self.trials if self.trials else None

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.passes, self.trials)

    def within(self, band: tuple[float, float]) -> bool:
        return self.rate is not None and band[0] <= self.rate <= band[1]


async def estimate(node: Node, history: History, rows: Sequence[Row], *, n: int) -> list[Difficulty]:
    """Up to ``n`` trials of each row, those in the history's run included. Ends early when the node is asked to."""
    family = node.config.curriculum.family
    parts = SessionParts(
        node.gateway, node.tasks, node.providers, node.config.rollout.session_timeout_s, training=False
    )
    keys = await trio.to_thread.run_sync(lambda: [key_of(row) for row in rows])
    ended = await history.sessions()
    names = [f"difficulty-{key}-{replica}" for key in dict.fromkeys(keys) for replica in range(n)]
    row_of = dict(zip(keys, rows, strict=True))
    jobs = [(name, row_of[name.split("-")[1]]) for name in names if name not in ended]
    done = 0

    async def one(row: Row, sample: int, replica: int) -> Episode:
        nonlocal done
        episode = await run_session(parts, row, name=jobs[sample][0], sample=sample, replica=replica)
        await history.add([trial_of(episode, row, family=family, purpose="difficulty", version=node.version)])
        done += 1
        node.progress.phase("trying", done, len(jobs))
        return episode

    limit = node.config.rollout.max_sessions
    await run_groups(((i, row) for i, (_, row) in enumerate(jobs)), one, size=1, limit=limit, stop=node.stop.event)
    counts = await history.counts()
    return [Difficulty(row, family_of(row, family), *counts.get(k, (0, 0))) for k, row in zip(keys, rows, strict=True)]


def summary(found: Sequence[Difficulty], band: tuple[float, float]) -> dict[str, Any]:
    """Of all samples and by family: how many were tried, the pass rate of their trials with its interval, how many
    never or always pass, how many lie in the band."""
    families: dict[str, list[Difficulty]] = {}
    for one in found:
        families.setdefault(one.family, []).append(one)
    by_family = {name: _summary(some, band) for name, some in sorted(families.items())}
    return {**_summary(found, band), "families": by_family}


def _summary(found: Sequence[Difficulty], band: tuple[float, float]) -> dict[str, Any]:
    passes, trials = sum(d.passes for d in found), sum(d.trials for d in found)
    low, high = wilson(passes, trials)
    return {
        "samples": len(found),
        "tried": sum(d.trials > 0 for d in found),
        "trials": trials,
        "rate": passes / trials if trials else None,
        "low": low,
        "high": high,
        "never": sum(d.trials > 0 and d.passes == 0 for d in found),
        "always": sum(d.trials > 0 and d.passes == d.trials for d in found),
        "in_band": sum(d.within(band) for d in found),
    }


def table(result: Mapping[str, Any]) -> Iterable[str]:
    """The summary for people."""
    yield f"{'family':<24}{'samples':>8}{'trials':>8}{'rate':>7}   {'95 %':<13}{'never':>6}{'always':>7}{'in band':>8}"
    for name, s in [*result["families"].items(), ("all", result)]:
        rate = "-" if s["rate"] is None else f"{s['rate']:.3f}"
        interval = f"{s['low']:.3f} - {s['high']:.3f}"
        yield (
            f"{name[:23]:<24}{s['samples']:>8}{s['trials']:>8}{rate:>7}   {interval:<13}"
            f"{s['never']:>6}{s['always']:>7}{s['in_band']:>8}"
        )
