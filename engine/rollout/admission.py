"""How many groups may be under way: the staleness bound, kept at the door.

Admit while ``outstanding < groups_per_step * sync_every * (1 + staleness_threshold)``, where ``outstanding`` counts the
groups running or buffered at the last weight sync plus those admitted since (the rule of verl's fully asynchronous
rollouter, in groups). A group that leaves without filling a place in a batch gives its place back at once. Pure
counters, no clock; they are saved with a checkpoint, so that a resumed run grants nothing twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import define


@define
class Admission:
    """``outstanding`` as above; ``running`` and ``buffered`` groups now; the totals only grow."""

    groups_per_step: int
    sync_every: int = 1
    staleness_threshold: float = 0.0
    outstanding: int = 0
    running: int = 0
    buffered: int = 0
    admitted: int = 0
    given_back: int = 0
    consumed: int = 0

    @property
    def limit(self) -> int:
        """Most groups outstanding."""
        return math.floor(self.groups_per_step * self.sync_every * (1 + self.staleness_threshold) + 1e-9)

    @property
    def room(self) -> int:
        """Groups that may start now."""
        return max(0, self.limit - self.outstanding)

    def admit(self) -> None:
        """A group starts."""
        if not self.room:
            raise AssertionError(f"a group was admitted without room: {self.counters()}")
        self.outstanding += 1
        self.running += 1
        self.admitted += 1

    def complete(self, *, fills: bool) -> None:
        """A running group ended; ``fills``: it will take a place in a batch, otherwise its place is free again."""
        self.running -= 1
        if fills:
            self.buffered += 1
        else:
            self.outstanding -= 1
            self.given_back += 1

    def consume(self, groups: int) -> None:
        """A batch of buffered groups is trained on. Their places come free at the next sync, not before."""
        if groups > self.buffered:
            raise AssertionError(f"{groups} groups consumed of {self.buffered} buffered: {self.counters()}")
        self.buffered -= groups
        self.consumed += groups

    def sync(self) -> None:
        """The engine got new weights."""
        self.outstanding = self.running + self.buffered

    def counters(self) -> dict[str, int]:
        """For checkpoints, metrics and error messages."""
        return {
            "limit": self.limit,
            "outstanding": self.outstanding,
            "running": self.running,
            "buffered": self.buffered,
            "admitted": self.admitted,
            "given_back": self.given_back,
            "consumed": self.consumed,
        }

    def restore(self, counters: Mapping[str, int]) -> None:
        """Go on from a checkpoint: what ran or waited then is gone and is started again."""
        self.admitted, self.given_back, self.consumed = (counters[k] for k in ("admitted", "given_back", "consumed"))
        self.outstanding = self.running = self.buffered = 0
