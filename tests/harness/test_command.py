"""The black-box agent with a small harness of our own, confined and not: what it may do, and how it ends."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import trio
from theatre import OPTIONS, Settings, batch, nothing_sleeps, script, shell, theatre

from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import Failure
from uniagent.engine.registry import load

DONE = script(shell("echo hello > out.txt"), "It is there.")


async def test_a_harness_does_its_task_and_every_token_is_accounted_for(root: Path, isolation: str) -> None:
    async with theatre(DONE, root, isolation=isolation) as stage:
        outcome = await stage.run("command", OPTIONS)
    assert outcome.result.finished
    assert outcome.result.transcript[-1] == {"role": "assistant", "content": "It is there."}
    assert outcome.files == {"out.txt": b"hello\n"}, "its home is not in the working directory"
    info = outcome.result.info
    assert (info["stop"], info["exit_code"], info["reaped"]) == ("exit", 0, 0)
    assert outcome.chains == ["main"]
    assert outcome.export.fates == ("live", "live")
    assert outcome.export.ledger.trainable == outcome.export.ledger.sampled > 0


async def test_placeholders_are_filled_in_arguments_environment_files_and_stdin(root: Path, isolation: str) -> None:
    code = (
        "import os, sys; home = os.environ['HOME']; print(sys.argv[1:], os.environ['K'], sys.stdin.read(), "
        "open(home + '/deep/er/file').read(), open(sys.argv[3]).read(), sys.argv[4] == home, sep='|')"
    )
    options = {
        "command": ["python3", "-c", code, "{model} {braces} {0}", "{workdir}", "{prompt_file}", "{home}"],
        "args": ["{programs}"],
        "env": {"K": "<{api_key}>"},
        "files": {"deep/er/file": "{base_url} {openai_base_url}"},
        "stdin": "{prompt}!",
        "programs": OPTIONS["programs"],
    }
    prompt = [
        {"role": "system", "content": "Be $(brief)."},
        {"role": "user", "content": [{"type": "text", "text": "'Go'"}]},
    ]
    async with theatre(DONE, root, isolation=isolation) as stage:
        outcome = await stage.run("command", options, prompt=prompt)
        address = outcome.session.address
    said = outcome.result.transcript[0]["content"]
    arguments, key, stdin, file, prompt_file, same_home = said.split("|")
    assert arguments.startswith("['rehearsed {braces} {0}', '")
    assert arguments.endswith(f"'{OPTIONS['programs']}']")
    assert key == f"<{address.api_key}>"
    assert stdin == "Be $(brief).\n\n'Go'!"
    assert prompt_file == "Be $(brief).\n\n'Go'"
    near, _, openai = file.partition(" ")
    assert openai == f"{near}/v1"
    assert near.endswith(address.base_url.partition("/s/")[2])
    assert same_home == "True"


async def test_the_exit_code_decides_whether_it_finished(root: Path, isolation: str) -> None:
    options = {**OPTIONS, "env": {**OPTIONS["env"], "CODE": "3"}}
    async with theatre(DONE, root, isolation=isolation) as stage:
        failed = (await stage.run("command", options)).result
        allowed = (await stage.run("command", {**options, "ok": [0, 3]})).result
    assert (failed.finished, failed.info["exit_code"]) == (False, 3)
    assert "exit code 3" in failed.info["error"]
    assert allowed.finished


async def test_its_time_limit_leaves_time_to_tell_what_it_left(root: Path, isolation: str) -> None:
    code = "echo partial; echo trouble >&2; echo x > left; sleep 1000 & sleep 1001"
    async with theatre(DONE, root, isolation=isolation) as stage:
        outcome = await stage.run("command", {"command": ["sh", "-c", code]}, limit_s=3, look=nothing_sleeps)
    assert not outcome.result.finished
    assert outcome.result.info["stop"] == "timeout"
    assert outcome.result.info["stderr"] == "trouble"
    assert outcome.result.transcript[0]["content"] == "partial"
    assert outcome.files == {"left": b"x\n"}


@pytest.mark.parametrize(("code", "failure"), [("exit 3", Failure.INFRA), (None, Failure.AGENT)])
async def test_a_harness_that_fails_before_it_asks_the_model_does_not_count_for_the_policy(
    root: Path, code: str | None, failure: Failure
) -> None:
    first = OPTIONS["command"] if code is None else ["sh", "-c", code]
    options = {**OPTIONS, "command": ["sh", "-c", '"$@"; exit 3', "sh", *first]}
    row = {
        "name": "file",
        "agent": {"name": "command", "options": options},
        "sandbox": {"provider": "local", "isolation": "none"},
        "verifier": {"function": "theatre:wrote"},
    }
    ((episode, _),) = await batch(DONE, root, [row])
    assert episode.result.failure is failure
    assert episode.counts is (failure is Failure.AGENT)
    assert "exit code 3" in str(episode.error)


async def test_daemons_are_reaped_before_the_verifier_looks(root: Path, isolation: str) -> None:
    daemon = "setsid sh -c 'sleep 1000 & : > $HOME/up; sleep 1001' >/dev/null 2>&1 &"
    code = f"{daemon} until [ -e $HOME/up ]; do sleep 0.01; done; echo ok"
    async with theatre(DONE, root, isolation=isolation) as stage:
        outcome = await stage.run("command", {"command": ["sh", "-c", code]}, look=nothing_sleeps)
    assert outcome.result.finished
    assert outcome.result.info["reaped"] >= 2


async def test_what_the_task_itself_left_running_stays(root: Path, isolation: str) -> None:
    async with theatre(DONE, root, isolation=isolation) as stage:
        agent = load("agents", "command")(Settings("command", OPTIONS))
        session = stage.stage.gateway.open("s", stage_sampling())
        async with stage.provider.open({"isolation": isolation, "read_only": list(agent.read_only)}) as sandbox:
            shell_of_the_task = await sandbox.shell()
            await shell_of_the_task.run("sleep 1000 & kept=$!", timeout_s=10)
            await agent.run([{"role": "user", "content": "x"}], sandbox, session.endpoint())
            assert (await shell_of_the_task.run("kill -0 $kept", timeout_s=10)).code == 0
        await stage.stage.gateway.finish("s")


def stage_sampling() -> Any:
    from uniagent.engine.ports import SessionSampling

    return SessionSampling(max_tokens=4096)


async def test_a_harness_that_goes_on_asking_is_stopped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uniagent.adapters.agents.command.GRACE_S", 0.2)
    endless = script(*[shell("true")] * 50)
    async with theatre(endless, root, isolation="none") as stage:
        stubborn = await stage.run("command", {**OPTIONS, "args": ["--stubborn"]}, max_generations=3)
        polite = await stage.run("command", OPTIONS, max_generations=3)
    for outcome in (stubborn, polite):
        assert outcome.result.info["stop"] == "max_steps"
        assert not outcome.result.finished
        assert outcome.export.fates == ("live",) * 3
        assert "refused 403" in outcome.result.info["stderr"]
    assert (stubborn.result.info["exit_code"], polite.result.info["exit_code"]) == (137, 1)


async def test_tokens_are_limited_at_the_gateway(root: Path) -> None:
    async with theatre(DONE, root, isolation="none") as stage:
        outcome = await stage.run("command", OPTIONS, max_total_tokens=20)
    assert "refused 400" in outcome.result.info["stderr"]
    assert outcome.export.ledger.sampled == 0


@pytest.mark.usefixtures("confined")
async def test_the_gateway_is_the_only_way_out_of_a_private_network(root: Path) -> None:
    (outside,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = outside.socket.getsockname()[1]
    code = (
        f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo out; "
        "url=${URL#http://}; exec 3<>/dev/tcp/${url%%:*}/$(echo ${url#*:} | cut -d/ -f1) && echo in; "
        "cat /proc/net/dev | tail -n +3 | cut -d: -f1"
    )
    options = {"command": ["bash", "-c", code], "env": {"URL": "{base_url}"}}
    async with theatre(DONE, root) as stage:
        outcome = await stage.run("command", options)
    assert outcome.result.transcript[0]["content"].split() == ["in", "lo"]
    await outside.aclose()


async def test_a_program_that_is_missing_is_the_users_mistake_or_gets_installed(root: Path, isolation: str) -> None:
    async with theatre(DONE, root, isolation=isolation) as stage:
        with pytest.raises(UserError, match=r"no program 'nosuch' in the sandbox.*programs"):
            await run_alone(stage, {"command": ["nosuch"]})
        recipe = {"command": ["{workdir}/made"], "install": "printf '#!/bin/sh\\necho installed' > made; chmod +x made"}
        outcome = await stage.run("command", recipe)
        assert outcome.result.transcript[0]["content"] == "installed"
        with pytest.raises(InfraError, match="install recipe ended with 7: no network"):
            await run_alone(stage, {"command": ["nosuch"], "install": "echo no network >&2; exit 7"})


async def run_alone(stage: Any, options: Any) -> None:
    """What the agent raises, out of the provider's exception groups."""
    agent = load("agents", "command")(Settings("command", options))
    session = stage.stage.gateway.open("alone", stage_sampling())
    try:
        async with stage.provider.open(dict(stage.sandbox)) as sandbox:
            await agent.run([{"role": "user", "content": "x"}], sandbox, session.endpoint())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        await stage.stage.gateway.finish("alone")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "options.command is missing"),
        ({"command": "codex"}, "expected a list of text"),
        ({"command": ["x"], "comand": ["y"]}, "there is no key 'comand'"),
        ({"command": ["x"], "transcript": "nosuch"}, "there is no transcript named 'nosuch'"),
        ({"command": ["x"], "env": {"A": 1}}, "A must be text"),
    ],
)
def test_mistakes_in_a_recipe_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load("agents", "command")(Settings("command", options))


def test_what_a_task_sets_is_laid_on_the_named_harness() -> None:
    options = {"args": ["--bare"], "env": {"MAX_THINKING_TOKENS": "9"}, "programs": "/opt/harness"}
    agent = load("agents", "claude_code")(Settings("claude_code", options))
    plain = load("agents", "claude_code")(Settings("claude_code"))
    assert agent.recipe.args == ("--bare",)
    assert agent.recipe.command == plain.recipe.command
    assert dict(agent.recipe.env) == {**plain.recipe.env, "MAX_THINKING_TOKENS": "9"}
    assert (agent.read_only, plain.read_only) == (("/opt/harness",), ())


def test_a_virtual_environment_shows_the_python_it_was_made_from(tmp_path: Path) -> None:
    from uniagent.adapters.agents.command import shown

    for home, more in (("/opt/python/bin", ("/opt/python",)), ("/usr/bin", ())):
        (tmp_path / "pyvenv.cfg").write_text(f"home = {home}\nversion = 3.11\n")
        assert shown(tmp_path) == (str(tmp_path), *more)
    shutil.rmtree(tmp_path)
    assert shown(tmp_path) == (str(tmp_path),)


@pytest.mark.parametrize("name", ["claude_code", "codex", "mini_swe_agent", "opencode", "qwen_code"])
def test_named_harnesses_are_pinned_and_reach_the_session(name: str) -> None:
    harness = load("agents", name)
    assert all(any(mark in p[1:] for mark in ("==", "@")) for p in harness.packages)
    told = "".join([*harness.recipe.env.values(), *harness.recipe.files.values()])
    assert "base_url}" in told
    assert "{api_key}" in told
    assert "{prompt}" in (harness.recipe.stdin, *harness.recipe.command)
    assert not PurePosixPath(harness.recipe.command[0]).is_absolute()
