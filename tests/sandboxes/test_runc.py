"""The runc provider on an unpacked root, where containers can run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import podman_root
import pytest
import trio

from uniagent.adapters.sandboxes.contract import CHECKS, Check
from uniagent.adapters.sandboxes.runc import RuncProvider
from uniagent.engine.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("root")
    podman_root.make(folder)
    return str(folder)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, root: str) -> None:
    async with RuncProvider({"image": root}) as provider, provider.open({}) as sandbox:
        await check(sandbox)


async def test_limits_hold_and_others_go_on(root: str) -> None:
    section = {"memory_mib": 64, "pids": 30, "disk_mib": 4, "files": {"a/b": "planted"}, "env": {"A": "b c"}}
    async with RuncProvider({"image": root}) as provider, provider.open(section) as box, provider.open({}) as other:
        shell = await box.shell()
        assert (await shell.run("cat a/b; echo $A", timeout_s=30)).output == b"plantedb c\n"
        assert b"No space left" in (await shell.run("head -c 9000000 /dev/zero > big; rm big", timeout_s=30)).output
        assert b"Read-only" in (await shell.run("echo x > /new", timeout_s=30)).output
        eater = "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}"
        assert b"200000000" not in (await shell.run(f"bash -c '{eater}'", timeout_s=60)).output
        forks = await shell.run("(for i in {1..60}; do sleep 1 & done; wait)", timeout_s=60)
        assert b"Resource temporarily unavailable" in forks.output
        assert (await other.exec(["echo", "fine"], timeout_s=30)).output == b"fine\n"


async def test_mistakes_are_named(tmp_path: Path) -> None:
    async with RuncProvider() as provider:
        with pytest.raises(UserError, match="is no folder of a root file system"):
            async with provider.open({"image": str(tmp_path)}):
                pass


CRASHING = """
import json, os, signal, sys, trio
from uniagent.adapters.sandboxes.runc import RuncProvider
async def main():
    async with RuncProvider({"image": sys.argv[1]}) as provider, provider.open({}):
        print(provider.node.path.name, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
trio.run(main)
"""


async def test_what_a_killed_node_left_is_removed_by_the_next(root: str) -> None:
    argv = [sys.executable, "-c", CRASHING, root]
    done = await trio.to_thread.run_sync(lambda: subprocess.run(argv, timeout=120, capture_output=True, text=True))
    assert done.returncode == -signal.SIGKILL, done.stderr
    name = f"{done.stdout.strip()}-1"
    async with RuncProvider() as provider:
        found = subprocess.run(["runc", "--root", f"{provider.node}/state", "list"], capture_output=True, text=True)
        assert name not in found.stdout
        assert not [
            p
            for p in Path("/proc").glob("[0-9]*/cgroup")
            if name in _text(p) and ") Z " not in _text(p.with_name("stat"))
        ]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
