"""Fingerprints change with what they stand for, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from uniagent.engine import fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (tmp_path / name).write_text(name)
    return tmp_path


def of(model: Path, **changes: object) -> dict[str, str]:
    parts: dict[str, object] = {"config": "a = 1", "template": "{{ x }}", "rows": [{"name": "t", "n": 1}]}
    return fingerprint.of_run(model=model, **{**parts, **changes})


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"config": "a = 2"}, "config"),
        ({"template": "{{ y }}"}, "template"),
        ({"rows": [{"name": "t", "n": 2}]}, "dataset"),
        ({"rows": [{"name": "t", "n": 1}] * 2}, "dataset"),
    ],
)
def test_each_part_has_its_own(model: Path, changes: dict[str, object], differs: str) -> None:
    before, after = of(model), of(model, **changes)
    assert [part for part in before if before[part] != after[part]] == [differs]


@pytest.mark.parametrize(
    ("name", "differs"), [("model.safetensors", ["model"]), ("tokenizer.json", ["tokenizer"]), ("README.md", [])]
)
def test_files_count_for_what_they_are(model: Path, name: str, differs: list[str]) -> None:
    before = of(model)
    (model / name).write_text("changed")
    after = of(model)
    assert [part for part in before if before[part] != after[part]] == differs


def test_the_order_of_keys_in_a_row_does_not_count(model: Path) -> None:
    assert of(model, rows=[{"n": 1, "name": "t"}]) == of(model)
    assert all(len(value) == 64 for value in of(model).values())


def test_text_that_is_no_unicode_has_one_too() -> None:
    assert fingerprint.of_text("\ud800") != fingerprint.of_text("\ud801")


def test_software_names_what_computes() -> None:
    assert {"python", "uniagent", "torch", "trio"} <= fingerprint.software().keys()
    assert "" not in fingerprint.software().values()
