"""Run folders and the files in them: fresh, found again, and readable after a full disk or a kill."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine import run_folder, storage
from uniagent.engine.config import RunConfig
from uniagent.engine.config_file import load
from uniagent.engine.errors import UserError
from uniagent.engine.storage import LineFile, plain, whole_lines, write_atomic

NOW = datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)


class TestCreate:
    def test_it_is_named_after_config_and_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        first = run_folder.create(None, RunConfig(), stem="quickstart", now=NOW)
        second = run_folder.create(None, RunConfig(), stem="quickstart", now=NOW)
        assert first.path == Path("runs/quickstart-20260203T040506Z")
        assert second.path == Path("runs/quickstart-20260203T040506Z-2")
        assert load(first.config) == RunConfig()

    def test_an_empty_folder_is_taken_a_used_one_and_a_file_are_not(self, tmp_path: Path) -> None:
        run_folder.create(tmp_path, RunConfig(), stem="x", now=NOW)
        with pytest.raises(UserError, match="is not empty; choose another with --run-dir"):
            run_folder.create(tmp_path, RunConfig(), stem="x", now=NOW)
        with pytest.raises(UserError, match=r"config\.toml is a file"):
            run_folder.create(tmp_path / "config.toml", RunConfig(), stem="x", now=NOW)

    def test_a_place_that_cannot_be_written_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"cannot write .*/file/run: Not a directory"):
            run_folder.create(tmp_path / "file" / "run", RunConfig(), stem="x", now=NOW)

    def test_a_full_disk_leaves_a_folder_that_can_be_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(storage.os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write .*config\.toml: the disk is full"):
            run_folder.create(tmp_path / "run", RunConfig(), stem="x", now=NOW)
        monkeypatch.undo()
        run_folder.create(tmp_path / "run", RunConfig(), stem="x", now=NOW)
        assert (tmp_path / "run" / "config.toml").is_file()


class TestCheckpoint:
    @pytest.mark.parametrize("given", ["run", "run/checkpoints/step-10", "run/checkpoints/step-10/hf"])
    def test_run_step_and_model_folder_mean_the_same(self, tmp_path: Path, given: str) -> None:
        for step in (2, 10):
            (tmp_path / f"run/checkpoints/step-{step}/hf").mkdir(parents=True)
            (tmp_path / f"run/checkpoints/step-{step}/hf/config.json").write_text("{}")
        (tmp_path / "run/checkpoints/step-10/dcp").mkdir()
        (tmp_path / "run/checkpoints/step-11").mkdir()  # cut off while it was written
        wanted = tmp_path / "run/checkpoints/step-10/hf"
        assert run_folder.find_checkpoint(tmp_path / given) == wanted
        assert run_folder.find_checkpoint(tmp_path / "run/checkpoints/step-10/dcp") == wanted

    def test_a_folder_without_a_model_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="holds no model"):
            run_folder.find_checkpoint(tmp_path)


class FullDisk:
    """``os.write`` on a disk with room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.room, self.write = room, os.write

    def __call__(self, fd: int, data: bytes | memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        n = self.write(fd, data[: self.room])
        self.room -= n
        return n


class TestLines:
    def test_a_full_disk_leaves_whole_lines_and_a_sentence(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "x.jsonl"
        with LineFile(path) as file:
            monkeypatch.setattr(storage.os, "write", FullDisk(25))
            with pytest.raises(UserError, match=r"x\.jsonl: the disk is full; free some space"):
                file.append([b"0123456789\n"] * 3)
            monkeypatch.undo()
            assert path.read_bytes() == b"0123456789\n" * 2
            file.append([b"after\n"])
        assert list(whole_lines(path)) == [b"0123456789", b"0123456789", b"after"]

    @given(st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"")), max_size=4), st.integers(0, 50))
    def test_a_kill_at_any_byte_costs_the_torn_line_only(
        self, tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cut: int
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "cut.jsonl"
        whole = b"".join(line + b"\n" for line in lines)
        path.write_bytes(whole[:cut])
        left = whole[:cut].split(b"\n")[:-1]
        assert list(whole_lines(path)) == left
        with LineFile(path) as file:
            file.append([b"next\n"])
        assert list(whole_lines(path)) == [*left, b"next"]

    def test_a_long_torn_line_is_cut_off_too(self, tmp_path: Path) -> None:
        path = tmp_path / "x.jsonl"
        path.write_bytes(b"first\n" + b"x" * 200_000)
        LineFile(path).close()
        assert path.read_bytes() == b"first\n"

    def test_a_missing_file_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"cannot read .*x\.jsonl: No such file"):
            list(whole_lines(tmp_path / "x.jsonl"))


def test_an_atomic_write_keeps_the_old_content_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(UserError, match="the disk is full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_plain_is_json_for_anything() -> None:
    import numpy as np

    value = {1: (np.float32(0.5), float("inf"), np.array([1, 2])), "p": Path("a"), "b": b"\xff", "s": {"y", "x"}}
    assert plain(value) == {"1": [0.5, None, [1, 2]], "p": "a", "b": "\\xff", "s": ["x", "y"]}
