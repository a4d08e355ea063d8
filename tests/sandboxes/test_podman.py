"""The container provider with a real Podman; UNIAGENT_PODMAN is what ``podman_root`` printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import trio

from uniagent.adapters.sandboxes.container import ContainerProvider
from uniagent.adapters.sandboxes.contract import CHECKS, Check
from uniagent.adapters.sandboxes.snapshots import snapshot

pytestmark = pytest.mark.slow
SECTION: dict[str, Any] = json.loads(os.environ["UNIAGENT_PODMAN"])
OPTIONS = {"program": "podman"}


def left(of: str, *what: str) -> list[str]:
    words = ["podman", *what, "-q", "--filter", f"label=uniagent.node={of}"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def label(provider: ContainerProvider) -> str:
    assert provider.node is not None
    return provider.node.path.name


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check) -> None:
    async with ContainerProvider(OPTIONS) as provider, provider.open(SECTION) as sandbox:
        name = label(provider)
        await check(sandbox)
    assert not left(name, "ps", "-a")


async def test_limits_hold() -> None:
    section = {**SECTION, "memory_mib": 64, "pids": 30}
    async with ContainerProvider(OPTIONS) as provider, provider.open(section) as box:
        shell = await box.shell()
        eater = "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}"
        assert b"200000000" not in (await shell.run(f"bash -c '{eater}'", timeout_s=60)).output
        forks = await shell.run("(for i in {1..60}; do sleep 1 & done; wait)", timeout_s=60)
        assert b"Resource temporarily unavailable" in forks.output or forks.code != 0


async def test_a_snapshot_is_a_start() -> None:
    async with ContainerProvider({**OPTIONS, "warm": 1}) as provider:
        async with provider.open(SECTION) as box:
            await box.write(box.workdir / "state", b"kept")
            name = await snapshot(box)
        async with provider.open({**SECTION, "snapshot": name}) as box:
            assert await box.read(box.workdir / "state") == b"kept"
        node = label(provider)
        assert left(node, "images")
    assert not left(node, "images")
    assert not left(node, "ps", "-a")


CRASHING = """
import json, os, signal, sys, trio
from uniagent.adapters.sandboxes.container import ContainerProvider
async def main():
    async with ContainerProvider({"program": "podman"}) as provider, provider.open(json.loads(sys.argv[1])):
        print(provider.node.path.name, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
trio.run(main)
"""


async def test_what_a_killed_node_left_is_removed_by_the_next() -> None:
    argv = [sys.executable, "-c", CRASHING, json.dumps(SECTION)]
    done = await trio.to_thread.run_sync(lambda: subprocess.run(argv, timeout=120, capture_output=True, text=True))
    assert done.returncode == -signal.SIGKILL
    node = done.stdout.strip()
    assert left(node, "ps", "-a")
    async with ContainerProvider(OPTIONS):
        assert not left(node, "ps", "-a")
