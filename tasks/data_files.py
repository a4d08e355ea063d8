"""Rows of a sample file: JSONL, Parquet, or a Hugging Face dataset saved to disk (a folder of Arrow files).

Columns cannot leave a key out of one row alone, so a null in Parquet and Arrow stands for a key that is not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uniagent.engine.errors import UserError

Row = dict[str, Any]


def is_file(source: str) -> bool:
    """Whether a source is a sample file (or a folder that holds one) and not the name of a dataset."""
    return Path(source).is_file() or (Path(source) / "state.json").is_file()


def rows_of(path: Path) -> list[Row]:
    """All rows; raises UserError with the number of the first bad one, or when there is none."""
    rows = []
    for number, row in numbered_rows(path):
        if isinstance(row, str):
            raise UserError(f"{path}:{number}: {row}")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: holds no sample")
    return rows


def numbered_rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    """(line of JSONL or row of a table, from 1; the row); a bad line gives what is wrong in place of a row."""
    try:
        if path.suffix == ".parquet" or path.is_dir():
            yield from enumerate(_table(path), 1)
        else:
            yield from _lines(path)
    except (OSError, ValueError) as problem:
        raise UserError(f"{path}: cannot read the samples: {problem}") from None


def _lines(path: Path) -> Iterator[tuple[int, Row | str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _row(line)


def _row(line: str) -> Row | str:
    try:
        row = json.loads(line)
    except ValueError as problem:
        return f"not valid JSON: {problem}"
    return row if isinstance(row, dict) else "a sample is a JSON object"


def _table(path: Path) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{path}: Parquet and Arrow need a package: pip install pyarrow") from None
    if path.is_dir():  # what datasets.Dataset.save_to_disk leaves: state.json names the Arrow streams
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        files = [path / one["filename"] for one in state["_data_files"]]
        batches = (batch for file in files for batch in pa.ipc.open_stream(file.read_bytes()))
    else:
        batches = pq.ParquetFile(path).iter_batches()
    for batch in batches:
        yield from (without_nulls(row) for row in batch.to_pylist())


def without_nulls(value: Any) -> Any:
    """The value without keys whose value is null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
