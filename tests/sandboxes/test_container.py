"""The container provider on a stand-in for docker's command line, against the contract and its own promises."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from uniagent.adapters.sandboxes.bwrap import find_bwrap
from uniagent.adapters.sandboxes.container import ContainerProvider, _labels, mirrored
from uniagent.adapters.sandboxes.contract import CHECKS, Check
from uniagent.adapters.sandboxes.node_dir import NodeFolder
from uniagent.adapters.sandboxes.snapshots import snapshot
from uniagent.engine.errors import InfraError, UserError

FAKE = Path(__file__).with_name("fake_docker.py")
SECTION = {"image": "debian:12-slim", "workdir": "/mnt/work"}


@pytest.fixture
def docker(confined: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Its folder of containers; the program is found on the PATH as docker."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/docker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "containers").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_DOCKER", str(tmp_path / "containers"))
    monkeypatch.setenv("FAKE_BWRAP", find_bwrap())
    monkeypatch.setattr("uniagent.adapters.sandboxes.container.root_folder", lambda fast: tmp_path)
    yield tmp_path / "containers"
    assert not list((tmp_path / "containers").iterdir()), "no container is left"


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check: Check, docker: Path) -> None:
    async with ContainerProvider() as provider, provider.open(SECTION) as sandbox:
        await check(sandbox)


async def test_what_is_asked_for_is_on_the_command_line(docker: Path) -> None:
    section = {
        **SECTION,
        "memory_mib": 512,
        "pids": 64,
        "cpus": 1.5,
        "user": "1000",
        "env": {"A": "b c"},
        "files": {"planted/x": "text"},
    }
    async with ContainerProvider({"mirrors": {"docker.io": "mirror.local/hub"}}) as provider:
        assert provider.node is not None
        async with provider.open(section) as box:
            (record,) = (json.loads(p.read_text()) for p in docker.glob("*/given"))
            assert record["image"] == "mirror.local/hub/library/debian:12-slim"
            assert record["command"] == ["infinity"]
            assert record["options"] == {
                "-d": [""], "--rm": [""], "--init": [""], "--network": ["none"], "--pull": ["missing"],
                "--label": [f"uniagent.node={provider.node.path.name}"], "--user": ["1000"],
                "--memory": ["512m"], "--pids-limit": ["64"], "--cpus": ["1.5"], "-e": ["A=b c"],
                "--entrypoint": ["sleep"],
            }  # fmt: skip
            done = await (await box.shell()).run("cat planted/x; echo $A", timeout_s=20)
            assert done.output == b"textb c\n"


async def test_containers_of_a_dead_node_are_removed_and_a_living_nodes_stay(docker: Path, tmp_path: Path) -> None:
    (tmp_path / "containers.nodes").mkdir()
    living = NodeFolder(tmp_path / "containers.nodes")
    import shutil

    for name, label in (("dead", "123-dead"), ("alive", living.path.name)):
        (docker / name / "work").mkdir(parents=True)
        (docker / name / "given").write_text(json.dumps({"options": {"--label": [f"uniagent.node={label}"]}}))
    provider = ContainerProvider()
    provider.program = "docker"
    await provider._reap(tmp_path / "containers.nodes")
    assert [p.name for p in docker.iterdir()] == ["alive"]
    shutil.rmtree(docker / "alive")
    living.close()


async def test_what_runs_inside_is_ended(docker: Path) -> None:
    async with ContainerProvider() as provider, provider.open(SECTION) as box:
        shell = await box.shell()
        await shell.run("sleep 1000 & (setsid sleep 1000 &)", timeout_s=10)
        await box.end_processes()
        listing = (await box.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"], timeout_s=10)).output
        assert b"sleep 1000" not in listing
        assert (await shell.run("echo back", timeout_s=10)).output == b"back\n"


async def test_a_snapshot_is_a_start(docker: Path) -> None:
    index = docker.parent / "images/index"
    async with ContainerProvider() as provider:
        async with provider.open(SECTION) as box:
            await box.write(box.workdir / "state", b"kept")
            name = await snapshot(box)
        async with provider.open({"snapshot": name, "workdir": "/mnt/work"}) as box:
            assert await box.read(box.workdir / "state") == b"kept"
        assert list(json.loads(index.read_text())) == [name]
    assert not json.loads(index.read_text()), "removed with the provider"


async def test_snapshots_of_a_dead_node_are_removed(docker: Path) -> None:
    index = docker.parent / "images/index"
    index.parent.mkdir()
    index.write_text(json.dumps({"localhost/uniagent-123-dead:1": "i0", "built/from:it": "i1", "<none>:<none>": "i2"}))
    async with ContainerProvider():
        assert list(json.loads(index.read_text())) == ["built/from:it", "<none>:<none>"]


async def test_prepared_and_kept_warm(docker: Path) -> None:
    section = {**SECTION, "prepare": "echo $RANDOM$RANDOM > made"}
    async with ContainerProvider({"warm": 1}) as provider:
        seen = set()
        for number in range(3):
            async with provider.open({**section, "files": {"n": str(number)}}) as box:
                seen.add(await box.read(box.workdir / "made"))
                assert await box.read(box.workdir / "n") == str(number).encode()
        assert len(seen) == 1
        networks = [json.loads(p.read_text())["options"]["--network"] for p in docker.glob("*/given")]
        assert ["bridge"] not in networks, "only what prepares has a network"


async def test_an_image_that_cannot_be_had_is_told(docker: Path) -> None:
    async with ContainerProvider() as provider:
        with pytest.raises(InfraError, match="docker run failed: Unable to find image"):
            async with provider.open({**SECTION, "image": "nosuchimage"}):
                pass


async def test_mistakes_are_named(docker: Path) -> None:
    async with ContainerProvider() as provider:
        for section, complaint in (
            ({}, "image is missing"),
            ({**SECTION, "pull": "sometimes"}, "pull = .*allowed: always, missing, never"),
            ({**SECTION, "isolation": "none"}, "no key 'isolation'"),
        ):
            with pytest.raises(UserError, match=complaint):
                async with provider.open(section):
                    pass


async def test_without_docker_or_podman(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"needs docker or podman.*provider = 'local'"):
        async with ContainerProvider():
            pass


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("debian", "m/library/debian"),
        ("swebench/eval:1", "m/swebench/eval:1"),
        ("docker.io/library/debian", "m/library/debian"),
        ("ghcr.io/a/b", "ghcr.io/a/b"),
        ("localhost:5000/a", "localhost:5000/a"),
    ],
)
def test_mirrors(image: str, expected: str) -> None:
    assert mirrored(image, {"docker.io": "m/"}) == expected


def test_labels_of_both_engines() -> None:
    assert _labels("a=1,uniagent.node=x") == ["a=1", "uniagent.node=x"]
    assert _labels("map[a:1 uniagent.node:x]") == ["a=1", "uniagent.node=x"]
    assert _labels('{"uniagent.node": "x"}') == ["uniagent.node=x"]


async def test_an_engine_that_does_not_answer_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, code in (("docker", 1), ("podman", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("uniagent.adapters.sandboxes.container.root_folder", lambda fast: tmp_path)
    async with ContainerProvider() as provider:
        assert provider.program == f"{tmp_path}/podman"
    async with ContainerProvider({"program": str(tmp_path / "podman")}) as provider:
        assert provider.program == f"{tmp_path}/podman"
