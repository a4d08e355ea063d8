"""Where a run is: what a checkpoint holds beside the trainer's state, so that a killed run goes on from it.

Invariant: every sample is trained (or given back) exactly once in the line of weights that goes on: what was under way
when the checkpoint was made is begun anew, and what the record says of it from before does not count
(``journal.read``). Knows numbers of samples; no weights, no folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeAlias

import attrs
from attrs import define, field, frozen

from uniagent.engine.ports import Json

Sample: TypeAlias = tuple[int, Mapping[str, Json]]  # (number in the data, row)


@frozen
class Position:
    """Samples below ``next`` are done, save those of ``again``. ``policy_version`` is that of the checkpoint's weights
    once an engine has them; ``spent`` sums what the run used so far (tokens, seconds)."""

    step: int = 0
    policy_version: int = 0
    next: int = 0
    again: tuple[int, ...] = ()
    trained: int = 0  # groups
    given_back: int = 0
    evals: Mapping[str, Mapping[str, float]] = field(factory=dict)
    spent: Mapping[str, float] = field(factory=dict)
    curriculum: Mapping[str, Json] = field(factory=dict)  # which samples those are, and which come next

    def as_json(self) -> dict[str, Json]:
        return attrs.asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Json]) -> Self:
        return cls(**{**value, "again": tuple(value["again"])})

    def admission(self) -> dict[str, int]:
        """The counters that admission goes on from: what was under way is admitted anew."""
        return {
            "admitted": self.trained + self.given_back,
            "given_back": self.given_back,
            "consumed": self.trained,
        }


@define(eq=False)
class Samples:
    """Iterator over the samples a run has still to train on, which remembers those that are begun and not done."""

    rest: Iterator[Sample]
    next: int
    trained: int
    given_back: int
    _open: set[int]

    @classmethod
    def after(cls, position: Position, samples: Iterator[Sample]) -> Self:
        """``samples`` go on from there: first those of ``again``, then the data from ``next`` on."""
        return cls(samples, position.next, position.trained, position.given_back, set(position.again))

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        number, row = next(self.rest)
        self._open.add(number)
        self.next = max(self.next, number + 1)
        return number, row

    def done(self, number: int, *, trained: bool) -> None:
        """A sample's group was trained on, or given back for good."""
        self._open.remove(number)
        if trained:
            self.trained += 1
        else:
            self.given_back += 1

    def position(self, **rest: Any) -> Position:
        """Where this is; ``rest`` are the other fields."""
        return Position(
            next=self.next,
            again=tuple(sorted(self._open)),
            trained=self.trained,
            given_back=self.given_back,
            **rest,
        )
