"""Training with vLLM as the run's engine, from the command line: in the process, in a child, and under torchrun.

The node's canary compares engine and learner after every sync, so that a run which ends had the right weights.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0
SMALL = {
    "run.steps": "2",
    "rollout.groups_per_step": "2",
    "rollout.group_size": "2",
    "eval.data": "''",
    "engine.name": "vllm",
    "engine.slots": "8",
    "checkpoint.keep": "1",
}
RUNS = {
    "inline": (1, {"engine.kv": "keep", "rollout.mode": "colocated"}),
    "child": (1, {"engine.options.process": "child"}),
    "rank-0-alone": (2, {}),
    "tensor-parallel": (2, {"engine.options.tensor_parallel": "2"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains(name: str, tmp_path: Path) -> None:
    ranks, changed = RUNS[name]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    sets = [part for key, value in {**SMALL, **changed}.items() for part in ("--set", f"{key}={value}")]
    config, folder = str(ROOT / "examples" / "quickstart.toml"), tmp_path / "run"
    command = [sys.executable, *launch, "-m", "uniagent.engine", "train", config, "--run-dir", str(folder), *sets]
    environment = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, log.read_text(errors="replace")[-4000:]
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["canary_gap"] < 1e-4 for row in rows] == [True, True]
