"""``uniagent harness``: what a check says of harnesses that keep their conversation or not; what installing does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from theatre import HARNESS, OPTIONS, Settings

from uniagent.adapters.agents import harness_cli, installs
from uniagent.adapters.agents.check import Report, check, shell_call
from uniagent.engine.errors import UserError
from uniagent.engine.messages import Problem
from uniagent.engine.registry import load


async def report(**changes: Any) -> Report:
    settings = Settings("command", {**OPTIONS, **changes})
    return await check(settings, ends_by=None, isolation="none", timeout_s=60)


async def test_a_harness_that_keeps_its_conversation() -> None:
    found = await report()
    assert (found.task_done, found.finished, found.one_chain, found.error) == (True, True, True, None)
    assert (found.dialect, found.stream, found.fields) == ("chat", False, ("model",))
    assert (found.roles, found.tools, found.shell_tool) == (("user",), ("shell",), "shell")
    assert found.echoes == {"text": ("verbatim",), "reasoning": ("verbatim",), "arguments": ("verbatim",)}
    assert (found.tiers, found.chains, found.side_calls) == ({"verbatim": 2}, {"main": 1}, 0)
    assert found.ledger["sampled"] == found.ledger["trainable"]


async def test_how_a_harness_echoes() -> None:
    edits = """answer.pop("reasoning_content", None)
    answer["content"] = (answer["content"] or "").strip()
    for call in answer.get("tool_calls") or []:
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())))
    messages.append(answer)"""
    found = await report(files={"harness.py": HARNESS.replace("messages.append(answer)", edits, 1)})
    assert found.echoes == {"text": ("trimmed",), "reasoning": ("dropped",), "arguments": ("re-serialised",)}
    assert found.one_chain
    assert found.tiers == {"normalised": 2}


async def test_a_harness_that_rewrites_what_was_said_breaks_its_chain() -> None:
    edits = "messages.append({**answer, 'content': 'I did something else.'})"
    found = await report(files={"harness.py": HARNESS.replace("messages.append(answer)", edits, 1)})
    assert found.task_done
    assert not found.one_chain
    assert found.echoes["text"] == ("changed",)
    assert found.ledger["discarded"].keys() == {"replaced"}


async def test_calls_beside_the_conversation_are_counted() -> None:
    aside = HARNESS.replace("def ask(messages)", "def ask(messages, bare=False)")
    aside = aside.replace("    body =", "    tools = [] if bare else tools\n    body =")
    title = "ask([{'role': 'system', 'content': 'Name this talk.'}, messages[0]], bare=True)\nwhile True:"
    found = await report(files={"harness.py": aside.replace("while True:", title, 1)})
    assert (found.side_calls, found.one_chain, found.chains["main"]) == (1, True, 1)
    assert found.ledger["discarded"].keys() == {"side_call"}


async def test_a_harness_that_asks_nothing_is_an_error_with_what_it_said() -> None:
    with pytest.raises(UserError, match=r"(?s)asked the model nothing.*no such model"):
        await report(command=["sh", "-c", "echo no such model >&2; exit 4"])


DESCRIBED = {"command": {"type": "string"}, "description": {"type": "string"}, "wait": {"type": "boolean"}}
LISTED = {"cmd": {"type": "array"}, "mode": {"enum": ["a", "b"]}}


@pytest.mark.parametrize(
    ("properties", "required", "arguments"),
    [
        ({"command": {"type": "string"}}, ["command"], {"command": "ls"}),
        (DESCRIBED, ["command", "wait"], {"description": "check", "wait": False, "command": "ls"}),
        (LISTED, ["mode"], {"mode": "a", "cmd": ["bash", "-lc", "ls"]}),
    ],
)
def test_the_shell_tool_is_found_by_its_schema(properties: Any, required: Any, arguments: Any) -> None:
    schema = {"type": "object", "properties": properties, "required": required}
    other = {"function": {"name": "read", "parameters": {"properties": {"path": {}}}}}
    tools = [other, {"function": {"name": "run", "parameters": schema}}]
    assert shell_call(tools, "ls") == ("run", arguments)
    assert list(shell_call(tools, "ls")[1]) == list(arguments), "the command last: an order that no schema has"
    with pytest.raises(Problem, match="no tool runs a shell command"):
        shell_call([other], "ls")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = tmp_path / "options.toml"
    options.write_text(tomli_w.dumps(OPTIONS))
    out = tmp_path / "report.json"
    arguments = ["check", "command", "--options", str(options), "--isolation", "none"]
    assert harness_cli.main([*arguments, "--json", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "one conversation, one chain" in told
    assert "chat, not streamed" in told
    assert json.loads(told.splitlines()[-1])["task_done"]
    assert "sizes" not in json.loads(out.read_text()), "what differs between machines is left out"
    assert harness_cli.main(["list"]) == 0
    assert "@openai/codex@" in capsys.readouterr().out


def test_only_the_pinned_version_counts_as_installed(tmp_path: Path) -> None:
    assert installs.installed(None, "codex") is installs.installed(tmp_path, "codex") is None
    (tmp_path / "codex").mkdir()
    stamp = tmp_path / "codex" / installs.STAMP
    stamp.write_text("@openai/codex@0.0.1")
    assert installs.installed(tmp_path, "codex") is None
    stamp.write_text("\n".join(load("agents", "codex").packages))
    assert installs.installed(tmp_path, "codex") == tmp_path / "codex"
    with pytest.raises(UserError, match="react is no external harness"):
        installs.install(tmp_path, "react")


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A client that writes down how it was called."""
    program = tmp_path / "clients" / "npm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return program


def test_an_install_puts_the_pinned_packages_into_a_folder_of_their_own(tmp_path: Path, npm: Path) -> None:
    target = installs.install(tmp_path / "all", "qwen_code")
    assert target == installs.installed(tmp_path / "all", "qwen_code") == tmp_path / "all" / "qwen_code"
    called = (tmp_path / "called").read_text()
    assert f"--prefix {target}" in called
    assert "@qwen-code/qwen-code@" in called
    installs.install(tmp_path / "all", "qwen_code")
    assert (tmp_path / "called").read_text() == called, "once is enough"


def test_an_install_that_fails_says_what_the_client_said(tmp_path: Path, npm: Path) -> None:
    npm.write_text("#!/bin/sh\necho ENOTFOUND registry >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"(?s)failed; can the registry be reached\?.*ENOTFOUND"):
        installs.install(tmp_path, "codex")
    assert installs.installed(tmp_path, "codex") is None
    npm.unlink()
    with pytest.raises(UserError, match="install Node"):
        installs.install(tmp_path, "codex")
