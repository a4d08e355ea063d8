"""One episode of the worked example: the repository, the world around it, the guard, an agent that runs a script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath

import repo
import trio
from attrs import frozen
from world import World, index, text, wheel

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.egress.record import Access
from uniagent.engine.egress.rules import Verdict
from uniagent.engine.egress.target import Target
from uniagent.engine.ports import AgentResult, Sandbox, TaskResult
from uniagent.tasks.leakage import Guard, Tests, grade, origin, prepare, seal, settle

ISSUE = "https://github.com/acme/splitter/issues/12"
PROBLEM = f"chunked() loses the last chunk, see {ISSUE}. It is used with helper-lib."
RAW = "raw.githubusercontent.com/acme/splitter/main/splitter/core.py"
PATH = "/tmp/bin:/usr/local/bin:/usr/bin:/bin"
SITE = "/tmp/.local/lib/python3.11/site-packages"
REQUIRED = tuple(f"tests.test_core.Chunks.test_{name}" for name in ("even", "rest", "empty"))


def a_world() -> World:
    """The registry has an old and a new release of the project, the forge has the fix."""
    world = World()
    world.put("github.com/acme/splitter/issues/12", "the last chunk is lost")
    world.put("github.com/acme/splitter/pull/13.diff", repo.FIXED)
    world.put("github.com/someone/splitter/raw/main/splitter/core.py", repo.FIXED)
    world.put("api.github.com/repos/acme/splitter/pulls/13", repo.FIXED)
    world.put(RAW, repo.FIXED)
    world.put("code.mirror.example/acme-splitter/core.py", repo.FIXED)
    world.put("docs.python.org/3/library/itertools.html", "batched")
    world.put("docs.python.org/moved", text("", 302, location=f"https://{RAW}"))
    world.put("splitter.readthedocs.io/en/latest/_modules/splitter/core.html", repo.FIXED)
    world.put("github.com/acme/splitter/issues/12?plain", repo.FIXED)
    for host in ("pypi.org",):
        old, new = "splitter-1.0-py3-none-any.whl", "splitter-1.1-py3-none-any.whl"
        world.put(
            f"{host}/simple/splitter/",
            index("splitter", [(old, "2024-04-01T00:00:00Z"), (new, "2024-06-01T00:00:00Z")]),
        )
        world.put(
            f"{host}/simple/helper-lib/",
            index("helper-lib", [("helper_lib-2.0-py3-none-any.whl", "2025-01-01T00:00:00Z")]),
        )
    files = "files.pythonhosted.org/packages/aa/bb"
    for name, inside in (("splitter_ng", "splitter/core.py"), ("big_framework", "framework/_vendor/splitter/core.py")):
        file = f"{name}-2.0-py3-none-any.whl"
        world.put(f"pypi.org/simple/{name.replace('_', '-')}/", index(name, [(file, "2025-01-01T00:00:00Z")]))
        world.put(f"{files}/{file}", wheel(name, "2.0", {inside: repo.FIXED}))
    world.put(f"{files}/splitter-1.0-py3-none-any.whl", wheel("splitter", "1.0", {"splitter/core.py": repo.BROKEN}))
    world.put(f"{files}/splitter-1.1-py3-none-any.whl", wheel("splitter", "1.1", {"splitter/core.py": repo.FIXED}))
    world.put(f"{files}/helper_lib-2.0-py3-none-any.whl", wheel("helper_lib", "2.0", {"helper_lib.py": "VALUE = 1\n"}))
    packument = {
        "name": "left",
        "dist-tags": {"latest": "1.0.0"},
        "time": {"1.0.0": "2024-01-01T00:00:00Z"},
        "versions": {"1.0.0": {"dist": {"tarball": "https://registry.npmjs.org/left/-/left-1.0.0.tgz"}}},
    }
    world.put("registry.npmjs.org/left", text(json.dumps(packument), content_type="application/json"))
    return world


@frozen
class Outcome:
    result: TaskResult
    said: str
    accesses: tuple[Access, ...]
    seen: tuple[tuple[str, str], ...]

    @property
    def flags(self) -> tuple[str, ...]:
        return self.result.flags


async def leave_copies(sandbox: Sandbox) -> None:
    """What a careless image holds: an installed newer release, a wheel of it, an installer's cache."""
    new = wheel("splitter", "1.1", {"splitter/core.py": repo.FIXED})
    await sandbox.write(PurePosixPath("/tmp/wheels/splitter-1.1-py3-none-any.whl"), new)
    await sandbox.write(PurePosixPath("/tmp/.cache/pip/http/a/b/c"), repo.FIXED.encode())
    await sandbox.write(PurePosixPath(f"{SITE}/splitter/core.py"), repo.FIXED.encode())
    await sandbox.write(PurePosixPath(f"{SITE}/splitter/__init__.py"), b"")
    await sandbox.write(PurePosixPath(f"{SITE}/splitter-1.1.dist-info/METADATA"), b"Name: splitter\n")


async def play(script: str, *, network: str = "guarded", env: Mapping[str, str] | None = None) -> Outcome:
    """The script as an agent's one command; ``{base}``, ``{fix}`` and ``{address}`` in it are filled in."""
    async with a_world().open() as world, LocalProvider({"warm": 0}) as provider:
        provider.outside = world.outside
        async with provider.open({"network": network, "env": {"PATH": PATH, **(env or {})}}) as sandbox:
            base, fix = await repo.plant(sandbox)
            await leave_copies(sandbox)
            source = origin(
                {
                    "repo": "https://github.com/acme/splitter",
                    "base_commit": base,
                    "base_date": "2024-05-01",
                    "distribution": "splitter",
                    "package": "splitter",
                    "version": "1.0",
                    "fix_commit": fix,
                    "mirrors": ["code.mirror.example/acme-splitter"],
                }
            )
            guard = Guard(source, tests=("tests",), problem=PROBLEM)
            prepared = await prepare(sandbox, guard)
            for name, value in (("base", base), ("fix", fix), ("address", world.address("raw.githubusercontent.com"))):
                script = script.replace("{" + name + "}", value)
            done = await (await sandbox.shell()).run(script, timeout_s=30)
            call = {"function": {"name": "shell", "arguments": json.dumps({"command": script})}}
            acted = AgentResult(True, [{"role": "assistant", "tool_calls": [call]}])
            findings = await seal(sandbox, prepared, acted)
            graded = await grade(sandbox, prepared, Tests(("tests/test_core.py",), timeout_s=30))
            reward = TaskResult(float(graded.passed(REQUIRED)))
            result = settle(reward, [*findings, *graded.findings], guard.consequence)
            accesses = sandbox.egress.accesses if sandbox.egress is not None else ()
            said = done.output.decode(errors="replace") + graded.output
            return Outcome(result, said, accesses, tuple(world.seen))


class Anything:
    """Rules that allow everything: the world without a guard."""

    def judge(self, method: str, target: Target) -> Verdict:
        return Verdict(True, "anything", private=True)

    def tunnel(self, host: str, port: int) -> Verdict:
        return Verdict(True, "anything", private=True)

    def rewrite(self, target: Target) -> None:
        return None


async def unguarded(script: str) -> bool:
    """Whether the script makes the tests pass where nothing guards them: by their exit status."""
    async with a_world().open() as world, LocalProvider({"warm": 0}) as provider:
        provider.outside = world.outside
        async with provider.open({"network": "guarded", "env": {"PATH": PATH}}) as sandbox:
            _, fix = await repo.plant(sandbox)
            await leave_copies(sandbox)
            sandbox.egress.rules = Anything()
            await (await sandbox.shell()).run(script.replace("{fix}", fix), timeout_s=30)
            done = await sandbox.exec(["python3", "-m", "unittest", "-q", "tests.test_core"], timeout_s=30)
            return done.code == 0


def run(script: str, **options: object) -> Outcome:
    return trio.run(lambda: play(script, **options))  # type: ignore[arg-type]
