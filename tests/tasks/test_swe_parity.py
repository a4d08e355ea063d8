"""Parsers and verdicts against the package swebench: the same logs, the same report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.engine.errors import InfraError, UserError
from uniagent.tasks.swe import parsers
from uniagent.tasks.swe.benchmarks import swe_bench_case, swe_rebench_case
from uniagent.tasks.swe.grade import FULL, report
from uniagent.tasks.swe.logs import read_log
from uniagent.tasks.swe.script import END, EXIT_CODE, START, recorded

pytestmark = pytest.mark.slow  # importing swebench takes seconds
swebench = pytest.importorskip("swebench")
FIVE = swebench.__version__.startswith("5")

PYTEST = """\
============================= test session starts ==============================
collected 4 items

tests/test_a.py .F.s                                                     [100%]

=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_three[a b]
SKIPPED [1] tests/test_a.py:9: no network
FAILED tests/test_a.py::test_two - assert 1 == 2
==================== 1 failed, 2 passed, 1 skipped in 0.05s ====================
"""
DJANGO = """\
Creating test database for alias 'default'...
test_one (admin.tests.AdminTests) ... ok
test_two (admin.tests.AdminTests) ... FAIL
test_three (admin.tests.AdminTests)
With a docstring ... ok
test_four (admin.tests.AdminTests) ... skipped 'no database'
----------------------------------------------------------------------
Ran 4 tests in 0.010s
FAILED (failures=1, skipped=1)
"""
GO = """\
=== RUN   TestOne
--- PASS: TestOne (0.00s)
=== RUN   TestTwo
--- FAIL: TestTwo (0.00s)
--- SKIP: TestThree (0.00s)
FAIL
FAIL\texample.com/x\t0.01s
"""
CARGO = """\
running 3 tests
test parse::one ... ok
test parse::two ... FAILED
test parse::three ... ignored
test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out
"""
JEST = """\
PASS  src/a.test.js
  adds
    ✓ two numbers (3 ms)
    ✕ many numbers (2 ms)
Tests:       1 failed, 1 passed, 2 total
"""
MAVEN = """\
+ mvn test -B -Dtest=org.example.ATest#one
[INFO] BUILD SUCCESS
+ mvn test -B -Dtest=org.example.ATest#two
[INFO] BUILD FAILURE
"""
LOGS = {
    "parse_log_pytest": (PYTEST, 1),
    "parse_log_pytest_v2": (PYTEST, 1),
    "parse_log_pytest_options": (PYTEST, 1),
    "parse_log_django": (DJANGO, 1),
    "parse_log_gotest": (GO, 1),
    "parse_log_cargo": (CARGO, 101),
    "parse_log_jest": (JEST, 1),
    "parse_log_maven": (MAVEN, 1),
}
ROW: dict[str, Any] = {
    "instance_id": "owner__repo-1",
    "repo": "owner/repo",
    "base_commit": "abc",
    "patch": "",
    "test_patch": "",
    "problem_statement": "x",
    "version": "1.0",
    "image": "x",
    "eval_script": f"#!/bin/bash\nset -uxo pipefail\n: '{START}'\npytest -rA\n: '{END}'\ngit checkout abc\n",
    "eval_type": "pass_and_fail",
}


def whole(inside: str, code: int) -> str:
    return f"+ git apply\n+ : '{START}'\n{inside}\n+ : '{END}'\n{EXIT_CODE}: {code}\n"


def ours(row: dict[str, Any], log: str) -> bool | None:
    """Resolved or not; None: infrastructure."""
    case = swe_bench_case(row)
    parse = parsers.find(case.parser, instance_id=case.instance_id, repo=case.repo, version=case.version)
    try:
        statuses = read_log(log, parse)
    except InfraError:
        return None
    if statuses is None:
        return False
    return report(statuses, case.fail_to_pass, case.pass_to_pass, fail_only=case.fail_only).status == FULL


def theirs(row: dict[str, Any], log: str, path: Path) -> bool:
    from swebench.harness.grading import get_eval_report
    from swebench.harness.utils import make_test_spec

    path.write_text(log)
    prediction = {"instance_id": row["instance_id"], "model_patch": "x", "model_name_or_path": "x"}
    spec = make_test_spec(row)
    return bool(get_eval_report(spec, prediction, str(path), include_tests_status=True)[row["instance_id"]]["resolved"])


@pytest.mark.parametrize("name", LOGS)
def test_every_parser_is_found_and_reads_its_log(name: str) -> None:
    log, _ = LOGS[name]
    found = parsers.find(name, instance_id="owner__repo-1", repo="owner/repo", version="1.0")(log)
    assert {"PASSED", "FAILED"} <= set(found.values())


@pytest.mark.skipif(not FIVE, reason="swebench 5's report")
@pytest.mark.parametrize("name", LOGS)
def test_the_verdict_is_swebenchs(name: str, tmp_path: Path) -> None:
    inside, code = LOGS[name]
    parse = parsers.find(name, instance_id="owner__repo-1", repo="owner/repo", version="1.0")
    tests = [*parse(inside), "a test that is not there"]
    resolved = 0
    for test in tests:
        for other in tests:
            row = {**ROW, "log_parser": name, "FAIL_TO_PASS": json.dumps([test]), "PASS_TO_PASS": json.dumps([other])}
            verdict = theirs(row, whole(inside, code), tmp_path / "log")
            resolved += verdict
            assert ours(row, whole(inside, code)) == verdict, (test, other)
    assert resolved


@pytest.mark.skipif(not FIVE, reason="swebench 5's report")
@pytest.mark.parametrize(
    "log",
    [
        whole("PASSED tests/test_a.py::test_one", 1),  # a failed run whose log shows no failure
        whole("ImportError while loading conftest", 4),
        whole("", 0),
        f"PASSED tests/test_a.py::test_one\n{whole('', 0)}",
    ],
)
def test_logs_that_tell_little_are_judged_alike(log: str, tmp_path: Path) -> None:
    row = {**ROW, "log_parser": "parse_log_pytest", "FAIL_TO_PASS": '["tests/test_a.py::test_one"]', "PASS_TO_PASS": []}
    assert ours(row, log) == theirs(row, log, tmp_path / "log")


@pytest.mark.skipif(not FIVE, reason="swebench 5's report")
def test_what_swebench_calls_environment_is_infrastructure_here(tmp_path: Path) -> None:
    from swebench.harness.infra_failure import classify_text

    row = {**ROW, "log_parser": "parse_log_pytest", "FAIL_TO_PASS": '["a"]', "PASS_TO_PASS": []}
    for said in ("Cannot allocate memory", "Could not resolve host: x", "Killed", "cannot open display"):
        log = whole(said, 1)
        assert classify_text(log)[1] == "environment"
        assert ours(row, log) is None


names = st.sampled_from(["t[a", "t[a]", "t[ab]", "u", "v[", "v[x]"])
status = st.sampled_from(["PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL"])


@pytest.mark.skipif(not FIVE, reason="swebench 5's report")
@given(st.dictionaries(names, status), st.lists(names, unique=True), st.lists(names, unique=True), st.booleans())
@settings(deadline=None, max_examples=300)
def test_grades_are_swebenchs(
    statuses: dict[str, str], fail_to_pass: list[str], pass_to_pass: list[str], fail_only: bool
) -> None:
    from swebench.harness.constants import EvalType
    from swebench.harness.grading import get_eval_tests_report, get_resolution_status

    kind = EvalType.FAIL_ONLY if fail_only else EvalType.PASS_AND_FAIL
    gold = {"FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass}
    wanted = get_eval_tests_report(statuses, gold, eval_type=kind)
    found = report(statuses, fail_to_pass, pass_to_pass, fail_only=fail_only)
    assert list(found.fixed) == wanted["FAIL_TO_PASS"]["success"]
    assert list(found.not_fixed) == wanted["FAIL_TO_PASS"]["failure"]
    assert list(found.kept) == wanted["PASS_TO_PASS"]["success"]
    assert list(found.broken) == wanted["PASS_TO_PASS"]["failure"]
    assert found.status == get_resolution_status(wanted)


@pytest.mark.skipif(not FIVE, reason="swebench 5's scripts")
def test_the_exit_status_is_recorded_as_swebench_does() -> None:
    from swebench.harness.utils import make_test_spec

    row = {**ROW, "log_parser": "parse_log_pytest", "FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]"}
    wanted = make_test_spec(row).eval_script.replace("SWEBENCH_TEST_EXIT_CODE", "UNIAGENT_TEST_EXIT_CODE")
    assert recorded(row["eval_script"]) == wanted


def test_images_are_named_as_swebench_does() -> None:
    from uniagent.tasks.swe.benchmarks import instance_image

    if FIVE:
        from swebench.image_builder.image_spec import ImageSpec

        wanted = ImageSpec("Django__django-1", "FROM x", "swebench").name
        assert instance_image("swebench", "Django__django-1") == wanted


def test_a_parser_that_is_not_there_is_named() -> None:
    with pytest.raises(
        UserError, match=r"'owner__repo-1'.*no log parser 'parse_log_pytset': did you mean 'parse_log_pyt"
    ):
        parsers.find("parse_log_pytset", instance_id="owner__repo-1", repo="x/y", version="1")


OLD = {
    **{key: value for key, value in ROW.items() if key not in ("eval_script", "eval_type", "image")},
    "instance_id": "pallets__flask-5063",
    "repo": "pallets/flask",
    "version": "2.3",
    "test_patch": "diff --git a/tests/test_cli.py b/tests/test_cli.py\n--- a/tests/test_cli.py\n"
    "+++ b/tests/test_cli.py\n@@ -1 +1 @@\n-a\n+b\n",
    "FAIL_TO_PASS": '["tests/test_cli.py::test_x"]',
    "PASS_TO_PASS": "[]",
}


def test_rows_of_older_revisions_need_swebench_4() -> None:
    if FIVE:
        with pytest.raises(UserError, match=r"pallets__flask-5063.*no eval_script.*pip install 'swebench<5'"):
            swe_bench_case(OLD)
        return
    from swebench.harness.test_spec.python import make_eval_script_list_py

    case = swe_bench_case(OLD)
    assert case.parser == "parse_log_pytest"
    assert "pytest -rA tests/test_cli.py\nUNIAGENT_TEST_EXIT_CODE=$?" in case.script
    # a row of SWE-rebench with the same config has the same test commands, around the same markers
    config = {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest", "install": "python -m pip install -e ."}
    rebench = swe_rebench_case({**OLD, "install_config": config}).script
    commands = make_eval_script_list_py(OLD, config, "testbed", "/testbed", "abc", OLD["test_patch"])
    start = next(i for i, line in enumerate(commands) if START in line)
    assert "\n".join(commands[start : start + 2]) in rebench
    assert {"source /opt/miniconda3/bin/activate", "conda activate testbed"} <= set(rebench.splitlines()) & set(
        commands
    )
