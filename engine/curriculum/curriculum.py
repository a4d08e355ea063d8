"""The curriculum of a run: an iterator of numbered samples, which learns from their outcomes.

Invariants
 - draws are a function of the seed, the data and what ``advance`` was told: outcomes count from the next ``advance``
   on, in the order of their samples, however they arrived;
 - every entry keeps a part of the draws (``reprobe`` of its share), whatever the strategy and its recent pass rate say:
   nothing is lost for good;
 - draws follow the weights with little scatter: each entry gains credit by its weight, the one with most is drawn and
   pays 1 (smooth weighted round robin), so equal weights take every row once before any row twice;
 - ``state`` is plain JSON, and ``restore`` goes on exactly there: samples in flight come first, under their numbers.

Knows no session and no engine. A recent pass rate is that of the last ``exclude_trials`` trials or more, by whole
groups, and is 0 or 1 exactly: on outcomes, never on rewards, which shaping moves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from attrs import frozen

from uniagent.engine.config import Curriculum as CurriculumConfig
from uniagent.engine.curriculum.estimates import Estimates, Numbers, Tallies, estimates, summary
from uniagent.engine.curriculum.pool import Pool, Row, Rows, Stream
from uniagent.engine.curriculum.strategies import Options, Strategy
from uniagent.engine.curriculum.trials import key_of
from uniagent.engine.ports import Json
from uniagent.engine.registry import load


@frozen
class Drawn:
    """A sample in flight: its entry, the number of its row in the source, its row."""

    entry: int
    source: int
    row: Row


class Curriculum:
    """``next()`` gives (number, row), numbers counting up from 0; ``done`` says what a sample's group came to, once it
    will not be run again; ``advance`` counts it, at every step."""

    def __init__(self, pool: Pool, config: CurriculumConfig, *, seed: int) -> None:
        self.config, self.pool = config, pool
        self._strategy: Strategy = load("strategies", config.strategy)
        self._options = Options(config.band, config.quotas)
        self._seed = seed
        self._finite = isinstance(pool, Rows)
        self._samples = Tallies(len(pool.share), config.half_life)
        self._families = Tallies(len(pool.names), config.half_life)
        self._credit: Numbers = np.zeros(0)
        self._weights: Numbers | None = None
        self._draws = self._version = 0
        self._flying: dict[int, Drawn] = {}
        self._observed: dict[int, tuple[int, list[bool]]] = {}  # sample -> entry, outcomes; until advance
        self._seen: set[int] = set()  # in flight, and observed
        self._again: list[int] = []  # drawn before a restart, to be run again first

    # ------------------------------------------------------------ drawing

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        return self

    def __next__(self) -> tuple[int, Row]:
        if self._again:
            number = self._again.pop(0)
            return number, self._flying[number].row
        ready = self.pool.ready()
        if not ready.any():
            raise StopIteration
        weights = self.weights()
        self._credit += weights
        entry = int(np.argmax(np.where(ready, self._credit, -np.inf)))
        self._credit[entry] -= 1.0
        row, source = self.pool.take(entry)
        number, self._draws = self._draws, self._draws + 1
        self._flying[number] = Drawn(entry, source, row)
        return number, row

    def weights(self) -> Numbers:
        """The part of the draws that each entry gets, [N]; sums to 1."""
        if self._weights is None or len(self._weights) != len(self.pool.share):
            self._weights = self._weigh(self.known())
            fresh = len(self._weights) - len(self._credit)
            jitter = np.random.default_rng((self._seed, len(self._credit))).random(fresh)
            self._credit = np.concatenate([self._credit, jitter])
        return self._weights

    def known(self) -> Estimates:
        """The estimates of now."""
        pool = self.pool
        self._families.grow(len(pool.names))
        self._samples.grow(len(pool.share))
        return estimates(self._samples, self._families, pool.family, pool.names, pool.share, self._version)

    def excluded(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[N] whose recent pass rate is exactly 0 or 1; they are drawn to probe them again only."""
        self._samples.grow(len(self.pool.share))
        limit = self.config.exclude_trials
        return self._samples.streak >= limit if limit else np.zeros(len(self._samples), np.bool_)

    def _weigh(self, known: Estimates) -> Numbers:
        wish = np.where(self.excluded(), 0.0, self._strategy(known, self._options))
        wish = wish / wish.sum() if wish.sum() > 0 else known.share
        return (1 - self.config.reprobe) * wish + self.config.reprobe * known.share

    # ------------------------------------------------------------ learning

    def row(self, number: int) -> Row:
        """The row of a sample in flight."""
        return self._flying[number].row

    def observe(self, number: int, outcomes: Sequence[bool]) -> None:
        """What a sample in flight came to, by its sessions that count, before it is done; counted once."""
        if number not in self._seen:
            self._observed[number] = self._flying[number].entry, list(outcomes)
            self._seen.add(number)

    def done(self, number: int, outcomes: Sequence[bool] = ()) -> None:
        """The sample was trained on or given up: it may be drawn again, and a restart does not repeat it. ``outcomes``
        are those of its sessions that count."""
        self.observe(number, outcomes)
        self._seen.remove(number)
        self.pool.give_back(self._flying.pop(number).entry)

    def advance(self, version: int) -> None:
        """Count the outcomes of what was done since the last time, as of a policy version."""
        self.known()
        for _, (entry, outcomes) in sorted(self._observed.items()):
            if self._finite:
                self._samples.add(entry, outcomes, version)
            self._families.add(int(self.pool.family[entry]), outcomes, version)
        self._observed.clear()
        self._version = version
        self._weights = None

    def learn(self, key: str, family: str, outcomes: Sequence[bool], weight: float, keys: Mapping[str, int]) -> None:
        """Trials of earlier runs, before the first draw; ``keys`` are those of ``keys()``."""
        self.known()
        if family in self.pool.names:
            self._families.add(self.pool.names.index(family), outcomes, 0, weight)
        if key in keys:
            self._samples.add(keys[key], outcomes, 0, weight)
        self._weights = None

    def keys(self) -> dict[str, int]:
        """Entry by key, of every row of a finite data set. Slow for a large one."""
        return {key_of(row): i for i, row in enumerate(self.pool.rows)} if isinstance(self.pool, Rows) else {}

    def metrics(self) -> dict[str, float]:
        """Estimates by family, and the share of the data that is left out for now."""
        known = self.known()
        return {"curriculum/excluded": float(known.share[self.excluded()].sum()), **summary(known)}

    # ------------------------------------------------------------ saving

    def state(self) -> dict[str, Json]:
        """All that the next draws depend on, as plain JSON."""
        return {
            "draws": self._draws,
            "version": self._version,
            "credit": self._credit.tolist(),
            "samples": self._samples.state(),
            "families": self._families.state(),
            "flying": [[n, d.entry, d.source] for n, d in sorted(self._flying.items())],
            "observed": [[n, entry, outcomes] for n, (entry, outcomes) in sorted(self._observed.items())],
            "pool": self.pool.state(),
        }

    def restore(self, state: Mapping[str, Json]) -> None:
        """Go on from a state, on the same data and seed, before the first draw. What was in flight is drawn again."""
        flying = state["flying"]
        self.pool.restore(state["pool"], [source for _, _, source in flying])
        self._samples = Tallies(len(self.pool.share), self.config.half_life)
        self._families = Tallies(len(self.pool.names), self.config.half_life)
        self._samples.restore(state["samples"])
        self._families.restore(state["families"])
        self._credit = np.array(state["credit"], np.float64)
        self._draws, self._version = state["draws"], state["version"]
        self._flying = {n: Drawn(entry, source, self.pool.again(source)) for n, entry, source in flying}
        self._again = sorted(self._flying)
        self._observed = {n: (entry, outcomes) for n, entry, outcomes in state["observed"]}
        self._weights = None


def open_curriculum(rows: Callable[[bool], Iterator[Row]], config: CurriculumConfig, *, seed: int) -> Curriculum:
    """The curriculum over a source; ``rows(repeat)`` opens it. What knows its length is held whole."""
    once = rows(False)
    length = operator.length_hint(once, -1)
    finite = length >= 0
    pool: Pool = Rows(list(once), config.family) if finite else Stream(rows(True), config.family)
    return Curriculum(pool, config, seed=seed)
