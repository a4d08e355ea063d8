"""Samples: where rows come from, and in which order. A row is one sample config, laid on top of its Task Config.

A source is a JSONL file, or ``NAME/SPLIT`` of a registered dataset: a callable ``(split, seed, **options)`` that gives
rows, the same for the same arguments, endlessly or not. NAME may be ``module:attribute``. Rows keep the order of
their source; ``repeat`` makes a file endless, in a new seeded order each time round. Knows no task.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from uniagent.engine.errors import UserError, nearest
from uniagent.engine.registry import load, names

Row = dict[str, Any]


def samples(source: str, *, seed: int, options: Mapping[str, Any] | None = None, repeat: bool = False) -> Iterator[Row]:
    """The rows of a source. Raises UserError for one that does not exist or is empty, and at a row that is no table."""
    if Path(source).is_file():
        if options:
            raise UserError(f"{source}: a file takes no options, but {sorted(options)} are set; remove them")
        return _in_orders(rows_of(Path(source)), seed, source) if repeat else iter(rows_of(Path(source)))
    name, _, split = source.rpartition("/")
    if not name or (name not in names("datasets") and ":" not in name):
        known = nearest(name or source, names("datasets"))
        raise UserError(f"samples {source!r}: no such file, and no dataset of this name (NAME/SPLIT): {known}")
    return _registered(load("datasets", name), source, split, seed, dict(options or {}))


def rows_of(path: Path) -> list[Row]:
    """All rows of a JSONL file; raises UserError with the line number of the first bad one."""
    rows = []
    for number, row in numbered_rows(path):
        if isinstance(row, str):
            raise UserError(f"{path}:{number}: {row}")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: holds no sample")
    return rows


def numbered_rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    """(line number from 1, row) for every line that is not blank; a bad line gives what is wrong in place of a row."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _row(line)
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{path}: cannot read the samples: {problem}") from None


def _row(line: str) -> Row | str:
    try:
        row = json.loads(line)
    except ValueError as problem:
        return f"not valid JSON: {problem}"
    return row if isinstance(row, dict) else "a sample is a JSON object"


def _in_orders(rows: list[Row], seed: int, source: str) -> Iterator[Row]:
    epoch = 0
    while True:
        order = list(range(len(rows)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from (rows[i] for i in order)
        epoch += 1


def _registered(dataset: Any, source: str, split: str, seed: int, options: dict[str, Any]) -> Iterator[Row]:
    parameters = inspect.signature(dataset).parameters
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name in parameters if name not in ("split", "seed")]
    for option in options:
        if option not in known and not free:
            raise UserError(f"samples {source!r}: no option {option!r}: {nearest(option, known)}")
    rows: Iterable[Row] = dataset(split, seed, **options)
    return iter(rows)
