"""The guard on real repositories and sandboxes: history, copies, restored files, ended processes, the record."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
import repo
import stage

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.adapters.sandboxes.local_sandbox import LocalSandbox
from uniagent.engine.egress.record import egress_of
from uniagent.engine.errors import InfraError, UserError
from uniagent.tasks.guards import history
from uniagent.tasks.leakage import Guard, Origin, prepare, seal

pytestmark = pytest.mark.slow


async def said(box: LocalSandbox, command: str) -> str:
    return (await (await box.shell()).run(command, timeout_s=30)).output.decode()


async def test_nothing_younger_than_the_base_commit_is_left(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({}) as box:
        base, fix = await repo.plant(box)
        await said(box, "git clone -q --bare . /tmp/other; echo /tmp/other/objects > .git/objects/info/alternates")
        await said(box, "echo mine > untracked; echo more >> README.md")
        assert "len(items), size" in await said(box, f"git show {fix}:splitter/core.py")
        assert await history.leftovers(box, box.workdir, base), "the check sees what there is to remove"
        assert await history.rebuild(box, box.workdir, base) == base
        assert await history.leftovers(box, box.workdir, base) == []
        assert await said(box, f"git cat-file -e {fix} 2>/dev/null || echo gone") == "gone\n"
        assert (await said(box, "git tag; git log --oneline --all | wc -l; git remote; git stash list")).split() == [
            "v1.0",
            "1",
        ]
        assert (await said(box, "git status --short")).split() == ["M", "README.md", "??", "untracked"]
        assert await said(box, "git commit -qam work && git log --format=%an -1") == "a\n", "and it can be worked in"


async def test_a_base_commit_that_is_not_there(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({}) as box:
        await repo.plant(box)
        with pytest.raises(InfraError, match="cut off"):
            await history.rebuild(box, box.workdir, "f" * 40)


async def test_what_judges_is_put_back_and_what_runs_is_ended(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({}) as box:
        await repo.plant(box)
        await box.write(box.workdir / "tests/page.html", b"<html></html>")
        prepared = await prepare(box, Guard(Origin(), tests=("tests",)))
        await said(box, "sleep 1000 & (setsid sleep 1000 &); echo > conftest.py; rm tests/page.html; chmod 000 tests; "
                        "echo '[pytest]' > pytest.ini; echo 'def f(): pass' >> splitter/core.py")  # fmt: skip
        kinds = {f.kind for f in await seal(box, prepared)}
        assert {"runner_file", "tests_changed"} <= kinds
        files = await box.files(box.workdir)
        assert files[PurePosixPath("tests/page.html")] == b"<html></html>"
        assert not {PurePosixPath("conftest.py"), PurePosixPath("pytest.ini")} & files.keys()
        assert b"def f()" in files[PurePosixPath("splitter/core.py")], "the agent's work stays"
        assert "sleep" not in (await box.exec(["ps", "ax"], timeout_s=10)).output.decode()


async def test_copies_of_the_fix_are_taken_away(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({}) as box:
        await repo.plant(box)
        await stage.leave_copies(box)
        source = Origin(distributions=("splitter",), packages=("splitter",))
        prepared = await prepare(box, Guard(source, tests=("tests",)))
        assert "len(items), size" not in await said(box, "grep -rs 'len(items), size' /tmp; ls -R /tmp/.cache")
        assert len(prepared.decoys) == 2


async def test_a_guarded_sandbox_trusts_the_proxy_and_has_no_other_way_out(confined: None) -> None:
    world = stage.a_world()
    async with world.open(), LocalProvider({"warm": 1}) as provider:
        provider.outside = world.outside
        for _ in range(2):  # the second one was kept warm
            async with provider.open({"network": "guarded", "allow": ["docs.python.org"]}) as box:
                page = "https://docs.python.org/3/library/itertools.html"
                fetch = f"import urllib.request as u; print(u.urlopen('{page}').read().decode())"
                assert await said(box, f'curl -sS {page}; echo; python3 -c "{fetch}"') == "batched\nbatched\n"
                assert "403" in await said(box, "git ls-remote https://github.com/acme/splitter 2>&1")
                assert "resolve" in await said(box, f"curl -sS --noproxy '*' {page} 2>&1")
                assert (await said(box, "touch /run/uniagent-trust/x 2>&1; env | grep -c -i proxy")).endswith("\n8\n")
                record = egress_of(box)
                assert record is not None
                assert [a.allowed for a in record.accesses] == [True, True, False]


async def test_an_allowlist_is_of_hosts(confined: None) -> None:
    world = stage.a_world()
    async with world.open(), LocalProvider({"warm": 0}) as provider:
        provider.outside = world.outside
        async with provider.open({"network": "allowlist", "allow": ["docs.python.org"]}) as box:
            page = "https://docs.python.org/3/library/itertools.html"
            assert await said(box, f"curl -sS -k {page}") == "batched"
            assert "403" in await said(box, "curl -sS -k https://github.com/acme/splitter 2>&1")


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"network": "guarded", "isolation": "none"}, "isolation"),
        ({"allow": ["x.org"]}, "network"),
        ({"network": "guarded", "allow": ["x.org/path"]}, "path"),
        ({"network": "allowlist", "allow": ["a b"]}, "allow"),
        ({"network": "open"}, "guarded"),
    ],
)
async def test_sections_that_cannot_work(section: dict[str, object], says: str) -> None:
    async with LocalProvider({"warm": 0}) as provider:
        with pytest.raises(UserError, match=says):
            async with provider.open(section):
                pass
