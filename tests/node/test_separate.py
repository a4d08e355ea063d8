"""Separate runs for real: ranks by torchrun, nodes that join, are killed and come late."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.node import jobs, scripted_run


def weights(run: Path, step: int) -> Any:
    return load_file(run / "checkpoints" / f"step-{step}" / "hf" / "model.safetensors")


@pytest.mark.slow
def test_every_mode_trains_the_same_weights_bit_by_bit(quickstart: Any, tmp_path: Path) -> None:
    steps = 3
    settings = [*scripted_run.files(tmp_path), f"run.steps={steps}"]
    for mode in ("sync", "colocated"):
        done = quickstart.train(tmp_path / mode, *settings, f"rollout.mode={mode}")
        assert done.returncode == 0, done.stderr
    arguments = quickstart.arguments(tmp_path / "separate", *settings, "rollout.mode=separate")
    with jobs.started(jobs.torchrun(2, arguments), tmp_path / "job.log") as job:
        assert job.wait(timeout=280) == 0, jobs.told(tmp_path)
    before, colocated, separate = (weights(tmp_path / mode, steps) for mode in ("sync", "colocated", "separate"))
    for name in before:
        assert np.array_equal(before[name], colocated[name]), name
        assert np.array_equal(before[name], separate[name]), name
    assert jobs.trained(tmp_path / "separate") == jobs.trained(tmp_path / "sync")


@pytest.mark.slow
def test_nodes_are_killed_and_come_late_and_every_prompt_trains_once(quickstart: Any, tmp_path: Path) -> None:
    run, port = tmp_path / "run", jobs.free_port()
    url = f"http://127.0.0.1:{port}"
    settings = [
        *scripted_run.files(tmp_path, wait_s=0.3, samples=4000),
        "engine.options={step_s=0.02}",
        "run.steps=100000",
        "run.drain_s=5",
        "rollout.mode=separate",
        "rollout.staleness_threshold=1",
        "rollout.max_staleness=2",
        "rollout.lease_s=3",
        f"rollout.head_url={url}",
        "placement.joining=true",
    ]
    job_command = jobs.torchrun(2, quickstart.arguments(run, *settings))
    with (
        jobs.started(job_command, tmp_path / "job.log") as job,
        jobs.started(jobs.rollout(url), tmp_path / "first.log") as first,
    ):

        def nodes(n: int) -> bool:
            return bool(lines := jobs.steps(run)) and lines[-1]["nodes/rollout"] == n

        jobs.wait_for(lambda: nodes(2), job, first, logs=tmp_path)
        time.sleep(0.5)
        os.killpg(first.pid, signal.SIGKILL)
        jobs.wait_for(lambda: nodes(1) and jobs.steps(run)[-1]["nodes/lost"] == 1, job, logs=tmp_path)
        with jobs.started(jobs.rollout(url), tmp_path / "late.log") as late:
            jobs.wait_for(lambda: nodes(2), job, late, logs=tmp_path)
            then = len(jobs.steps(run))
            jobs.wait_for(lambda: len(jobs.steps(run)) > then + 3, job, late, logs=tmp_path)
            os.killpg(job.pid, signal.SIGINT)  # as a terminal does
            assert late.wait(timeout=90) == 0, jobs.told(tmp_path)
        assert job.wait(timeout=90) != 0
    assert quickstart.summary(run)["interrupted"], jobs.told(tmp_path)
    assert quickstart.summary(run)["checkpoint"]
    times = jobs.trained(run)
    assert set(times.values()) == {1}
    samples = {sample for sample, _ in times}
    assert len(samples) >= 3 * len(jobs.steps(run)) - 3
    assert samples >= set(range(min(samples), max(samples) - 12))  # a killed node's groups were not passed over


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mesh_of_two_ranks_serves_where_nobody_else_does(quickstart: Any, tmp_path: Path, ranks: int) -> None:
    run = tmp_path / "run"
    settings = [
        *scripted_run.files(tmp_path, wait_s=0.2),
        "engine.options={step_s=0.05}",
        "run.steps=2",
        "rollout.mode=separate",
        "placement.train_ranks=2",
        "placement.joining=true",
        f"rollout.head_url=http://127.0.0.1:{jobs.free_port()}",
    ]
    with jobs.started(jobs.torchrun(ranks, quickstart.arguments(run, *settings)), tmp_path / "job.log") as job:
        assert job.wait(timeout=280) == 0, jobs.told(tmp_path)
    if ranks == 2:
        assert jobs.steps(run)[-1]["mesh/switches"] >= 3  # there and back for each batch
    assert len(jobs.steps(run)) == 2
    assert set(jobs.trained(run).values()) == {1}


@pytest.mark.slow
def test_a_node_outlives_a_head_that_is_killed_and_goes_on(quickstart: Any, tmp_path: Path) -> None:
    run, port = tmp_path / "run", jobs.free_port()
    url = f"http://127.0.0.1:{port}"
    settings = [
        *scripted_run.files(tmp_path, wait_s=0.2),
        "engine.options={step_s=0.02}",
        "run.steps=12",
        "checkpoint.every=2",
        "rollout.mode=separate",
        "rollout.lease_s=5",
        f"rollout.head_url={url}",
        "placement.joining=true",
    ]
    command = quickstart.command(run, *settings)
    with jobs.started(jobs.rollout(url), tmp_path / "node.log") as node:
        with jobs.started(command, tmp_path / "first.log") as first:

            def joined() -> bool:
                return bool(lines := jobs.steps(run)) and lines[-1]["nodes/rollout"] == 1 and len(lines) >= 4

            jobs.wait_for(joined, first, node, logs=tmp_path)
            os.killpg(first.pid, signal.SIGKILL)
        resumed = [part if part != "--run-dir" else "--resume" for part in command]
        with jobs.started(resumed, tmp_path / "second.log") as second:
            assert second.wait(timeout=280) == 0, jobs.told(tmp_path)
        assert node.wait(timeout=60) == 0, jobs.told(tmp_path)
    assert jobs.steps(run)[-1]["step"] == 12
    assert jobs.steps(run)[-1]["nodes/rollout"] == 1
    assert set(jobs.trained(run).values()) == {1}
