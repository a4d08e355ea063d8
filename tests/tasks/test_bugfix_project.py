"""bugfix from a folder to a verdict: samples are made, and judged by hidden tests in a sandbox the agent never saw."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from uniagent.engine.errors import UserError
from uniagent.tasks.bugfix import cli, project, recipe
from uniagent.tasks.bugfix.project import Project, files_of, runtime
from uniagent.tasks.check_cli import main as check

SOURCE = '''"""Sums."""


def total(values, start=0):
    """The sum of the values, from start."""
    result = start
    for value in values:
        result = result + value
    return result


def unused(x):
    return x + 1
'''
TESTS = """import os

from sums import total


def test_total():
    assert total([1, 2]) == 3


def test_start():
    values = []
    assert total(values, start=5) == 5


def test_other():
    assert os.sep == "/"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, and a cache with what runs its tests, so that nothing is fetched."""
    monkeypatch.setenv("UNIAGENT_CACHE", str(tmp_path / "cache"))
    place = runtime(())
    place.mkdir(parents=True)
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in importlib.metadata.files(name) or ():
            if file.parts[0] not in ("..", "__pycache__") and file.suffix != ".pyc":
                (place / file.parent).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(file.locate()), place / file)
    (place / ".complete").touch()
    own = tmp_path / "sums"
    (own / "tests").mkdir(parents=True)
    (own / ".git").mkdir()
    (own / ".git" / "HEAD").write_text("the fix")
    (own / "sums.py").write_text(SOURCE)
    (own / "sums.pyc").write_bytes(b"the fix")
    (own / "tests" / "test_sums.py").write_text(TESTS)
    return own


def test_neither_history_nor_compiled_files_come_along(folder: Path) -> None:
    files = files_of(Project(str(folder)))
    assert set(files.texts) == {"sums.py", "tests/test_sums.py"}
    assert (files.sources, files.tests, files.packages) == (["sums.py"], ["tests/test_sums.py"], ("sums",))


def test_a_repository_is_cloned_at_a_commit_without_its_history(folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder / ".git")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    for words in (["init", "-q"], ["add", "sums.py"], ["commit", "-q", "-m", "one"], ["tag", "one"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(folder), str(tmp_path / "sums.git")], check=True)
    found = files_of(Project(f"{tmp_path}/sums.git#one"))
    assert set(found.texts) == {"sums.py"}
    assert not (found.root / ".git").exists()


@pytest.mark.parametrize("source", ["no/such/folder", "boltons", "boltons>=1"])
def test_what_is_no_project_is_told(source: str) -> None:
    with pytest.raises(UserError, match=r"boltons==26.2.0"):
        files_of(Project(source))


def test_names_for_ids() -> None:
    assert Project("python-slugify==9.2.0").name == "python-slugify"
    assert Project("https://example.org/a/My.Repo.git#main").name == "my-repo"
    assert project.is_test("tests/data/x.py")
    assert not project.is_test("src/contest.py")


@pytest.mark.slow
def test_from_a_folder_to_checked_samples(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, compact = tmp_path / "data.jsonl", tmp_path / "sums.jsonl"
    assert cli.main(["make", str(folder), "--out", str(out), "--recipe", str(compact), "--n", "3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    assert 0 < said["samples"] == len(rows) <= 3
    assert said["rejected"]["not tried: no test calls the function"] > 0
    for row in rows:
        metadata = row["metadata"]
        assert metadata["function"] == "total"
        assert "sum of the values" in metadata["problem_statement"]
        assert "tests/test_sums.py::test_other" in metadata["PASS_TO_PASS"]
    assert recipe.read(compact).tests == ("tests/test_sums.py::test_total", "tests/test_sums.py::test_start",
                                          "tests/test_sums.py::test_other")  # fmt: skip
    tasks = tmp_path / "tasks.toml"
    tasks.write_text('name = "bugfix"\n')
    assert check(["check", str(tasks), str(out), "--n", "1", "--runs", "2", "--json"]) == 0
    rewards = json.loads(capsys.readouterr().out.splitlines()[-1])["mean_reward"]
    assert (rewards["oracle"], rewards["solution"], rewards["nothing"]) == (1.0, 1.0, 0.0)
    assert (rewards["forged_results"], rewards["tests_removed"]) == (0.0, 0.0)
