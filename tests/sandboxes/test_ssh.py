"""The ssh provider against a real sshd on loopback."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from uniagent.adapters.sandboxes.contract import CHECKS, Check
from uniagent.adapters.sandboxes.ssh import SshProvider
from uniagent.engine.errors import InfraError, UserError

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")
MAX_SESSIONS = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A sandbox section for a server of our own."""
    pytest.importorskip("asyncssh")
    if SSHD is None or (os.getuid() == 0 and not os.path.isdir("/run/sshd")):
        pytest.skip("no sshd that can be started here")
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host_key", "identity"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "home").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/identity.pub\nPermitRootLogin yes\nPasswordAuthentication no\n"
        f"MaxSessions {MAX_SESSIONS}\nSetEnv HOME={folder}/home\n"
    )
    process = subprocess.Popen([SSHD, "-D", "-f", folder / "config", "-E", folder / "log"])
    for _ in range(500):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        if process.poll() is not None:
            pytest.skip(f"sshd does not start here: {(folder / 'log').read_text()}")
        trio.run(trio.sleep, 0.01)
    key = (folder / "host_key.pub").read_text().rsplit(" ", 1)[0]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}\n")
    (folder / "unknown_hosts").write_text("")
    yield {
        "host": "127.0.0.1",
        "port": port,
        "user": getpass.getuser(),
        "identity": str(folder / "identity"),
        "known_hosts": str(folder / "known_hosts"),
        "directory": str(folder),
    }
    process.terminate()
    process.wait()


def left(server: dict[str, Any]) -> list[Path]:
    return list(Path(server["directory"]).glob("uniagent-*"))


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, server: dict[str, Any]) -> None:
    async with SshProvider(server) as provider, provider.open({}) as sandbox:
        await check(sandbox)
    assert not left(server)


async def test_state_files_and_environment(server: dict[str, Any]) -> None:
    section = {"files": {"a/b": "planted"}, "env": {"GREETING": "hi you"}}
    async with SshProvider(server) as provider:
        async with provider.open(section) as box:
            shell = await box.shell()
            assert (await shell.run("cat a/b; echo $GREETING; cd a; X=5", timeout_s=30)).output == b"plantedhi you\n"
            assert (await shell.run("echo $X; basename $PWD", timeout_s=30)).output == b"5\na\n"
        assert not list(left(server)[0].iterdir()), "the sandbox's directory is gone"
    assert not left(server), "and the node's with it"


async def test_more_sandboxes_than_a_connection_has_sessions(server: dict[str, Any]) -> None:
    ran: list[bytes] = []

    async with SshProvider(server) as provider:

        async def one(number: int) -> None:
            async with provider.open({}) as box:
                ran.append((await (await box.shell()).run(f"echo {number}", timeout_s=60)).output)
                assert (await box.exec(["true"], timeout_s=60)).code == 0

        async with trio.open_nursery() as nursery:
            for number in range(2 * MAX_SESSIONS):
                nursery.start_soon(one, number)
        (host,) = provider.hosts.values()
        assert len(host.connections) > 1
    assert sorted(ran) == sorted(b"%d\n" % n for n in range(2 * MAX_SESSIONS))


async def test_no_room_names_the_settings(server: dict[str, Any]) -> None:
    async with SshProvider({**server, "connections": 1}) as provider:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:

                async def hold() -> None:
                    async with provider.open({}) as box:
                        await (await box.shell()).run("sleep 1", timeout_s=30)

                for _ in range(MAX_SESSIONS):
                    nursery.start_soon(hold)
    assert caught.group_contains(InfraError, match="raise MaxSessions in its sshd_config, or connections")


@pytest.mark.parametrize(
    ("change", "kind", "complaint"),
    [
        ({"known_hosts": "unknown_hosts"}, UserError, "its host key is not known.*ssh-keyscan"),
        ({"identity": "host_key"}, UserError, "does not let us in.*set user and identity"),
        ({"port": 1}, InfraError, "cannot be reached over ssh"),
        ({"host": ""}, UserError, "host is missing"),
        ({"prot": 1}, UserError, "no key 'prot'; did you mean 'port'"),
    ],
)
async def test_what_goes_wrong_is_told(
    change: dict[str, Any], kind: type[Exception], complaint: str, server: dict[str, Any]
) -> None:
    folder = Path(server["directory"])
    change = {k: str(folder / v) if k in ("known_hosts", "identity") else v for k, v in change.items()}
    async with SshProvider(server) as provider:
        with pytest.raises(kind, match=complaint):
            async with provider.open(change):
                pass


async def test_through_a_jump_host(server: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / ".ssh"
    home.mkdir(mode=0o700)
    shutil.copy(server["known_hosts"], home / "known_hosts")
    shutil.copy(server["identity"], home / "id_ed25519")
    monkeypatch.setenv("HOME", str(tmp_path))  # the jump uses what the user has set up for it
    jump = f"{server['user']}@127.0.0.1:{server['port']}"
    async with SshProvider({**server, "jump": jump}) as provider, provider.open({}) as box:
        assert (await box.exec(["echo", "there"], timeout_s=30)).output == b"there\n"


CRASHING = """
import json, os, signal, sys, trio
from uniagent.adapters.sandboxes.ssh import SshProvider
async def main():
    async with SshProvider(json.loads(sys.argv[1])) as provider, provider.open({}) as box:
        start = "cp $(command -v sleep) ./sshleft; setsid ./sshleft 1000 & sleep 0.1"
        await (await box.shell()).run(start, timeout_s=30)
        os.kill(os.getpid(), signal.SIGKILL)
trio.run(main)
"""


async def test_a_node_that_is_killed_leaves_nothing_there(server: dict[str, Any]) -> None:
    argv = [sys.executable, "-c", CRASHING, json.dumps(server)]
    done = await trio.to_thread.run_sync(lambda: subprocess.run(argv, timeout=60))
    assert done.returncode == -9
    with trio.fail_after(30):
        while left(server) or _running("sshleft"):
            await trio.sleep(0.01)


def _running(name: str) -> bool:
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text(errors="replace")
        except OSError:
            continue
        inside, _, after = text.partition("(")[2].rpartition(")")
        if inside == name and after.split()[0] not in "ZX":
            return True
    return False
