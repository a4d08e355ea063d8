"""A run of training from the command line: what it leaves, that it can be repeated, and how it ends when disturbed."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uniagent.engine.journal import Record, read


@pytest.fixture(scope="module")
def run(quickstart: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train") / "run"
    done = quickstart.train(folder, "run.steps=2")
    assert done.returncode == 0, done.stderr
    return folder


def trained(run: Path) -> list[Record]:
    return [r for r in read(run / "episodes.jsonl") if r.use.evaluation is None]


def test_a_run_leaves_config_metrics_episodes_checkpoint_and_summary(quickstart: Any, run: Path) -> None:
    found = quickstart.summary(run)
    assert found["steps"] == 2
    assert set(found["eval"]) == {"before", "after"}
    assert found["eval"]["after"]["n"] == 8
    assert {"wall_s", "tokens", "sandbox_s", "engine_s", "learner_s"} <= set(found)
    assert (run / "checkpoints" / "step-2" / "hf" / "model.safetensors").exists()
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert len(trained(run)) == 16
    assert "[run]" in (run / "config.toml").read_text()


def test_every_trained_token_has_a_logprob_and_a_version_and_every_ledger_balances(run: Path) -> None:
    for record in trained(run):
        ledger = record.episode.export.ledger
        assert ledger.sampled == ledger.trainable + ledger.context + sum(ledger.discarded.values())
        assert ledger.sampled > 0
        for t in record.episode.export.trajectories:
            assert np.isfinite(t.logprobs[t.loss_mask]).all()
            assert (t.versions[t.loss_mask] == record.use.step - 1).all()
        assert sum(record.use.tokens.values()) == ledger.trainable


def test_the_same_seed_gives_the_same_first_batch(quickstart: Any, run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert quickstart.train(again, "run.steps=1", "eval.data=''").returncode == 0
    assert first_batch(again) == first_batch(run)


def test_another_seed_gives_another_batch(quickstart: Any, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert quickstart.train(other, "run.steps=1", "run.seed=1", "eval.data=''").returncode == 0
    assert first_batch(other) != first_batch(run)


def first_batch(run: Path) -> list[Any]:
    return [
        (r.episode.session, r.episode.result.reward, [t.token_ids.tolist() for t in r.episode.export.trajectories])
        for r in trained(run)
        if r.use.step == 1
    ]


def test_an_alarm_that_stops_ends_the_run_saved_and_says_why(quickstart: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    alarm = ("alarms.entropy_below=9", "alarms.patience=2", 'alarms.stop=["entropy"]')
    done = quickstart.train(run, "run.steps=9", "eval.data=''", *alarm)
    assert done.returncode == 3, done.stderr
    assert "is below 9 for 2 steps in a row" in done.stdout
    found = quickstart.summary(run)
    assert (found["steps"], found["interrupted"]) == (2, True)
    assert found["stopped"].startswith("alarm entropy: ")
    assert (run / "checkpoints" / "step-2" / "hf" / "model.safetensors").exists()


def test_an_evaluation_of_several_episodes_a_sample_gives_pass_at_k(quickstart: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = quickstart.train(run, "run.steps=0", "eval.samples=3", "eval.n=4", "eval.top_k=50")
    assert done.returncode == 0, done.stderr
    found = quickstart.summary(run)["eval"]["before"]
    assert found["n"] == 12
    assert found["success"] <= found["pass@2"] <= found["pass@3"]
    assert found["pass@3_low"] <= found["pass@3"] <= found["pass@3_high"]


def test_a_learning_rate_of_zero_changes_no_weight(quickstart: Any, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    from uniagent.engine.model_files import folder

    run = tmp_path / "run"
    done = quickstart.train(run, "run.steps=1", "learner.lr=0.0", "eval.data=''")
    assert done.returncode == 0, done.stderr
    before = load_file(folder("builtin:tiny-shell") / "model.safetensors")
    after = load_file(run / "checkpoints" / "step-1" / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_ctrl_c_in_the_middle_drains_and_leaves_a_usable_folder(quickstart: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        quickstart.command(run, "run.steps=100000", "eval.data=''"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=quickstart.environment,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step"):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=120) == 130, rest
    finally:
        process.kill()
        process.communicate()
    assert "Ctrl-C" in rest
    found = quickstart.summary(run)
    assert found["interrupted"]
    assert found["steps"] >= 1
    assert Path(found["checkpoint"], "hf", "model.safetensors").exists()
    assert len(trained(run)) >= 8


def test_without_bubblewrap_the_run_ends_with_what_to_install(quickstart: Any, tmp_path: Path) -> None:
    done = quickstart.train(tmp_path / "run", "run.steps=1", "sandbox.options.local.bwrap='/nowhere/bwrap'")
    assert done.returncode == 2
    assert "bubblewrap" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2, done.stderr


def test_a_missing_model_folder_is_one_line(quickstart: Any, tmp_path: Path) -> None:
    done = quickstart.train(tmp_path / "run", "model.path='/nowhere/model'")
    assert done.returncode == 2
    assert "/nowhere/model" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_crash_names_its_cause_and_ends_with_a_status(quickstart: Any, tmp_path: Path) -> None:
    broken = (
        "from uniagent.adapters.engines.transformers import SlotEngine\n"
        "def step(self): raise RuntimeError('the device fell off the bus')\n"
        "SlotEngine.step = step"
    )
    done = quickstart.train(tmp_path / "run", "run.steps=1", prelude=broken)
    assert done.returncode == 1
    assert "the device fell off the bus" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in (tmp_path / "run" / "crash.txt").read_text()


@pytest.mark.slow
def test_three_steps_that_are_not_finite_stop_the_run_and_say_whose_they_were(quickstart: Any, tmp_path: Path) -> None:
    poison = (
        "import torch\n"
        "from uniagent.engine.learner.objective import Objective\n"
        "whole = Objective._losses\n"
        "Objective._losses = lambda self, tokens, *rest: torch.where("
        "self.session[tokens] == 0, torch.nan, whole(self, tokens, *rest))"
    )
    run = tmp_path / "run"
    done = quickstart.train(run, "run.steps=9", "eval.data=''", prelude=poison)
    assert done.returncode == 2
    assert "3 optimizer steps in a row had a non-finite loss" in done.stderr
    stopped = quickstart.summary(run)["stopped"]
    named = [r for r in trained(run) if r.episode.session in stopped]
    assert len(named) == 3
    assert all(r.use.tokens == {"skipped_step": r.episode.export.ledger.trainable} for r in named)
