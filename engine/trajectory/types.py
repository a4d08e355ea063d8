"""What a session leaves behind: segments, trajectories, the ledger. Pure data in numpy; no tokenizer, no torch.

Invariants of every Trajectory: all arrays have one length; every SAMPLED token has a finite logprob and a version
>= 0, every other token has NaN and -1; loss_mask is True only on SAMPLED tokens at home.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

if TYPE_CHECKING:
    from uniagent.engine.ports import Floats, Ids, Sampling, VersionSpan


class Provenance(IntEnum):
    """Who wrote a token."""

    TEMPLATE = 0  # glue from the chat template
    CONTENT = 1  # from the harness or a tool
    SAMPLED = 2  # the model
    REPAIR = 3  # an end of turn that was never sampled


@frozen(eq=False)
class Segment:
    """A run of tokens of one provenance, as the engine saw it. ``action`` is the order of the action whose first
    ``len(ids)`` sampled tokens these are (a moved echo), None otherwise."""

    kind: Provenance
    ids: Ids
    action: int | None = None


@frozen(eq=False)
class Sampled:
    """One generation as the tree keeps it: what the engine sampled, cut at ``used`` tokens where a stop string ended
    the answer earlier (the rest is discarded as ``stop_overrun``), and how it was asked for."""

    token_ids: Ids  # [T]
    logprobs: Floats  # [T]
    versions: tuple[VersionSpan, ...]
    kv_versions: tuple[VersionSpan, ...]
    finish: str  # stop | length | aborted
    sampling: Sampling
    cached_tokens: int = 0
    kept: tuple[Ids | None, ...] | None = None
    used: int | None = None  # None: all
    closed: bool = True  # the last used token ends the turn in the template's sense; else a repair will
    text_ends: Ids | None = None  # [T] characters of the reply's text that are out once each token is; where streamed
    opening: Ids | None = None  # put before the first sampled token, so that the model calls a tool: of the template
    call_ends: tuple[int, ...] = ()  # tokens after which each call of the reply is out, whole; where streamed

    @property
    def said(self) -> Ids:
        """The tokens that stand in the conversation: all but the overrun."""
        return self.token_ids[: self.used]

    def check(self) -> None:
        """AssertionError unless every sampled token has a finite logprob and the version of one policy."""
        n = len(self.token_ids)
        if len(self.logprobs) != n or not np.isfinite(self.logprobs).all():
            raise AssertionError(f"{n} sampled tokens need as many finite logprobs: {self.logprobs}")
        ends = [0, *(v.end for v in self.versions)]
        if ends[-1] != n or any(v.start != e or v.version < 0 for v, e in zip(self.versions, ends, strict=False)):
            raise AssertionError(f"versions {self.versions} do not cover the {n} sampled tokens")
        for name, value in (("kept", self.kept), ("text_ends", self.text_ends)):
            if value is not None and len(value) != n:
                raise AssertionError(f"{name} has {len(value)} entries for {n} sampled tokens")
        if self.used is not None and not 0 <= self.used <= n:
            raise AssertionError(f"used is {self.used} of {n} sampled tokens")


@frozen(eq=False)
class ActionSpan:
    """One action in a trajectory: its tokens stand at [start, end) of the arrays. ``order`` is its number in the
    session; ``home`` and ``live`` say why it is or is not trained."""

    order: int
    start: int
    end: int
    sampling: Sampling
    tier: str | None  # verbatim | normalised | edited; None: never echoed
    home: bool
    fate: str  # live, or the cause of its discard
    kept: tuple[Ids | None, ...] | None = None  # per token of [start, end)
    kv_versions: tuple[VersionSpan, ...] = ()  # over [0, end) of the arrays, where home: whose weights wrote the KV


@frozen(eq=False)
class Trajectory:
    """One root-to-leaf chain as training arrays [T]."""

    token_ids: Ids
    provenance: npt.NDArray[np.uint8]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: Floats  # NaN off SAMPLED
    versions: npt.NDArray[np.int32]  # -1 off SAMPLED
    actions: tuple[ActionSpan, ...]
    kind: str = "main"  # main | subagent | side | branch
    weight: float = 1.0  # 1 / (chains of the session with trainable tokens); 0 when it has none
    parent: int | None = None  # index of the chain it branched from

    @property
    def echo_tiers(self) -> tuple[str | None, ...]:
        return tuple(a.tier for a in self.actions)


@frozen
class Ledger:
    """Where every sampled token of a session went: sampled = trainable + context + sum(discarded)."""

    sampled: int = 0
    trainable: int = 0
    context: int = 0
    discarded: Mapping[str, int] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        total = self.trainable + self.context + sum(self.discarded.values())
        if total != self.sampled:
            raise AssertionError(f"ledger does not balance: {self.sampled} sampled, {total} accounted for: {self}")


@frozen(eq=False)
class Export:
    """A finished session's tokens. ``fates`` is one per action, in order: live, or the cause of its discard."""

    trajectories: tuple[Trajectory, ...]
    fates: tuple[str, ...]
    ledger: Ledger
