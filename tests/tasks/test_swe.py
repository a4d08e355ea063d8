"""Repair tasks, the pure parts: patches, scripts, logs, grades, rows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from uniagent.engine.errors import InfraError, UserError
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.config import ENDPOINT
from uniagent.tasks.data import samples
from uniagent.tasks.swe import r2e_gym
from uniagent.tasks.swe.benchmarks import (
    instance_image,
    swe_bench_case,
    swe_bench_samples,
    swe_rebench_case,
)
from uniagent.tasks.swe.grade import FULL, NO, PARTIAL, report
from uniagent.tasks.swe.logs import exit_code, read_log
from uniagent.tasks.swe.patches import touched
from uniagent.tasks.swe.script import END, EXIT_CODE, START, evaluation_script, files_to_run, recorded

MIXED = """\
diff --git a/tests/test_old.py b/tests/test_old.py
index 1..2 100644
--- a/tests/test_old.py
+++ b/tests/test_old.py
@@ -1,2 +1,2 @@
--- a/looks/like/a/header
+++ b/looks/like/a/header
 kept
diff --git a/tests/test_new.py b/tests/test_new.py
new file mode 100644
--- /dev/null
+++ b/tests/test_new.py
@@ -0,0 +1 @@
+new = 1
diff --git a/tests/gone.py b/tests/gone.py
deleted file mode 100644
--- a/tests/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-old = 1
diff --git a/tests/a name.py b/tests/other name.py
similarity index 100%
rename from tests/a name.py
rename to tests/other name.py
diff --git a/tests/data.json b/tests/data.json
index 1..2 100644
--- a/tests/data.json
+++ b/tests/data.json
@@ -1 +1 @@
-1
+2
"""


def parse(log: str) -> dict[str, str]:
    """Lines such as ``PASSED test``."""
    lines = (line.split(maxsplit=1) for line in log.splitlines())
    return {words[1]: words[0] for words in lines if len(words) == 2 and words[0] in ("PASSED", "FAILED", "ERROR")}


# ---------------------------------------------------------------- patches and scripts


def test_a_patch_names_the_files_it_touches() -> None:
    found = touched(MIXED)
    assert found.before == ("tests/test_old.py", "tests/gone.py", "tests/a name.py", "tests/data.json")
    assert found.after == ("tests/test_old.py", "tests/test_new.py", "tests/other name.py", "tests/data.json")
    assert found.added == ("tests/test_new.py", "tests/other name.py")
    assert touched("").after == ()


def test_test_commands_get_the_test_files_alone() -> None:
    assert files_to_run(MIXED, "x/y") == ["tests/test_old.py", "tests/test_new.py", "tests/other name.py"]
    assert files_to_run(MIXED, "django/django")[:2] == ["test_old", "test_new"]


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    return subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One test file at the base commit; the patch below changes it and adds one."""
    folder = tmp_path / "repo"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests/old.txt").write_text("one\n \n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "base")
    return folder


def patch_of(folder: Path) -> str:
    """A patch whose last line is a blank context line."""
    (folder / "tests/old.txt").write_text("two\n \n")
    (folder / "tests/new.txt").write_text("new\n")
    git(folder, "add", "-A")
    patch = git(folder, "diff", "--cached", "tests/new.txt") + git(folder, "diff", "--cached", "tests/old.txt")
    assert patch.endswith("\n  \n")
    git(folder, "reset", "-q", "--hard")
    return patch


def run(script: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": str(folder.parent)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.stdout


def test_the_script_puts_the_tests_in_place_whatever_the_agent_did_to_them_and_takes_them_away(
    repository: Path,
) -> None:
    patch, base = patch_of(repository), git(repository, "rev-parse", "HEAD").strip()
    script = evaluation_script(
        workdir=str(repository),
        base_commit=base,
        test_patch=patch,
        before=["export GREETING=hello"],
        commands=["echo $GREETING $(cat tests/*.txt | head -2)", "(exit 3)"],
    )
    (repository / "tests/old.txt").write_text("the agent's\n")
    (repository / "tests/new.txt").write_text("the agent's\n")
    for _ in range(2):
        log = run(script, repository)
        inside = log.split(START)[1].split(END)[0]
        assert "hello new two" in inside
        assert exit_code(log.split(END)[1]) == 3
        assert (repository / "tests/old.txt").read_text() == "one\n \n"
        assert not (repository / "tests/new.txt").exists()


def test_a_test_patch_that_does_not_apply_is_infrastructure(repository: Path) -> None:
    patch = patch_of(repository).replace("-one", "-three")
    script = evaluation_script(
        workdir=str(repository), base_commit="HEAD", test_patch=patch, before=[], commands=["echo PASSED x"]
    )
    with pytest.raises(InfraError, match="does not apply"):
        read_log(run(script, repository), parse)


def test_a_scripts_exit_status_is_recorded_outside_of_the_markers() -> None:
    script = f"#!/bin/bash\n: '{START}'\nfalse\n: '{END}'\ngit checkout x\n"
    log = run("set -x\n" + recorded(script), Path("/"))
    assert exit_code(log.split(END)[1]) == 1
    assert recorded("echo no markers\n") == "echo no markers\n"


# ---------------------------------------------------------------- logs


def log(inside: str, code: int = 0, before: str = "") -> str:
    return f"{before}+ : '{START}'\n{inside}\n+ : '{END}'\n{EXIT_CODE}: {code}\n"


def test_statuses_are_read_between_the_markers() -> None:
    assert read_log(log("PASSED a\nFAILED b", 1, before="PASSED c\n"), parse) == {"a": "PASSED", "b": "FAILED"}


def test_results_that_went_around_the_markers_are_read_too() -> None:
    assert read_log("PASSED a\n" + log(""), parse) == {"a": "PASSED"}


@pytest.mark.parametrize(
    "text",
    [
        log("SyntaxError: invalid syntax", 2),  # the code under test cannot be imported
        log("PASSED a", 1),  # a failed run whose log shows none
        f"+ : '{START}'\nPASSED a\n",  # ended in the middle
    ],
)
def test_a_run_that_tells_nothing_has_no_statuses(text: str) -> None:
    assert read_log(text, parse) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cd: /testbed: No such file or directory\n", "before the tests"),
        (log("Killed", 137), "did not run"),
        (log("bash: pytest: command not found", 127), "not there"),
        (log("PASSED a", before="error: tests/a.py: patch does not apply\n"), "does not apply"),
    ],
)
def test_an_evaluation_that_could_not_be_carried_out_is_infrastructure(text: str, said: str) -> None:
    with pytest.raises(InfraError, match=said):
        read_log(text, parse)


def test_a_test_that_prints_such_words_is_still_a_test() -> None:
    assert read_log(log("Killed\nerror: patch failed\nFAILED a", 1), parse) == {"a": "FAILED"}


# ---------------------------------------------------------------- grades


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ({"f": "PASSED", "g": "XFAIL", "p": "PASSED"}, FULL),
        ({"f": "PASSED", "g": "PASSED", "p": "SKIPPED"}, FULL),
        ({"f": "PASSED", "g": "SKIPPED", "p": "PASSED"}, PARTIAL),
        ({"f": "PASSED", "g": "PASSED", "p": "FAILED"}, NO),
        ({"f": "PASSED", "g": "PASSED"}, NO),
        ({"f": "FAILED", "g": "ERROR", "p": "PASSED"}, NO),
        ({}, NO),
    ],
)
def test_a_repair_is_full_partial_or_none(statuses: dict[str, str], status: str) -> None:
    assert report(statuses, ["f", "g"], ["p"]).status == status


def test_a_name_cut_inside_its_parameter_stands_for_those_that_agree() -> None:
    statuses = {"t[log(a)]": "PASSED", "t[log(b)]": "PASSED", "u[x1]": "PASSED", "u[x2]": "FAILED"}
    assert report(statuses, ["t[log(a"], []).fixed == ("t[log(a",)
    assert report(statuses, ["u[x"], []).not_fixed == ("u[x",)


def test_logs_of_failures_alone() -> None:
    assert report({"b": "FAILED"}, ["a"], ["c"], fail_only=True).status == FULL
    assert report({"a": "FAILED"}, ["a"], ["c"], fail_only=True).status == NO


# ---------------------------------------------------------------- rows

CURRENT = {
    "instance_id": "Owner__Repo-12",
    "repo": "owner/repo",
    "base_commit": "abc123",
    "patch": "",
    "test_patch": MIXED,
    "problem_statement": "It is broken.\n",
    "hints_text": "",
    "created_at": "2020-01-01T00:00:00Z",
    "version": "1.0",
    "FAIL_TO_PASS": '["tests/test_old.py::test_a"]',
    "PASS_TO_PASS": "[]",
    "environment_setup_commit": "abc123",
    "image": "swebench/sweb.eval.x86_64.owner_1776_repo-12:latest",
    "eval_script": f"#!/bin/bash\nset -uxo pipefail\n: '{START}'\npytest\n: '{END}'\n",
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
}
REBENCH = {
    **{k: v for k, v in CURRENT.items() if k not in ("image", "eval_script", "log_parser", "eval_type")},
    "FAIL_TO_PASS": ["tests/test_old.py::test_a"],
    "PASS_TO_PASS": [],
    "docker_image": "swerebench/sweb.eval.x86_64.owner_1776_repo-12",
    "install_config": {
        "install": "pip install -e .",
        "log_parser": "parse_log_pytest",
        "python": "3.9",
        "test_cmd": "pytest --no-header -rA",
        "env_vars": {"LC_ALL": "C"},
    },
    "meta": {"is_lite": True},
}


def test_images_are_named_as_they_are_published() -> None:
    assert (
        instance_image("swebench", "Django__django-11099")
        == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    )


def test_a_row_of_the_current_revision() -> None:
    case = swe_bench_case(CURRENT)
    assert case.fail_to_pass == ("tests/test_old.py::test_a",)
    assert (case.parser, case.fail_only, case.workdir) == ("parse_log_pytest", False, "/testbed")
    assert "pytest\nUNIAGENT_TEST_EXIT_CODE=$?" in case.script
    assert swe_bench_case({**CURRENT, "eval_type": "fail_only"}).fail_only


def test_a_row_of_swe_rebench_has_its_own_test_command_and_parser() -> None:
    case = swe_rebench_case(REBENCH)
    commands = case.script.split(START)[1].split(END)[0]
    assert "pytest --no-header -rA tests/test_old.py tests/test_new.py tests/other name.py\n" in commands
    before = case.script.split("git checkout")[0].splitlines()
    assert before[-4:-1] == ["conda activate testbed", "export LC_ALL=C", "pip install -e ."]
    assert case.parser == "parse_log_pytest"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"test_patch": None}, "the row's test_patch is missing"),
        ({"FAIL_TO_PASS": "not json"}, "FAIL_TO_PASS is 'not json', expected a list"),
        ({"install_config": {"test_cmd": "pytest"}}, "needs test_cmd and log_parser; it has: test_cmd"),
        ({"install_config": None}, "install_config is missing"),
        ({"archive": "/nosuchfile.tar"}, "there is no such file"),
    ],
)
def test_a_bad_row_is_named_with_its_field(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"instance 'Owner__Repo-12': .*{said}"):
        swe_rebench_case({**REBENCH, **change})


def test_samples_come_from_published_files(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [CURRENT, {**CURRENT, "instance_id": "owner__repo-13", "image": None}]
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data/test-00000-of-00001.parquet")
    found = list(samples("swe_bench/test", seed=0, options={"path": str(tmp_path)}))
    assert [s["metadata"]["instance_id"] for s in found] == ["Owner__Repo-12", "owner__repo-13"]
    assert [s["sandbox"]["image"] for s in found] == [
        "swebench/sweb.eval.x86_64.owner_1776_repo-12:latest",
        "swebench/sweb.eval.x86_64.owner_1776_repo-13:latest",
    ]
    assert "It is broken." in found[0]["prompt"][0]["content"]
    assert "test_old" not in json.dumps(found[0]["prompt"]), "the hidden tests stay hidden"
    resolver = TaskConfigResolver([{"name": "swe_bench", "sandbox": {"provider": "container"}}])
    task = resolver.resolve(found[0], dict.fromkeys(ENDPOINT, "x")).build(None)  # type: ignore[arg-type]
    assert task.case.version == "1.0"  # type: ignore[attr-defined]


def test_some_instances_and_other_images(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(CURRENT) + "\n")
    (one,) = swe_bench_samples("test", 0, path=str(file), instances=["Owner__Repo-12"], image="mirror.local/{image}")
    assert one["sandbox"]["image"].startswith("mirror.local/swebench/")
    (bare,) = swe_bench_samples("test", 0, path=str(file), image="")
    assert "sandbox" not in bare
    with pytest.raises(UserError, match="no instance 'owner__repo-12': did you mean 'Owner__Repo-12'"):
        swe_bench_samples("test", 0, path=str(file), instances=["owner__repo-12"])
    with pytest.raises(UserError, match=r"no file of the split 'dev'; there is: rows.jsonl"):
        swe_bench_samples("dev", 0, path=str(tmp_path))
    with pytest.raises(UserError, match="needs the option path"):
        swe_bench_samples("test", 0)


# ---------------------------------------------------------------- R2E-Gym


SUMMARY = """\
r2e_tests/test_1.py .F
=========================== short test summary info ============================
PASSED r2e_tests/test_1.py::TestTable::test_row
\x1b[31mFAILED\x1b[0m r2e_tests/test_1.py::test_old - assert 1 == 2
ERROR r2e_tests/test_1.py::test_setup - fixture missing
==================== 1 failed, 1 passed, 1 error in 0.5s =====================
"""
R2E = {
    "repo_name": "orange3",
    "docker_image": "namanjain12/orange3_final:abc",
    "commit_hash": "abc",
    "problem_statement": "**Title**\n[ISSUE]\nRows are lost.\n[/ISSUE]",
    "expected_output_json": json.dumps({"TestTable.test_row": "PASSED", "\x1b[1mtest_old\x1b[0m - why": "FAILED"}),
    "parsed_commit_content": json.dumps(
        {
            "file_diffs": [
                {
                    "header": {"file": {"path": "Orange/table.py"}},
                    "new_file_content": "fixed\n",
                    "plus_file": {"path": "b/Orange/table.py"},
                },
                {
                    "header": {"file": {"path": "Orange/gone.py"}},
                    "new_file_content": "",
                    "plus_file": {"path": "/dev/null"},
                },
                {"header": {"file": {"path": "Orange/tests/test_table.py"}}, "new_file_content": "x"},
            ]
        }
    ),
}


def test_the_summary_of_an_r2e_run() -> None:
    assert r2e_gym.statuses(SUMMARY) == {"TestTable.test_row": "PASSED", "test_old": "FAILED", "test_setup": "ERROR"}
    assert r2e_gym.statuses("ImportError") is None


def test_an_r2e_row() -> None:
    case = r2e_gym.case(R2E)
    assert case.expected == {"TestTable.test_row": "PASSED", "test_old": "FAILED"}
    assert case.fix == {"Orange/table.py": "fixed\n", "Orange/gone.py": None}
    sample = r2e_gym.sample(R2E)
    assert sample["sandbox"]["image"] == "namanjain12/orange3_final:abc"
    assert "Rows are lost." in sample["prompt"][0]["content"]
    assert "Title" not in sample["prompt"][0]["content"]
    with pytest.raises(UserError, match="expected_output_json"):
        r2e_gym.case({**R2E, "expected_output_json": "[]"})
