"""Sources of samples, and their check."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from uniagent.engine import registry
from uniagent.engine.errors import UserError
from uniagent.tasks.data import samples
from uniagent.tasks.data_cli import main


def counted(split: str, seed: int, *, start: int = 0) -> Iterator[dict[str, Any]]:
    return iter({"name": split, "metadata": {"n": start + i, "seed": seed}} for i in range(3))


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN["datasets"], "counted", f"{__name__}:counted")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"name": "t", "metadata": {"n": n}}) + "\n" for n in range(20)))
    return path


def numbers(rows: Iterator[dict[str, Any]], count: int) -> list[int]:
    return [row["metadata"]["n"] for row in islice(rows, count)]


def test_a_file_is_read_once_in_its_order(file: Path) -> None:
    assert numbers(samples(str(file), seed=5), 100) == list(range(20))


def test_a_repeated_file_gives_every_row_each_time_round_in_a_new_order(file: Path) -> None:
    rows = numbers(samples(str(file), seed=5, repeat=True), 60)
    rounds = [rows[i : i + 20] for i in (0, 20, 40)]
    assert all(sorted(r) == list(range(20)) for r in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    assert rows == numbers(samples(str(file), seed=5, repeat=True), 60)
    assert rows != numbers(samples(str(file), seed=6, repeat=True), 60)


def test_a_registered_dataset_gets_split_seed_and_options() -> None:
    rows = list(samples("counted/easy", seed=9, options={"start": 7}))
    assert [row["name"] for row in rows] == ["easy"] * 3
    assert rows[0]["metadata"] == {"n": 7, "seed": 9}


def test_a_dotted_name_is_a_dataset() -> None:
    assert numbers(samples(f"{__name__}:counted/easy", seed=0), 9) == [0, 1, 2]


LISTED = [{"name": "t", "metadata": {"n": n}} for n in range(3)]


def test_an_attribute_that_is_no_callable_is_the_rows() -> None:
    assert numbers(samples(f"{__name__}:LISTED/any", seed=0), 9) == [0, 1, 2]
    assert sorted(numbers(samples(f"{__name__}:LISTED/any", seed=0, repeat=True), 6)) == [0, 0, 1, 1, 2, 2]


def test_parquet_and_a_saved_hugging_face_dataset_leave_nulls_out(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"name": "a", "agent": {"max_steps": 3}, "metadata": {"files": {"x": "1"}}},
        {"name": "b", "prompt": [{"role": "user", "content": "hi"}], "metadata": {"files": {"y": "2"}}},
    ]
    table = pa.Table.from_pylist([{"name": None, "agent": None, "prompt": None, **row} for row in rows])
    pq.write_table(table, tmp_path / "rows.parquet")
    saved = tmp_path / "saved"
    saved.mkdir()
    with pa.OSFile(str(saved / "data-00000.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000.arrow"}]}))
    assert list(samples(str(tmp_path / "rows.parquet"), seed=0)) == rows
    assert list(samples(str(saved), seed=0)) == rows
    (tmp_path / "bad.parquet").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot read the samples"):
        samples(str(tmp_path / "bad.parquet"), seed=0)


def test_unknown_sources_and_options_name_the_nearest(file: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'counted'"):
        samples("conted/easy", seed=0)
    with pytest.raises(UserError, match="no such file"):
        samples("nothing.jsonl", seed=0)
    with pytest.raises(UserError, match=r"no option 'strat': did you mean 'start'\?"):
        samples("counted/easy", seed=0, options={"strat": 1})
    with pytest.raises(UserError, match="take no options"):
        samples(str(file), seed=0, options={"start": 1})


@pytest.mark.parametrize(
    ("line", "says"), [("{", "not valid JSON"), ("[1]", "a sample is a JSON object"), ("", "holds no sample")]
)
def test_a_bad_file_is_told_by_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(UserError, match=says) as error:
        list(samples(str(path), seed=0))
    assert str(path) in str(error.value)
    assert (":2:" in str(error.value)) == bool(line)


def test_data_check_counts_the_good_and_tells_every_bad_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, tasks = tmp_path / "rows.jsonl", tmp_path / "tasks.yaml"
    tasks.write_text("- name: a\n- name: b")
    path.write_text('{"name": "a"}\n{"name": "b"}\n\n{"name": "c"}\n{"name": "a", "promt": 1}\nxx\n')
    assert main(["check", str(path), "--tasks", str(tasks)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"{path}:4: there is no task 'c'")
    assert told[1].startswith(f"{path}:5")
    assert "'promt'" in told[1]
    assert told[2].startswith(f"{path}:6: not valid JSON")
    assert told[3] == f"{path}: 2 good samples (1 a, 1 b), 3 problems"


def test_data_check_without_a_task_config_checks_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"name": "anything"}\n')
    assert main(["check", str(path)]) == 0
    path.write_text('{"nam": "anything"}\n')
    assert main(["check", str(path)]) == 1
