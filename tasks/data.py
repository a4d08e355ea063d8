"""Samples: where rows come from, and in which order. A row is one sample config, laid on top of its Task Config.

A source is a file (see ``data_files``), or ``NAME/SPLIT`` of a registered dataset: a callable
``(split, seed, **options)`` that gives rows, the same for the same arguments, endlessly or not. NAME may be
``module:attribute``; an attribute that is no callable is taken as the rows themselves. Rows keep the order of their
source; ``repeat`` makes finite rows endless, in a new seeded order each time round. Knows no task.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from uniagent.engine.errors import UserError, nearest
from uniagent.engine.registry import load, names
from uniagent.tasks.data_files import Row, is_file, rows_of


def samples(source: str, *, seed: int, options: Mapping[str, Any] | None = None, repeat: bool = False) -> Iterator[Row]:
    """The rows of a source. Raises UserError for one that does not exist or is empty, and at a row that is no table."""
    options = options or {}
    if is_file(source):
        return _finite(rows_of(Path(source)), source, seed, options, repeat)
    name, _, split = source.rpartition("/")
    if not name or (name not in names("datasets") and ":" not in name):
        known = nearest(name or source, names("datasets"))
        raise UserError(f"samples {source!r}: no such file, and no dataset of this name (NAME/SPLIT): {known}")
    dataset = load("datasets", name)
    if not callable(dataset):
        return _finite(list(dataset), source, seed, options, repeat)
    _check_options(dataset, source, options)
    rows: Iterator[Row] = iter(dataset(split, seed, **options))
    return rows


def _finite(rows: Sequence[Row], source: str, seed: int, options: Mapping[str, Any], repeat: bool) -> Iterator[Row]:
    if options:
        raise UserError(f"{source}: rows take no options, but {sorted(options)} are set; remove them")
    return _in_orders(rows, seed) if repeat else iter(rows)


def _in_orders(rows: Sequence[Row], seed: int) -> Iterator[Row]:
    epoch = 0
    while True:
        order = list(range(len(rows)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from (rows[i] for i in order)
        epoch += 1


def _check_options(dataset: Any, source: str, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(dataset).parameters
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name in parameters if name not in ("split", "seed")]
    for option in options:
        if option not in known and not free:
            raise UserError(f"samples {source!r}: no option {option!r}: {nearest(option, known)}")
