"""One instance rebuilt from a package's sdist: a fix of the past is taken back, its tests are hidden, and the whole
task is played with the real parsers, in the local sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.ports import AgentResult
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.base import open_sandbox
from uniagent.tasks.check import check_sample
from uniagent.tasks.config import ENDPOINT
from uniagent.tasks.data import samples
from uniagent.tasks.swe import parsers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("confined")]
pytest.importorskip("swebench")
COMMAND = "python -m pytest -rA --color=no -p no:cacheprovider"
PROBLEM = """pluralize("passerby") gives "passerbies", and singularize("passersby") "passersby".

It should be: one passerby, many passersby."""


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    return subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def statuses(folder: Path) -> dict[str, str]:
    """Of the repository's tests, as they are now."""
    words = [sys.executable, *COMMAND.split()[1:], "-o", "addopts=", "test_inflection.py"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    return parsers.find("parse_log_pytest", instance_id="x", repo="x/y", version="1")(done.stdout)


def without(path: Path, *fragments: str) -> None:
    """Take the lines with a fragment out."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not any(f in line for f in fragments)))


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A row of SWE-rebench about inflection 0.5.1, whose lists come from runs before and after the fix."""
    root = tmp_path_factory.mktemp("sdist")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
    done = subprocess.run([*pip, "-d", str(root), "inflection==0.5.1"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the sdist cannot be had here: {done.stderr.strip()[-200:]}")
    with tarfile.open(root / "inflection-0.5.1.tar.gz") as tar:
        tar.extractall(root, filter="data")
    folder = root / "inflection-0.5.1"
    git(folder, "init", "-q")
    code, tests = folder / "inflection/__init__.py", folder / "test_inflection.py"
    fixed_code, fixed_tests = code.read_text(), tests.read_text()
    without(code, "(passer)")
    without(tests, "passer")
    with tarfile.open(root / "base.tar.gz", "w:gz") as tar:
        tar.add(folder, ".", filter=lambda info: None if ".git" in Path(info.name).parts else info)
    git(folder, "add", "-f", ".")
    git(folder, "commit", "-q", "-m", "base")
    base = git(folder, "rev-parse", "HEAD").strip()
    tests.write_text(fixed_tests)
    test_patch, before = git(folder, "diff"), statuses(folder)
    git(folder, "add", "test_inflection.py")
    code.write_text(fixed_code)
    patch, after = git(folder, "diff"), statuses(folder)
    passing = [test for test, status in after.items() if status == "PASSED"]
    row = {
        "instance_id": "jpvanhal__inflection-1",
        "repo": "jpvanhal/inflection",
        "base_commit": base,
        "patch": patch,
        "test_patch": test_patch,
        "problem_statement": PROBLEM,
        "created_at": "2020-08-22T00:00:00Z",
        "version": "0.5",
        "FAIL_TO_PASS": [test for test in passing if before.get(test) != "PASSED"],
        "PASS_TO_PASS": [test for test in passing if before.get(test) == "PASSED"],
        "install_config": {"test_cmd": COMMAND, "log_parser": "parse_log_pytest", "python": "3.11"},
        "archive": str(root / "base.tar.gz"),
    }
    assert row["FAIL_TO_PASS"]
    assert len(row["PASS_TO_PASS"]) > 300
    (root / "filtered.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = samples("swe_rebench/filtered", seed=0, options={"path": str(root / "filtered.jsonl"), "image": ""})
    return found


class Providers:
    def __init__(self, provider: LocalProvider) -> None:
        self.provider = provider

    def sandbox(self, name: str) -> Any:
        return self.provider

    def sandbox_options(self, name: str) -> dict[str, Any]:
        return {"read_only": sorted({sys.prefix, str(Path(sys.executable).resolve().parents[1])})}


TASK = {
    "name": "swe_rebench",
    "sandbox": {"workdir": "/testbed", "env": {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"}},
    "verifier": {"timeout_s": 300},
}


async def test_the_instance_is_solved_by_its_patch_alone_and_nothing_fools_its_tests(sample: dict[str, Any]) -> None:
    async with LocalProvider({"warm": 0}) as provider:
        config = TaskConfigResolver([TASK]).resolve(sample, dict.fromkeys(ENDPOINT, "x"))
        checked = await check_sample(0, sample, config, Providers(provider), runs=1)
    assert checked.problems == ()
    assert checked.rewards == {"nothing": 0.0, "oracle": 1.0, "empty_tests": 0.0, "forged_results": 0.0}


async def test_another_fix_counts_and_half_a_fix_does_not(sample: dict[str, Any]) -> None:
    async def play(*rules: tuple[str, str]) -> Any:
        async with LocalProvider({"warm": 0}) as provider:
            providers = Providers(provider)
            config = TaskConfigResolver([TASK]).resolve(sample, dict.fromkeys(ENDPOINT, "x"))
            task: Any = config.build(providers)
            async with open_sandbox(config, providers) as sandbox:
                await task.setup(sandbox)
                done = await (await sandbox.shell()).run("! grep -rq passer .", timeout_s=60)
                assert done.code == 0, "neither the fix nor its tests are in the repository"
                code = (await sandbox.read(sandbox.workdir / "inflection/__init__.py")).decode()
                for table, rule in rules:
                    code = code.replace(f"{table} = [", f"{table} = [\n    {rule},")
                await sandbox.write(sandbox.workdir / "inflection/__init__.py", code.encode())
                return await task.verify(sandbox, AgentResult(True))

    plural = "PLURALS", """(r"(?i)(p)assers?by$", r"\\1assersby")"""
    singular = "SINGULARS", """(r"(?i)(p)assersby$", r"\\1asserby")"""
    whole = await play(plural, singular)
    assert (whole.reward, whole.details["status"], whole.flags) == (1.0, "RESOLVED_FULL", ())
    half = await play(plural)
    assert (half.reward, half.outcome) == (0.0, False)
    assert 0 < half.metrics["fail_to_pass"] < 1
