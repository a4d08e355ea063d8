"""Rows of the published data sets, as they are, to samples: the row is the sample's metadata.

Nothing is fetched: ``path`` is a file that you have (JSONL or Parquet), or a folder of them as the data sets are
published (``test-00000-of-00001.parquet``, in ``data`` or not). Knows no particular data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from uniagent.engine.errors import UserError, nearest
from uniagent.engine.ports import Json
from uniagent.tasks.data_files import is_file, rows_of

ToSample = Callable[[Mapping[str, Json]], dict[str, Any]]


def samples(
    to_sample: ToSample,
    split: str,
    seed: int,
    *,
    path: str | None = None,
    instances: Sequence[str] = (),
    image: str | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of a split in their order, those of ``instances`` alone where some are named. ``image`` replaces the
    image of each sample (``{image}``: its own, ``{instance_id}``); empty: the sandbox is left to the Task Config.
    Raises UserError for what is not there."""
    if path is None:
        raise UserError("the data set needs the option path: a JSONL or Parquet file of its rows, or a folder of them")
    rows = [row for file in files(Path(path), split) for row in rows_of(file)]
    if instances:
        by_id = {str(row.get("instance_id")): row for row in rows}
        if missing := [name for name in instances if name not in by_id]:
            raise UserError(f"{path}: there is no instance {missing[0]!r}: {nearest(missing[0], by_id)}")
        rows = [by_id[name] for name in instances]
    return (placed(to_sample(row), image, row) for row in rows)


def placed(sample: dict[str, Any], image: str | None, row: Mapping[str, Json]) -> dict[str, Any]:
    """The sample with another image, or without a sandbox section of its own."""
    if image is None:
        return sample
    if not image:
        return {key: value for key, value in sample.items() if key != "sandbox"}
    name = image.format(image=sample["sandbox"]["image"], instance_id=row.get("instance_id", ""))
    return {**sample, "sandbox": {**sample["sandbox"], "image": name}}


def files(path: Path, split: str) -> list[Path]:
    """The file itself, or those of the split in a folder."""
    if is_file(str(path)):
        return [path]
    found = sorted(p for p in (*path.glob("*"), *path.glob("data/*")) if p.suffix in (".jsonl", ".parquet"))
    chosen = [p for p in found if p.name.startswith((f"{split}-", f"{split}."))]
    if not chosen:
        there = ", ".join(p.name for p in found[:10]) or "no JSONL or Parquet file"
        raise UserError(f"{path}: no file of the split {split!r}; there is: {there}")
    return chosen
