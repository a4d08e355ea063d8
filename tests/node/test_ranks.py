"""Two ranks by torchrun train exactly like one process, from the same command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

STEPS = 5


def torchrun(environment: dict[str, str], *arguments: str, timeout_s: float = 240) -> tuple[int, str]:
    """(exit status, standard error); the ranks do not outlive a time-out."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*command, "-m", "uniagent.engine", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, errors


@pytest.mark.slow
def test_two_ranks_train_the_weights_of_one(quickstart: Any, tmp_path: Path) -> None:
    # without the correction the gradient depends on the sampled tokens alone, which are the same; with it, on the last
    # bits of the rollout's logprobs, which timing changes from run to run, and AdamW magnifies that for rare tokens
    learner = ("learner.micro_tokens=256", "learner.correction='none'")
    settings = (f"run.steps={STEPS}", "eval.data=''", "rollout.groups_per_step=3", *learner)
    alone = quickstart.train(tmp_path / "alone", *settings)
    assert alone.returncode == 0, alone.stderr
    status, errors = torchrun(quickstart.environment, *quickstart.arguments(tmp_path / "both", *settings))
    assert status == 0, errors
    one, two = (
        load_file(tmp_path / name / "checkpoints" / f"step-{STEPS}" / "hf" / "model.safetensors")
        for name in ("alone", "both")
    )
    assert one.keys() == two.keys()
    worst = max(float(np.abs(one[name] - two[name]).max()) for name in one)
    assert worst < 1e-5
    assert quickstart.summary(tmp_path / "both")["steps"] == STEPS


@pytest.mark.slow
def test_followers_do_not_outlive_a_run_that_fails(quickstart: Any, tmp_path: Path) -> None:
    arguments = quickstart.arguments(tmp_path / "run", "run.steps=1", "sandbox.options.local.bwrap='/nowhere/bwrap'")
    status, errors = torchrun(quickstart.environment, *arguments)
    assert status != 0
    assert "there is no such program" in errors
