"""Separate runs as a user starts them: ``torchrun`` and ``uniagent rollout --join``, as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from uniagent.engine.journal import read

TOKEN = "a token of a test"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def started(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, which does not outlive the block."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "UNIAGENT_HEAD_TOKEN": TOKEN,
                **environment,
            },
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def torchrun(ranks: int, arguments: list[str]) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*command, "-m", "uniagent.engine", *arguments]


def rollout(url: str) -> list[str]:
    return [sys.executable, "-m", "uniagent.engine", "rollout", "--join", url]


def wait_for(true: Callable[[], Any], *processes: subprocess.Popen[str], logs: Path, within_s: float = 280.0) -> Any:
    """What ``true`` gives once it gives anything; an AssertionError with the logs when a process ends before."""
    until = time.monotonic() + within_s
    while not (found := true()):
        for process in processes:
            assert process.poll() is None, told(logs)
        assert time.monotonic() < until, told(logs)
        time.sleep(0.1)
    return found


def told(logs: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(logs.glob("*.log")))


def steps(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl so far."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def trained(run: Path) -> Counter[tuple[int, int]]:
    """How often each session was in a batch, by (sample, replica)."""
    episodes = (r for r in read(run / "episodes.jsonl") if r.use.tokens)
    return Counter((r.episode.sample, r.episode.replica) for r in episodes)
