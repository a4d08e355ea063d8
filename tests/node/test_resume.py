"""A run that is killed and resumed ends with the weights of one that never was; every episode counts once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from uniagent.engine import config_file
from uniagent.engine.cli import main
from uniagent.engine.journal import lines, read
from uniagent.engine.run_folder import create, newest_state, reopen

STEPS, GROUPS, SIZE = 4, 2, 4  # groups and their size are the fixture's
# the gradient depends on the tokens alone, not on the last bits of their logprobs, which an engine's batching moves
SETS = (f"run.steps={STEPS}", "eval.data=''", "learner.correction='none'", "checkpoint.every=1", "checkpoint.keep=9")
DIES = """
import os
from uniagent.engine.learner import snapshots
whole = snapshots.commit
def commit(part, target):
    if target.name == "step-3":
        os.kill(os.getpid(), 9)
    whole(part, target)
snapshots.commit = commit
"""
FULL = """
from uniagent.engine.learner import snapshots
whole = snapshots.commit
def commit(part, target):
    if target.name == "step-2":
        raise OSError(28, "No space left on device")
    whole(part, target)
snapshots.commit = commit
"""


def resume(quickstart: Any, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    sets = [part for s in more for part in ("--set", s)]
    command = [sys.executable, "-m", "uniagent.engine", "train", str(run / "config.toml"), "--resume", str(run), *sets]
    return subprocess.run(command, capture_output=True, text=True, env=quickstart.environment, timeout=300)


def weights(run: Path, step: int = STEPS) -> dict[str, Any]:
    return load_file(run / "checkpoints" / f"step-{step}" / "hf" / "model.safetensors")


def worst(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def trained(run: Path) -> list[tuple[int, int, int]]:
    return sorted((r.use.step, r.episode.sample, r.episode.replica) for r in read(run / "episodes.jsonl"))


EVERY = [(g // GROUPS + 1, g, r) for g in range(STEPS * GROUPS) for r in range(SIZE)]


@pytest.fixture(scope="module")
def sets(quickstart: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The settings of all runs here; no command is stopped for being slow, as it would be on a busy machine."""
    patient = tmp_path_factory.mktemp("tasks") / "tasks.toml"
    text = quickstart.config.with_name("quickstart_tasks.toml").read_text()
    assert "timeout_s = 5 " in text
    patient.write_text(text.replace("timeout_s = 5 ", "timeout_s = 60 "))
    return [*SETS, f"tasks.file='{patient}'"]


@pytest.fixture(scope="module")
def whole(quickstart: Any, sets: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    done = quickstart.train(run, *sets)
    assert done.returncode == 0, done.stderr
    assert trained(run) == EVERY
    return run


@pytest.mark.slow
def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(
    quickstart: Any, sets: list[str], whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert quickstart.train(run, *sets, prelude=DIES).returncode == -signal.SIGKILL
    assert sorted(p.name for p in (run / "checkpoints").glob("step-*")) == ["step-1", "step-2"]
    assert len(list(lines(run / "episodes.jsonl"))) > 1 + 2 * GROUPS * SIZE  # step 3 is in the record, and lost
    done = resume(quickstart, run)
    assert done.returncode == 0, done.stderr
    assert "goes on from" in done.stdout
    assert worst(weights(run), weights(whole)) == 0.0
    assert trained(run) == EVERY
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert quickstart.summary(run)["policy_version"] == STEPS
    assert quickstart.summary(run)["tokens"] == quickstart.summary(whole)["tokens"]


@pytest.mark.slow
def test_two_ranks_that_were_killed_go_on_as_one(quickstart: Any, sets: list[str], whole: Path, tmp_path: Path) -> None:
    run, program = tmp_path / "run", tmp_path / "program.py"
    program.write_text(f"import sys\n{DIES}\nfrom uniagent.engine import cli\nsys.exit(cli.main(sys.argv[1:]))\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    with subprocess.Popen(
        [*launch, *quickstart.arguments(run, *sets)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=quickstart.environment,
        start_new_session=True,
    ) as process:
        try:
            assert process.wait(timeout=240) != 0
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert sorted(p.name for p in (run / "checkpoints").glob("step-*")) == ["step-1", "step-2"]
    done = resume(quickstart, run)
    assert done.returncode == 0, done.stderr
    assert worst(weights(run), weights(whole)) < 1e-5
    assert trained(run) == EVERY


@pytest.mark.slow
def test_a_run_goes_on_in_a_folder_of_its_own(quickstart: Any, sets: list[str], whole: Path, tmp_path: Path) -> None:
    fork, state = tmp_path / "fork", whole / "checkpoints" / "step-3" / "dcp"
    command = [*quickstart.command(fork, *sets), "--checkpoint", str(state)]
    done = subprocess.run(command, capture_output=True, text=True, env=quickstart.environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert worst(weights(fork), weights(whole)) == 0.0
    assert trained(fork) == [e for e in EVERY if e[0] == STEPS]


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_a_sentence_and_leaves_the_last_good_checkpoint(
    quickstart: Any, sets: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = quickstart.train(run, *sets, prelude=FULL)
    assert done.returncode == 2
    assert "step-2: the disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-1"]


def test_what_cannot_be_resumed_is_told_before_anything_is_loaded(quickstart: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", str(quickstart.config), "--resume", str(run)]) == 2
    assert main(["train", str(quickstart.config), "--checkpoint", str(run), "--run-dir", str(tmp_path / "x")]) == 2
    assert not (tmp_path / "x").exists()


def test_a_resumed_run_is_the_same_run(quickstart: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_file.load(quickstart.config)
    folder = create(tmp_path / "run", config, stem="x", now=datetime(2026, 1, 1, tzinfo=UTC))
    assert newest_state(folder) is None
    other = config_file.load(quickstart.config, ["run.steps=7", "learner.lr=1e-4"])
    assert reopen(folder.path, other)[1] == ["learner.lr", "run.steps"]
    assert reopen(folder.path, other)[1] == []
    assert main(["train", str(quickstart.config), "--resume", str(folder.path), "--set", "run.seed=5"]) == 2
    assert "run.seed" in capsys.readouterr().err
    for step, whole in ((2, True), (10, True), (11, False)):
        (folder.checkpoint(step) / "dcp").mkdir(parents=True)
        if whole:
            (folder.checkpoint(step) / "state.json").write_text("{}")
    assert newest_state(folder) == folder.checkpoint(10)
