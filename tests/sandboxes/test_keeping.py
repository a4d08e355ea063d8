"""Local sandboxes: snapshots, prepared ones, and disks that fill up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.adapters.sandboxes.snapshots import snapshot
from uniagent.adapters.sandboxes.ssh import SshProvider
from uniagent.engine.errors import UserError


def provider_in(tmp_path: Path, **more: Any) -> LocalProvider:
    return LocalProvider({"root": str(tmp_path / "root"), "warm": 0, **more})


async def said(box: Any, command: str) -> bytes:
    return bytes((await (await box.shell()).run(command, timeout_s=30)).output)


@pytest.mark.parametrize("disk", [{}, {"disk_mib": 8}], ids=["on disk", "in memory"])
async def test_a_snapshot_is_a_start(isolation: str, disk: dict[str, Any], tmp_path: Path) -> None:
    if disk and isolation == "none":
        disk = {}
    async with provider_in(tmp_path, isolation=isolation, **disk) as provider:
        async with provider.open({}) as box:
            await said(
                box, "mkdir d; echo kept > d/state; chmod 750 d/state; ln -s /etc/passwd link; echo t > $TMPDIR/t"
            )
            name = await snapshot(box)
            await said(box, "echo changed after > d/state")
        section = {"snapshot": name, "files": {"new": "x"}}
        async with provider.open(section) as one, provider.open(section) as other:
            assert await said(one, "cat d/state new; stat -c %a d/state; readlink link") == b"kept\nx750\n/etc/passwd\n"
            await said(one, "echo of one > d/state")
            assert await other.read(other.workdir / "d/state") == b"kept\n"
            if isolation == "bwrap":
                assert await said(one, "cat /tmp/t") == b"t\n"
    assert not any((tmp_path / "root").iterdir()), "removed with the node"


async def test_prepared_once_and_then_from_the_shelf(confined: None, tmp_path: Path) -> None:
    async with provider_in(tmp_path, warm=2, prepare="echo $RANDOM$RANDOM > made") as provider:
        seen = set()
        for number in range(3):
            async with provider.open({"files": {"n": str(number)}}) as box:
                seen.add(await said(box, "cat made"))
                assert await box.read(box.workdir / "n") == str(number).encode()
        assert len(seen) == 1
        with pytest.raises(UserError, match="prepare ended with 4: cannot"):
            async with provider.open({"prepare": "echo cannot; exit 4"}):
                pass


async def test_a_full_disk_is_the_sandboxes_own(confined: None, tmp_path: Path) -> None:
    before = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    async with provider_in(tmp_path) as provider:
        async with provider.open({"disk_mib": 4}) as full, provider.open({"disk_mib": 4}) as other:
            for place in (".", "/tmp", "/dev/shm"):
                told = await said(full, f"head -c 20000000 /dev/zero > {place}/big; echo $?; wc -c < {place}/big")
                assert b"No space left on device" in told
                assert int(told.split()[-1]) <= 4 << 20
            assert b"Read-only" in await said(full, "echo x > /dev/big")
            with pytest.raises(OSError, match="No space left on device"):
                await full.write(full.workdir / "more", b"x" * 100_000)
            assert await said(full, "rm big; echo room > small; cat small") == b"room\n", "usable again"
            assert await full.read(full.workdir / "small") == b"room\n"
            assert {str(p) for p in await full.files(full.workdir)} == {"more", "small"}
            assert await said(other, "head -c 3000000 /dev/zero > big; wc -c < big") == b"3000000\n"
            await other.write(other.workdir / "a/b", b"c")
            assert await said(other, "cat a/b") == b"c"
        after = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert before - after < 1 << 30, "the host's disk is not what filled up"


async def test_mistakes_are_named(tmp_path: Path) -> None:
    async with provider_in(tmp_path) as provider:
        for section, complaint in (
            ({"disk_mib": 4, "isolation": "none"}, "disk_mib needs isolation = 'bwrap'"),
            ({"snapshot": "/nowhere"}, "snapshot = '/nowhere' is no snapshot"),
        ):
            with pytest.raises(UserError, match=complaint):
                async with provider.open(section):
                    pass


async def test_where_there_are_no_snapshots() -> None:
    with pytest.raises(UserError, match="keeps no snapshots"):
        await snapshot(SshProvider({}))  # type: ignore[arg-type]
