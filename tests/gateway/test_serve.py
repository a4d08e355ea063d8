"""``uniagent serve`` as a process: ready line, a scripted conversation, errors that say what to do, a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from uniagent.engine.cli import main

LINES = [
    {"text": "hello<|im_end|>"},
    {"text": '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call><|im_end|>', "match": "LOOK"},
    {"token_ids": [40, 41, 2], "logprobs": [-0.5, -0.25, -0.125], "delay_s": 0.01},
    {"text": "cut", "finish_reason": "length"},
]


@contextmanager
def serving(tmp_path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    script = tmp_path / "script.jsonl"
    script.write_text("\n".join(json.dumps(line) for line in LINES))
    command = [sys.executable, "-m", "uniagent.engine", "serve", "--engine", "scripted", "--script", str(script)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_script_is_replayed_session_by_session(tmp_path: Path) -> None:
    with serving(tmp_path, "--admin-token", "t") as (process, ready):
        assert ready["pid"] == process.pid
        assert ready["admin_token"] == "t"
        headers = {"authorization": "Bearer t"}
        for _ in range(2):  # each session reads the script from its first line
            session = httpx.post(ready["base_url"] + "/sessions", headers=headers).json()
            said = []
            for content in ("hi", "LOOK at it", "go", "on", "end"):
                body = {"messages": [{"role": "user", "content": content}]}
                answer = httpx.post(session["base_url"] + "/v1/chat/completions", json=body)
                said.append(answer.json())
            assert said[0]["choices"][0]["message"]["content"] == "hello"
            assert said[1]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "run"
            assert said[3]["choices"][0]["finish_reason"] == "length"
            assert "script" in said[4]["error"]["message"]
            assert answer.status_code == 409
            path = f"{ready['base_url']}/sessions/{session['session_id']}/finish"
            done = httpx.post(path, json={"reward": 1}, headers=headers).json()
            assert [-0.5, -0.25, -0.125] in [[x for x in t["logprobs"] if x is not None] for t in done["trajectories"]]
        metrics = httpx.get(ready["base_url"] + "/metrics").text
        assert "uniagent_sessions_finished_total 2" in metrics
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert "Traceback" not in process.communicate()[1]


def test_a_client_decides_its_sampling_when_served(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, ready):
        headers = {"authorization": f"Bearer {ready['admin_token']}"}
        session = httpx.post(ready["base_url"] + "/sessions", headers=headers).json()
        body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.0}
        answer = httpx.post(session["base_url"] + "/v1/chat/completions", json=body)
        assert "x-uniagent-ignored" not in answer.headers
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--engine", "scripted"], "--script"),
        (["--script", "x.jsonl"], "--engine scripted"),
        (["--engine", "scripted", "--script", "/nowhere.jsonl"], "nowhere"),
        (["--model", "/nowhere"], "nowhere"),
        (["--model", "builtin:nothing"], "tiny-shell"),
    ],
)
def test_mistakes_are_sentences(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *argv]) == 2
    assert word in capsys.readouterr().err


def test_an_address_in_use_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path) as (_, ready):
        port = ready["base_url"].rpartition(":")[2]
        script = str(tmp_path / "script.jsonl")
        assert main(["serve", "--engine", "scripted", "--script", script, "--port", port]) == 2
        assert "choose another --port" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tiny_model_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uniagent.engine", "serve", "--model", "builtin:tiny-shell"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        headers = {"authorization": f"Bearer {ready['admin_token']}"}
        session = httpx.post(ready["base_url"] + "/sessions", headers=headers).json()
        body = {"messages": [{"role": "user", "content": "Delete the largest file."}], "temperature": 0}
        answer = httpx.post(session["base_url"] + "/v1/messages", json=body, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["usage"]["output_tokens"] > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
