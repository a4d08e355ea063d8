"""From complete groups of episodes to a training batch, with every sampled token accounted for.

A token is trained when its trajectory says so (sampled, at home, live) and its group has something to learn from;
otherwise the ledger names why not: ``infra`` (the session failed for reasons outside the model), ``stale`` (older than
``max_staleness`` versions), ``no_signal`` (every advantage of the group is zero). "Session" is the unit of rewards,
baselines and sequence-level losses: how a session is split into chains changes nothing. Knows numpy only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen

from uniagent.engine.episode import Episode
from uniagent.engine.learner.advantages import advantages, overlong
from uniagent.engine.learner.forest import Index
from uniagent.engine.ports import Floats, Ids
from uniagent.engine.trajectory.types import ActionSpan, Trajectory


@frozen
class BatchLedger:
    """Where the trainable tokens of a batch went: trainable = trained + sum(discarded)."""

    trainable: int = 0
    trained: int = 0
    discarded: Mapping[str, int] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.trained + sum(self.discarded.values()) != self.trainable:
            raise AssertionError(f"batch ledger does not balance: {self}")

    def skipped(self, tokens: int) -> BatchLedger:
        """With ``tokens`` of the trained ones moved to ``skipped_step``."""
        if not tokens:
            return self
        moved = {**self.discarded, "skipped_step": self.discarded.get("skipped_step", 0) + tokens}
        return evolve(self, trained=self.trained - tokens, discarded=moved)


@frozen(eq=False)
class Chain:
    """A token sequence [T] with trained tokens: those at positions ``trained`` [n], ascending and > 0, are tokens
    [first, first + n) of the batch's flat arrays."""

    ids: Ids
    trained: Index
    first: int
    session: int
    group: int


@frozen(eq=False)
class Batch:
    """What one training step sees. Flat arrays [N] run over the trained tokens of all chains, in order; ``sessions``
    names the sessions [S] that ``session`` indexes. ``turn`` is the number of the action within its session,
    ``kept[i]`` the sorted token ids that top-p/top-k left, None where nothing was cut."""

    chains: tuple[Chain, ...]
    logprobs: Floats  # of the behaviour policy
    versions: npt.NDArray[np.int32]  # that sampled the token
    advantages: Floats
    temperature: Floats
    session: Index
    turn: Index
    kept: tuple[Ids | None, ...] | None
    sessions: tuple[str, ...]
    version: int  # the learner's policy version, which ages are relative to
    ledger: BatchLedger
    uses: Mapping[str, Mapping[str, int]] = field(factory=dict)  # session -> where its trainable tokens went

    @property
    def tokens(self) -> int:
        return len(self.logprobs)


def build(
    groups: Sequence[Sequence[Episode]],
    kind: str,
    *,
    version: int = 0,
    max_staleness: int | None = None,
    overlong_limit: int = 0,
    overlong_buffer: int = 0,
) -> Batch:
    """One batch from complete groups; ``kind`` is the advantage (``advantages``). Sessions are ordered by sample and
    replica, so that a batch does not depend on the order in which sessions ended. ``overlong_limit`` > 0 adds DAPO's
    length penalty to the rewards. Raises ValueError for a sampled token at temperature 0, which has no gradient."""
    ordered = sorted((sorted(g, key=lambda e: e.replica) for g in groups if g), key=lambda g: g[0].sample)
    tokens = _Tokens(version)
    uses: dict[str, Counter[str]] = {}
    for number, group in enumerate(ordered):
        counts = np.array([e.counts for e in group])
        rewards = np.array([_reward(e, overlong_limit, overlong_buffer) for e in group])
        base = advantages(rewards, counts, kind)
        signal = any(e.counts and (a or any(e.result.step_rewards)) for e, a in zip(group, base, strict=True))
        for episode, advantage in zip(group, base, strict=True):
            use = uses.setdefault(episode.session, Counter())
            for trajectory in episode.export.trajectories:
                mask = trajectory.loss_mask
                cause = "infra" if not episode.counts else "no_signal" if not signal else None
                if cause:
                    use[cause] += int(mask.sum())
                    continue
                old = mask & (version - trajectory.versions > (np.inf if max_staleness is None else max_staleness))
                use["stale"] += int(old.sum())
                use["trained"] += int((mask & ~old).sum())
                tokens.add(episode, trajectory, mask & ~old, float(advantage), number)
    lost = {cause: n for cause, n in sum(uses.values(), Counter[str]()).items() if n}
    trained = lost.pop("trained", 0)
    return tokens.batch(
        BatchLedger(trained + sum(lost.values()), trained, lost),
        {session: {cause: n for cause, n in use.items() if n} for session, use in uses.items()},
    )


def _reward(episode: Episode, limit: int, buffer: int) -> float:
    if not limit:
        return episode.result.reward
    sampled = sum(int(t.loss_mask.sum()) for t in episode.export.trajectories)
    return episode.result.reward + overlong(sampled, limit=limit, buffer=buffer)


def moved(uses: Mapping[str, Mapping[str, int]], lost: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The uses of a batch with ``lost`` tokens, by session, moved from ``trained`` to ``skipped_step``."""
    out = {}
    for session, use in uses.items():
        tokens = lost.get(session, 0)
        split = {**use, "trained": use.get("trained", 0) - tokens, "skipped_step": tokens} if tokens else dict(use)
        out[session] = {cause: n for cause, n in split.items() if n}
    return out


class _Tokens:
    """The flat arrays of a batch while it is put together."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.chains: list[Chain] = []
        self.rows = [np.empty(0, _TOKEN)]
        self.kept: list[Ids | None] = []
        self.sessions: dict[str, int] = {}
        self.count = 0

    def add(
        self, episode: Episode, chain: Trajectory, mask: npt.NDArray[np.bool_], advantage: float, group: int
    ) -> None:
        where = np.flatnonzero(mask)
        if not len(where):
            return
        if where[0] == 0:
            raise ValueError(f"session {episode.session}: the first token of a trajectory is sampled after nothing")
        session = self.sessions.setdefault(episode.session, len(self.sessions))
        rows = np.zeros(len(mask), _TOKEN)
        rows["logprob"], rows["version"], rows["session"], rows["turn"] = chain.logprobs, chain.versions, session, -1
        kept: list[Ids | None] = [None] * len(mask)
        rewards = _step_rewards(episode)
        for action in (a for a in chain.actions if mask[a.start : a.end].any()):
            _check_trained(episode, action)
            span = slice(action.start, action.end)
            rows["turn"][span], rows["temperature"][span] = action.order, action.sampling.temperature
            rows["advantage"][span] = advantage + rewards[action.order]
            if action.kept is not None:
                kept[span] = action.kept
        if (rows["turn"][where] < 0).any():
            raise ValueError(f"session {episode.session}: a trained token belongs to no action")
        self.chains.append(Chain(chain.token_ids, where, self.count, session, group))
        self.count += len(where)
        self.kept += [kept[i] for i in where]
        self.rows.append(rows[where])

    def batch(self, ledger: BatchLedger, uses: Mapping[str, Mapping[str, int]]) -> Batch:
        rows = np.concatenate(self.rows)
        return Batch(
            chains=tuple(self.chains),
            logprobs=rows["logprob"].copy(),
            versions=rows["version"].copy(),
            advantages=rows["advantage"].copy(),
            temperature=rows["temperature"].copy(),
            session=rows["session"].copy(),
            turn=rows["turn"].copy(),
            kept=tuple(self.kept) if any(k is not None for k in self.kept) else None,
            sessions=tuple(self.sessions),
            version=self.version,
            ledger=ledger,
            uses=uses,
        )


_TOKEN = np.dtype(
    [
        ("logprob", "f4"),
        ("version", "i4"),
        ("advantage", "f4"),
        ("temperature", "f4"),
        ("session", "i8"),
        ("turn", "i8"),
    ]
)


def _step_rewards(episode: Episode) -> Floats:
    """One an action of the session, in order; actions past the end of ``step_rewards`` have none."""
    given, actions = episode.result.step_rewards, len(episode.export.fates)
    if len(given) > actions:
        raise ValueError(f"session {episode.session}: {len(given)} step rewards for {actions} actions")
    return np.array([*given, *[0.0] * (actions - len(given))], np.float32)


def _check_trained(episode: Episode, action: ActionSpan) -> None:
    if action.sampling.temperature <= 0:
        raise ValueError(
            f"session {episode.session}, action {action.order}: sampled at temperature 0, which cannot be trained: "
            "set a temperature > 0 in the task's sampling section"
        )


def describe(ledger: BatchLedger) -> Iterable[tuple[str, float]]:
    """The ledger as metrics."""
    yield "batch/trainable_tokens", ledger.trainable
    yield "batch/trained_tokens", ledger.trained
    for cause, tokens in ledger.discarded.items():
        yield f"batch/discarded_{cause}", tokens
