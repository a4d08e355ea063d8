"""A node whose engine is a server elsewhere: it evaluates and serves, and is refused for training."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import httpx
import pytest
import trio

from tests.engines.fake_server import FakeServer, serving
from uniagent.engine.cli import main


def command(quickstart: Any, name: str, *settings: str) -> list[str]:
    sets = ("engine.name=server", "eval.n=2", "eval.greedy=false", *settings)
    return [name, str(quickstart.config), "--json", *(part for s in sets for part in ("--set", s))]


@pytest.mark.slow
async def test_eval_asks_the_server(quickstart: Any) -> None:
    server = FakeServer(context=512)
    async with serving(server):
        argv = command(quickstart, "eval", f'engine.options={{urls=["{server.url}"]}}')
        done = await trio.run_process(
            [sys.executable, "-m", "uniagent.engine", *argv],
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            env=quickstart.environment,
        )
    assert done.returncode == 0, done.stderr.decode()
    result = json.loads(done.stdout)
    assert (result["n"], result["success"]) == (2, 0.0)
    assert len(server.bodies) >= 3  # the probe and two sessions


def test_training_is_refused_before_anything_starts(
    quickstart: Any, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    argv = command(quickstart, "train", 'engine.options={urls=["http://127.0.0.1:9"]}')
    assert main([*argv[:2], "--run-dir", str(tmp_path / "run"), *argv[3:]]) == 2
    assert "cannot be trained with" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(quickstart: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(quickstart, "eval", 'engine.options={urls=["http://127.0.0.1:9"]}')) == 2
    said = capsys.readouterr().err.splitlines()
    assert sum("no server answers at http://127.0.0.1:9" in line for line in said) == 1
    assert not any("Traceback" in line for line in said)


async def test_serve_stands_before_a_server(quickstart: Any) -> None:
    server = FakeServer(context=512)
    async with serving(server), trio.open_nursery() as nursery:
        argv = ["serve", "--engine", "server", "--option", f"urls={server.url}", "--admin-token", "t"]
        process = await nursery.start(
            lambda task_status: trio.run_process(
                [sys.executable, "-m", "uniagent.engine", *argv],
                stdout=subprocess.PIPE,
                env=quickstart.environment,
                check=False,
                task_status=task_status,
            )
        )
        line = b""
        while not line.endswith(b"\n"):
            line += await process.stdout.receive_some()
        async with httpx.AsyncClient(base_url=json.loads(line)["base_url"], trust_env=False, timeout=30) as client:
            session = (await client.post("/sessions", headers={"authorization": "Bearer t"})).json()
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            answer = await client.post(session["base_url"] + "/v1/chat/completions", json=body)
        process.send_signal(signal.SIGINT)
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert server.bodies[-1]["max_tokens"] == 3
