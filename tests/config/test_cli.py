"""The command line: what it offers, what it prints, and with which status it ends."""

from __future__ import annotations

import errno
import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli

import uniagent.engine
from uniagent.engine import cli, config_listing
from uniagent.engine.config import RunConfig
from uniagent.engine.config_file import load
from uniagent.engine.errors import UserError

Train = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "tasks.toml").write_text("")
    (tmp_path / "run.toml").write_text(
        '[tasks]\nfile = "tasks.toml"\ndata = "shell_quest/train"\n[eval]\ndata = "shell_quest/held_out"\n'
    )


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run entry points in the place of the real ones; tests set its ``train`` and ``evaluate``."""
    module = types.ModuleType("uniagent.engine.run")
    monkeypatch.setitem(sys.modules, "uniagent.engine.run", module)
    monkeypatch.setattr(uniagent.engine, "run", module, raising=False)
    return module


def raising(problem: BaseException) -> Train:
    def train(*_: object, **__: object) -> dict[str, Any]:
        raise problem

    return train


class TestWithoutNode:
    def test_help_lists_every_command_that_exists(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["--help"]) == 0
        out = capsys.readouterr().out
        for name in ("train", "eval", "show", "config"):
            assert f"\n  {name} " in out

    def test_nothing_given_is_a_mistake_that_gets_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([]) == 2
        assert "usage: uniagent COMMAND" in capsys.readouterr().out

    def test_a_command_that_is_not_installed_is_not_offered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(cli.COMMANDS, "fly", ("uniagent.engine.no_such.place:main", "fly"))
        assert "fly" not in cli.offered()
        assert cli.main(["fly"]) == 2

    def test_every_offered_command_is_there(self) -> None:
        for name in cli.offered():
            module, _, function = cli.COMMANDS[name][0].partition(":")
            assert callable(getattr(importlib.import_module(module), function)), name

    @pytest.mark.parametrize(
        ("argv", "said"),
        [
            (["trian"], "there is no command 'trian': did you mean 'train'?"),
            (["train"], "required: CONFIG (see uniagent train --help)"),
            (["train", "run.toml", "--jsn"], "there is no option --jsn: did you mean '--json'?"),
            (["train", "run.toml", "--set", "run.steps=1", "run.seed=2"], "write --set before each setting"),
            (["run.tom"], "there is no command 'run.tom'"),
            (["rum.toml"], "rum.toml: there is no such config file; did you mean 'run.toml'?"),
            (["train", "run.toml", "--set", "run.stpes=1"], "did you mean 'steps'?"),
            (["train", "run.toml", "--set", "tasks.data="], "tasks.data is not set"),
            (["eval", "run.toml", "--set", "eval.data="], "eval.data is not set"),
            (["eval", "run.toml", "--checkpoint", "nowhere"], "--checkpoint nowhere: it does not exist"),
            (["show", "nowhere"], "nowhere does not exist"),
            (["show", "."], ". holds no config.toml"),
        ],
    )
    def test_a_mistake_is_one_line_and_status_2(
        self, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(argv) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("uniagent: ")
        assert printed.err.count("\n") == 1
        assert said in printed.err
        assert printed.out == ""
        assert not Path("runs").exists()

    def test_evaluation_on_several_ranks_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert cli.main(["eval", "run.toml"]) == 2
        assert "without torchrun" in capsys.readouterr().err

    def test_config_prints_a_file_that_means_the_defaults(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["config"]) == 0
        Path("defaults.toml").write_text(capsys.readouterr().out)
        assert load("defaults.toml") == RunConfig()

    def test_config_as_json_has_every_key(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["config", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert {k: v for k, v in next(r for r in rows if r["key"] == "run.seed").items() if k != "help"} == {
            "key": "run.seed",
            "type": "whole number, ≥ 0",
            "default": 0,
        }

    def test_every_key_has_a_meaning(self) -> None:
        assert [row.key for row in config_listing.rows() if len(row.help) < 3] == []


class TestTrain:
    def test_it_writes_the_run_folder_and_says_where(self, node: Any, capsys: pytest.CaptureFixture[str]) -> None:
        scores = {"before": {"success": 0.25, "stderr": 0.02}, "after": {"success": 0.75, "success_greedy": 1.0}}
        node.train = lambda config, folder, progress, **how: {"eval": scores, "wall_s": 12.3, "loss": float("nan")}
        assert cli.main(["run.toml", "--set", "run.steps=3"]) == 0
        [folder] = Path("runs").iterdir()
        assert folder.name.startswith("run-20")
        assert tomli.loads((folder / "config.toml").read_text())["run"]["steps"] == 3
        assert json.loads((folder / "summary.json").read_text())["loss"] is None
        out = capsys.readouterr().out
        assert str(folder) in out
        assert "success 0.250 ± 0.020 → success 0.750, greedy 1.000" in out

    def test_with_json_standard_output_is_one_line(self, node: Any, capsys: pytest.CaptureFixture[str]) -> None:
        node.train = lambda config, folder, progress, **how: progress.step(1, {"loss": 1.0}) or {"tokens": 5}
        assert cli.main(["train", "run.toml", "--json", "--run-dir", "here"]) == 0
        printed = capsys.readouterr()
        assert printed.out == '{"tokens": 5}\n'
        assert "step   1/100  loss +1.0000" in printed.err

    def test_a_folder_that_holds_something_is_refused(self, node: Any, capsys: pytest.CaptureFixture[str]) -> None:
        node.train = lambda config, folder, progress, **how: {}
        assert cli.main(["train", "run.toml", "--run-dir", "here"]) == 0
        assert cli.main(["train", "run.toml", "--run-dir", "here"]) == 2
        assert "the run folder here is not empty" in capsys.readouterr().err

    def test_the_exit_status_is_the_nodes(self, node: Any) -> None:
        node.train = lambda config, folder, progress, **how: {"exit_status": 143}
        assert cli.main(["train", "run.toml", "--run-dir", "here"]) == 143
        assert json.loads(Path("here/summary.json").read_text()) == {"exit_status": 143}

    def test_a_crash_names_its_cause_and_keeps_the_traceback(
        self, node: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        inner = ExceptionGroup("x", [ExceptionGroup("y", [ZeroDivisionError("no tokens\nmore")]), ValueError("later")])
        node.train = raising(inner)
        assert cli.main(["train", "run.toml", "--run-dir", "here"]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("uniagent: crashed: ZeroDivisionError: no tokens")
        assert line.endswith("the full traceback is in here/crash.txt")
        assert "ValueError: later" in Path("here/crash.txt").read_text()

    def test_a_mistake_inside_the_run_is_a_line_and_no_crash(
        self, node: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        node.train = raising(ExceptionGroup("x", [UserError("no bwrap"), OSError("x"), UserError("no bwrap")]))
        assert cli.main(["train", "run.toml", "--run-dir", "here"]) == 2
        assert capsys.readouterr().err == "uniagent: no bwrap\n"
        assert not Path("here/crash.txt").exists()

    @pytest.mark.parametrize(
        "problem",
        [
            OSError(errno.ENOSPC, "No space left on device", "here/checkpoints/x"),
            RuntimeError("I/O error: No space left on device (os error 28)"),
        ],
    )
    def test_a_full_disk_is_no_crash_whoever_noticed(
        self, node: Any, problem: Exception, capsys: pytest.CaptureFixture[str]
    ) -> None:
        node.train = raising(ExceptionGroup("x", [problem]))
        assert cli.main(["train", "run.toml", "--run-dir", "here"]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "the disk is full; free some space or choose another folder with --run-dir" in line

    @pytest.mark.parametrize("group", [False, True])
    def test_ctrl_c_without_a_drain_is_130(self, node: Any, group: bool) -> None:
        stop = KeyboardInterrupt()
        node.train = raising(BaseExceptionGroup("x", [stop, ValueError()]) if group else stop)
        assert cli.main(["train", "run.toml", "--run-dir", "here"]) == 130


class TestEval:
    def test_it_gives_the_node_the_checkpoints_model(self, node: Any, capsys: pytest.CaptureFixture[str]) -> None:
        Path("r/checkpoints/step-9/hf").mkdir(parents=True)
        Path("r/checkpoints/step-9/hf/config.json").write_text("{}")
        seen = []
        node.evaluate = lambda config, checkpoint, progress, folder: (
            seen.append((checkpoint, folder)) or {"success": 0.5, "stderr": 0.01, "n": 448}
        )
        assert cli.main(["eval", "run.toml", "--checkpoint", "r/checkpoints/step-9", "--json"]) == 0
        assert seen == [(Path("r/checkpoints/step-9/hf"), None)]
        assert json.loads(capsys.readouterr().out)["success"] == 0.5

    def test_without_a_folder_nothing_is_written(self, node: Any) -> None:
        node.evaluate = lambda config, checkpoint, progress, folder: {"success": 0.5}
        before = sorted(Path.cwd().iterdir())
        assert cli.main(["eval", "run.toml"]) == 0
        assert sorted(Path.cwd().iterdir()) == before
