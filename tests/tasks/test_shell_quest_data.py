"""The samples of shell_quest: deterministic, with one answer each, and split by combinations."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from uniagent.engine.errors import UserError
from uniagent.tasks.shell_quest.data import KEEP, samples
from uniagent.tasks.shell_quest.words import FAMILIES


def rows(split: str, seed: int, count: int, **options: Any) -> list[dict[str, Any]]:
    return list(islice(samples(split, seed, **options), count))


def combination(row: dict[str, Any]) -> tuple[object, ...]:
    job, files = row["metadata"]["job"], frozenset(row["metadata"]["files"])
    match row["metadata"]["family"]:
        case "rename":
            return ("rename", job["name"], job["other"])
        case "copy" | "count" as family:
            return (family, job["name"], files)
        case family:
            return (family, files)


def test_a_stream_is_a_function_of_split_and_seed() -> None:
    assert rows("train", 3, 50) == rows("train", 3, 50)
    assert rows("train", 3, 50) != rows("train", 4, 50)


def test_training_never_shows_a_held_out_combination() -> None:
    train = {combination(row) for row in rows("train", 0, 3000)}
    held_out = {combination(row) for row in rows("heldout", 0, 1500)}
    assert not train & held_out
    assert len(held_out) > 500


def test_held_out_samples_are_balanced_over_the_families() -> None:
    assert set(Counter(row["metadata"]["family"] for row in rows("heldout", 777, 70)).values()) == {10}


def test_every_job_has_one_answer() -> None:
    for row in rows("train", 1, 500):
        metadata, job = row["metadata"], row["metadata"]["job"]
        files = {name: text for name, text in metadata["files"].items() if name != KEEP}
        assert 3 <= len(files) <= 6
        assert len({len(text) for text in files.values()}) == len(files)
        lines = {name: text.count("\n") for name, text in files.items()}
        assert len(set(lines.values())) == len(files)
        removed = files.keys() - metadata["expected"].keys()
        match metadata["family"]:
            case "largest":
                assert removed == {max(files, key=lambda name: len(files[name]))}
            case "smallest":
                assert removed == {min(files, key=lambda name: len(files[name]))}
            case "find" | "delword":
                assert [name for name, text in files.items() if job["word"] in text.split()] == [job["name"]]
            case "count":
                assert metadata["expected"]["answer.txt"] == str(lines[job["name"]])


def test_families_can_be_chosen() -> None:
    chosen = rows("train", 0, 40, families=("copy", "find"))
    assert {row["metadata"]["family"] for row in chosen} == {"copy", "find"}
    assert {row["metadata"]["family"] for row in rows("train", 0, 200)} == set(FAMILIES)


def test_an_unknown_split_or_family_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'heldout'"):
        rows("held_out", 0, 1)
    with pytest.raises(UserError, match="did you mean 'rename'"):
        rows("train", 0, 1, families=("rname",))
