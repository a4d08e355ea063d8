"""The history of trials across runs: one SQLite file that any number of runs write to.

SQLite, because it is in Python's own library, one file, safe against kills (a transaction is whole or absent) and open
to several processes; the table grows by one short row a session. Invariants: a trial is kept once, however often a
resumed run writes it (run and session are its key); what ``add`` returned from is on disk. All of it blocks, so
``History`` works in a thread, one call at a time: whoever adds waits, and nothing piles up.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import attrs
import trio
from attrs import frozen

from uniagent.engine.curriculum.trials import Trial
from uniagent.engine.errors import UserError

VERSION = 1
WAIT_S = 60.0  # for another process that writes
_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY, started REAL NOT NULL,
    dataset TEXT NOT NULL, template TEXT NOT NULL, model TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trials (
    run TEXT NOT NULL REFERENCES runs (run), session TEXT NOT NULL, sample TEXT NOT NULL, family TEXT NOT NULL,
    task TEXT NOT NULL, purpose TEXT NOT NULL, version INTEGER NOT NULL, time REAL NOT NULL, reward REAL,
    outcome INTEGER, harness TEXT NOT NULL, harness_hash TEXT NOT NULL, turns INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (run, session)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS trials_by_sample ON trials (sample);
"""
T = TypeVar("T")


@frozen
class RunIdentity:
    """What the trials of a run were made with. ``run`` names it; the others are fingerprints."""

    run: str
    dataset: str
    template: str
    model: str


@frozen
class Cell:
    """The trials of one sample at one policy version of one run: ``passes`` of ``trials``."""

    sample: str
    family: str
    run: str
    version: int
    passes: int
    trials: int


class Store:
    """The file itself. Blocking; may be used by one thread at a time."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open or create it; raises UserError for a file that is none or was written by a newer version."""
        if read_only and not path.is_file():
            raise UserError(f"there is no history of trials at {path}")
        self.path = path
        self._lock = threading.Lock()
        with self._telling():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=WAIT_S, check_same_thread=False, isolation_level=None)
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found > VERSION:
                raise UserError(f"{path}: written by a newer uniagent (version {found}, this one knows {VERSION})")
            if not read_only:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._db.executescript(_SCHEMA)
                self._db.execute(f"PRAGMA user_version = {VERSION}")

    def begin(self, run: RunIdentity, now: float) -> None:
        """A run, or its continuation."""
        with self._telling(), self._lock:
            self._db.execute(
                "INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?, ?)",
                (run.run, now, run.dataset, run.template, run.model),
            )

    def add(self, run: str, trials: Iterable[Trial], now: float) -> None:
        """Keep trials, all or none; one that is there is replaced."""
        names = [f.name for f in attrs.fields(Trial)]
        columns, marks = ", ".join(["run", "time", *names]), ", ".join("?" * (len(names) + 2))
        rows = [(run, now, *attrs.astuple(trial)) for trial in trials]
        with self._telling(), self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(f"INSERT OR REPLACE INTO trials ({columns}) VALUES ({marks})", rows)
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def cells(self, where: str = "1", values: Sequence[Any] = ()) -> list[Cell]:
        """Trials with an outcome, counted by sample, run and version; ``where`` is SQL over trials and runs."""
        sql = (
            "SELECT sample, family, run, version, sum(outcome), count(*) FROM trials JOIN runs USING (run) "
            f"WHERE outcome IS NOT NULL AND {where} GROUP BY sample, run, version "
            "ORDER BY sample, started, run, version"
        )
        return [Cell(*row) for row in self._rows(sql, values)]

    def counts(self, run: str) -> dict[str, tuple[int, int]]:
        """(passes, trials) of every sample in a run."""
        return {c.sample: (c.passes, c.trials) for c in self._totals(run)}

    def sessions(self, run: str) -> set[str]:
        """Names of a run's sessions whose trial has an outcome."""
        sql = "SELECT session FROM trials WHERE run = ? AND outcome IS NOT NULL"
        return {row[0] for row in self._rows(sql, (run,))}

    def runs(self) -> list[dict[str, Any]]:
        """Every run with its fingerprints and totals, in the order of starting."""
        names = ("run", "started", "dataset", "template", "model", "trials", "passes", "tokens", "harnesses")
        sql = (
            "SELECT run, started, dataset, template, model, count(outcome), coalesce(sum(outcome), 0), "
            "coalesce(sum(tokens), 0), group_concat(DISTINCT harness) FROM runs LEFT JOIN trials USING (run) "
            "GROUP BY run ORDER BY started"
        )
        return [dict(zip(names, row, strict=True)) for row in self._rows(sql)]

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _totals(self, run: str) -> Iterator[Cell]:
        sql = (
            "SELECT sample, family, run, 0, sum(outcome), count(*) FROM trials "
            "WHERE outcome IS NOT NULL AND run = ? GROUP BY sample"
        )
        return (Cell(*row) for row in self._rows(sql, (run,)))

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._telling(), self._lock:
            return self._db.execute(sql, values).fetchall()

    @contextmanager
    def _telling(self) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as problem:
            raise UserError(f"the history of trials {self.path}: {problem}") from problem


@frozen
class History:
    """A store at work for one run, off the loop. ``clock`` gives seconds since 1970."""

    store: Store
    run: RunIdentity
    clock: Callable[[], float]

    async def begin(self) -> None:
        await self._off(self.store.begin, self.run, self.clock())

    async def add(self, trials: Sequence[Trial]) -> None:
        """Keep them. Once begun it ends, whatever is cancelled."""
        if trials:
            await self._off(self.store.add, self.run.run, trials, self.clock())

    async def known(self, harnesses: Collection[str]) -> list[Cell]:
        """What other runs of the same model and template showed, with agent sections of these fingerprints."""
        marks = ", ".join("?" * len(harnesses))
        where = f"model = ? AND template = ? AND run != ? AND purpose != 'eval' AND harness_hash IN ({marks})"
        return await self._off(self.store.cells, where, (self.run.model, self.run.template, self.run.run, *harnesses))

    async def sessions(self) -> set[str]:
        """Names of the run's sessions whose trial has an outcome."""
        return await self._off(self.store.sessions, self.run.run)

    async def counts(self) -> dict[str, tuple[int, int]]:
        """(passes, trials) of every sample in the run."""
        return await self._off(self.store.counts, self.run.run)

    async def _off(self, function: Callable[..., T], *arguments: Any) -> T:
        with trio.CancelScope(shield=True):
            found = await trio.to_thread.run_sync(function, *arguments)
        return found


def by_family(cells: Iterable[Cell]) -> Mapping[str, list[Cell]]:
    """Cells by family, samples of a version added up by run."""
    found: dict[str, dict[tuple[str, int], Cell]] = {}
    for cell in cells:
        family = found.setdefault(cell.family, {})
        place = cell.run, cell.version
        before = family.get(place, Cell("", cell.family, cell.run, cell.version, 0, 0))
        family[place] = attrs.evolve(before, passes=before.passes + cell.passes, trials=before.trials + cell.trials)
    return {name: list(cells.values()) for name, cells in found.items()}
