"""What may be drawn next: entries with rows behind them. An entry of a finite data set is a row; an entry of an endless
one is a family, whose next row is the one that has waited longest.

Invariants: a row is in flight at most once, while the data has others; rows of an endless source are handed out once;
at most ``WINDOW`` rows of it are held, and a draw reads at most ``LOOK``. Knows no estimate and no strategy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from uniagent.engine.curriculum.estimates import Numbers
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json

Row = Mapping[str, Json]
WINDOW = 1024  # rows of an endless source that are held
LOOK = 32  # rows that one draw may read of it
LOW = 8  # rows of a family below which more are read


class Pool(Protocol):
    """N entries: ``share`` [N] of the data, ``family`` [N] as an index into ``names``."""

    names: list[str]

    @property
    def share(self) -> Numbers: ...
    @property
    def family(self) -> npt.NDArray[np.int64]: ...
    def ready(self) -> npt.NDArray[np.bool_]:
        """[N] which entries have a row to give now; none: the data is at its end."""
        ...

    def take(self, entry: int) -> tuple[Row, int]:
        """A row of the entry, and its number in the source."""
        ...

    def give_back(self, entry: int) -> None:
        """The row taken of the entry is in flight no longer."""
        ...

    def again(self, number: int) -> Row:
        """A row by its number that was taken before a restart; in flight from now."""
        ...

    def sight(self) -> list[Row]:
        """Rows to know the data by: all, or those of the first window."""
        ...

    def state(self) -> Json: ...
    def restore(self, state: Json, flying: Sequence[int]) -> None:
        """Go on from a state, with the rows of these numbers in flight."""
        ...


def family_of(row: Row, path: str) -> str:
    """The text at a dotted path of a row; where there is none, the task's name."""
    found: Json = row
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return str(row.get("name")) if found is None else str(found)


class Rows:
    """A finite data set."""

    def __init__(self, rows: Sequence[Row], path: str) -> None:
        self.rows = rows
        families = [family_of(row, path) for row in rows]
        self.names = sorted(set(families))
        index = {name: i for i, name in enumerate(self.names)}
        self.family = np.array([index[name] for name in families], np.int64)
        self.share: Numbers = np.full(len(rows), 1 / len(rows))
        self._flying = np.zeros(len(rows), np.int64)

    def ready(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self._flying == self._flying.min())  # where all are in flight, the least so

    def take(self, entry: int) -> tuple[Row, int]:
        self._flying[entry] += 1
        return self.rows[entry], entry

    def give_back(self, entry: int) -> None:
        self._flying[entry] -= 1

    def again(self, number: int) -> Row:
        return self.take(number)[0]

    def sight(self) -> list[Row]:
        return list(self.rows)

    def state(self) -> Json:
        return {"rows": len(self.rows)}

    def restore(self, state: Json, flying: Sequence[int]) -> None:
        if state != self.state():
            raise UserError(
                f"tasks.data has {len(self.rows)} samples, the checkpoint's had {state.get('rows', 'no end')}: go on "
                "with the same data, or start a run of its own from the weights (model.path = .../hf)"
            )


class Stream:
    """An endless data set, or one whose end is not known."""

    def __init__(self, rows: Iterator[Row], path: str) -> None:
        self._rows, self._path = rows, path
        self.names: list[str] = []
        self._seen: list[int] = []  # rows of each family so far
        self._waiting: list[deque[tuple[int, Row]]] = []
        self._read = 0
        self._ended = False
        self._again: dict[int, Row] = {}
        while self._read < WINDOW and self._next() is not None:
            pass

    @property
    def share(self) -> Numbers:
        return np.array(self._seen, np.float64) / max(1, sum(self._seen))

    @property
    def family(self) -> npt.NDArray[np.int64]:
        return np.arange(len(self.names))

    def ready(self) -> npt.NDArray[np.bool_]:
        return np.array([bool(w) for w in self._waiting], np.bool_)

    def take(self, entry: int) -> tuple[Row, int]:
        number, row = self._waiting[entry].popleft()
        for _ in range(LOOK):
            if len(self._waiting[entry]) >= LOW or self._next() is None:
                break
        return row, number

    def give_back(self, entry: int) -> None: ...

    def again(self, number: int) -> Row:
        return self._again.pop(number)

    def sight(self) -> list[Row]:
        return [row for _, row in sorted((pair for w in self._waiting for pair in w), key=lambda pair: pair[0])]

    def state(self) -> Json:
        return {
            "read": self._read,
            "names": self.names,
            "seen": self._seen,
            "waiting": [[n for n, _ in w] for w in self._waiting],
        }

    def restore(self, state: Json, flying: Sequence[int]) -> None:
        """Read on to where the state was made, from the source's beginning."""
        if "read" not in state:
            raise UserError("tasks.data has no known end, the checkpoint's had: go on with the same data")
        held = dict(pair for w in self._waiting for pair in w)
        wanted = {n for numbers in state["waiting"] for n in numbers} | set(flying)
        rows = {n: row for n, row in held.items() if n in wanted}
        for number in range(self._read, state["read"]):
            row = next(self._rows, None)
            if row is None:
                raise UserError(f"the data ended after {number} rows; the checkpoint had read {state['read']}")
            if number in wanted:
                rows[number] = row
        self.names, self._seen, self._read = list(state["names"]), list(state["seen"]), state["read"]
        self._waiting = [deque((n, rows[n]) for n in numbers) for numbers in state["waiting"]]
        self._again = {n: rows[n] for n in flying}

    def _next(self) -> Row | None:
        """One more row into the window; the largest family loses its oldest where the window is full."""
        row = None if self._ended else next(self._rows, None)
        if row is None:
            self._ended = True
            return None
        name = family_of(row, self._path)
        if name not in self.names:
            self.names.append(name)
            self._seen.append(0)
            self._waiting.append(deque())
        entry = self.names.index(name)
        self._seen[entry] += 1
        self._waiting[entry].append((self._read, row))
        self._read += 1
        if sum(map(len, self._waiting)) > WINDOW:
            max(self._waiting, key=len).popleft()
        return row
