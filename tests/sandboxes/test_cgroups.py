"""Control groups: found where they can be used, made, entered, removed; and what they do to a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from uniagent.adapters.sandboxes.cgroups import Group, Hierarchy, hierarchies, remove_left
from uniagent.adapters.sandboxes.local import LocalProvider


def test_version_1_is_found_below_the_own_group(tmp_path: Path) -> None:
    for controller in ("memory", "pids"):
        (tmp_path / controller / "own/job").mkdir(parents=True)
    (tmp_path / "mountinfo").write_text(
        f"30 20 0:30 / {tmp_path}/memory rw,nosuid - cgroup cgroup rw,memory\n"
        f"31 20 0:31 /own {tmp_path}/pids rw - cgroup cgroup rw,pids\n"
        "32 20 0:32 / /proc rw - proc proc rw\n"
    )
    (tmp_path / "cgroup").write_text("5:memory:/own/job\n4:pids:/own/job\n3:name=systemd:/x\n0::/\n")
    (tmp_path / "pids/job").mkdir()
    found = hierarchies(tmp_path)
    assert found["memory"] == Hierarchy("memory", tmp_path / "memory/own/job", 1)
    assert found["pids"] == Hierarchy("pids", tmp_path / "pids/job", 1), "a mount may show only a part of the tree"


def test_version_2_needs_its_controllers_handed_on(tmp_path: Path) -> None:
    own = tmp_path / "fs/job"
    own.mkdir(parents=True)
    (tmp_path / "mountinfo").write_text(f"30 20 0:30 / {tmp_path}/fs rw - cgroup2 cgroup2 rw,nsdelegate\n")
    (tmp_path / "cgroup").write_text("0::/job\n")
    (own / "cgroup.subtree_control").write_text("memory")
    assert hierarchies(tmp_path)["memory"] == Hierarchy("memory", own, 2)
    (own / "cgroup.subtree_control").unlink()
    assert hierarchies(tmp_path) == {}


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert hierarchies(tmp_path) == {}


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (1, {"memory.limit_in_bytes": "67108864", "memory.memsw.limit_in_bytes": "67108864", "pids.max": "20"}),
        (2, {"memory.max": "67108864", "memory.swap.max": "0", "pids.max": "20"}),
    ],
)
def test_limits_are_written_and_groups_removed(version: int, files: dict[str, str], tmp_path: Path) -> None:
    usable = {name: Hierarchy(name, tmp_path, version) for name in ("memory", "pids")}
    group = Group(usable, "node-1", memory_mib=64, pids=20)
    folder = tmp_path / "uniagent-node-1"
    assert {f.name: f.read_text() for f in folder.iterdir()} == files
    group.enter(123)
    assert (folder / "cgroup.procs").read_text() == "123"
    for file in folder.iterdir():  # the kernel's files vanish with their folder
        file.unlink()
    group.close()
    assert not folder.exists()


def test_only_what_is_asked_for_is_made(tmp_path: Path) -> None:
    usable = {"memory": Hierarchy("memory", tmp_path / "m", 1), "pids": Hierarchy("pids", tmp_path / "p", 1)}
    (tmp_path / "p").mkdir()
    assert Group(usable, "x", memory_mib=None, pids=5).folders == [tmp_path / "p/uniagent-x"]


def test_groups_of_a_dead_node_are_removed(tmp_path: Path) -> None:
    usable = {"pids": Hierarchy("pids", tmp_path, 1)}
    for name in ("uniagent-dead-1", "uniagent-dead-2", "uniagent-alive-1"):
        (tmp_path / name).mkdir()
    remove_left(usable, "dead")
    assert [p.name for p in tmp_path.iterdir()] == ["uniagent-alive-1"]


async def test_a_sandbox_in_its_limits(isolation: str) -> None:
    usable = hierarchies()
    if set(usable) != {"memory", "pids"}:
        pytest.skip("this user may not make control groups here")
    section = {"isolation": isolation, "memory_mib": 64, "pids": 20}
    async with LocalProvider({"warm": 0}) as provider, provider.open(section) as box:
        shell = await box.shell()
        await shell.run("X=5", timeout_s=10)
        done = await shell.run("head -c 200M /dev/zero | tail -c 190M > /dev/null", timeout_s=20)
        assert done.code == 137, "the one that takes the memory is killed"
        forks = "sh -c 'for i in $(seq 40); do sleep 30 & done'"
        done = await shell.run(forks, timeout_s=20)
        assert b"ork" in done.output, "no more processes than allowed"
        assert (await shell.run("echo $X", timeout_s=10)).output == b"5\n", "and the shell is as it was"
        assert box.group is not None
        folders = list(box.group.folders)
        assert folders
    assert not any(folder.exists() for folder in folders)
