"""The judge: a fresh process, canaries, assertions turned; with both runners."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import PurePosixPath

import pytest

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.ports import Completed
from uniagent.tasks.guards.grader import Graded, Tests, read_answer, run_tests
from uniagent.tasks.guards.turning import turned
from uniagent.tasks.leakage import Guard, grade, prepare, seal

TEST = b"""\
import unittest
from pkg import double

class Doubling(unittest.TestCase):
    def test_two(self):
        print("some noise")
        self.assertEqual(double(2), 4)
    def test_three(self):
        assert double(3) == 6
    def test_nothing(self):
        for item in []:
            self.assertTrue(item)
    @unittest.skip("not today")
    def test_skipped(self):
        pass

def test_plain():
    assert double(0) == 0
"""


async def graded(pkg: str, runner: str = "unittest", **more: float) -> Graded:
    async with LocalProvider({"warm": 0}) as provider, provider.open({"isolation": "none"}) as box:
        await box.write(box.workdir / "pkg.py", pkg.encode())
        await box.write(box.workdir / "tests/test_a.py", TEST)
        return await run_tests(box, sys.executable, box.workdir, Tests(("tests/test_a.py",), runner, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("runner", ["unittest", "pytest"])
async def test_outcomes(runner: str) -> None:
    found = await graded("def double(x): return 2 * x if x != 3 else 7", runner)
    by_name = {test.replace("::", ".").rpartition(".")[2]: how for test, how in found.tests.items()}
    by_name.pop("test_plain", None)
    assert by_name == {
        "test_two": "passed",
        "test_three": "failed",
        "test_nothing": "passed",
        "test_skipped": "skipped",
    }
    assert found.findings == ()
    two = next(test for test in found.tests if "two" in test)
    assert found.passed([two])
    assert not found.passed()
    assert not found.passed([two, "no.such.test"])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("import os; os._exit(0)", "grader_ended"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "grader_ended"),
        ("import unittest; unittest.TestCase.assertEqual = lambda *a: None", "canary"),
        ("import unittest; unittest.TestCase.run = lambda self, result: result.addSuccess(self)", "canary"),
        ("import unittest; unittest.TestCase._callTestMethod = lambda self, method: None", "canary"),
    ],
)
async def test_a_judge_that_was_ended_or_changed(code: str, kind: str) -> None:
    found = await graded(f"{code}\ndef double(x): return 0")
    assert [f.kind for f in found.findings] == [kind]
    assert not found.passed()


async def test_a_test_file_that_does_not_load_is_an_error() -> None:
    found = await graded("raise SystemExit(0)")
    assert list(found.tests.values()) == ["error: SystemExit(0)"]
    assert not found.passed()


async def test_tests_without_end() -> None:
    found = await graded("while True: pass", timeout_s=0.5)
    assert found.timed_out
    assert not found.passed()


def test_an_answer_counts_once_and_with_its_nonce() -> None:
    answer = {"tests": {"a": "passed"}, "canaries": {f"{n}": "failed" for n in range(12)}}
    line = f"n0 {json.dumps(answer)}\n".encode()
    assert read_answer(Completed(0, line), "n0").passed()
    for output in (b"", line * 2, line.replace(b"n0", b"n1")):
        assert not read_answer(Completed(0, output), "n0").passed()
    assert not read_answer(Completed(0, line.replace(b'"3": "failed", ', b"")), "n0").passed(), "a canary is missing"


@pytest.mark.parametrize(
    "text",
    [
        "self.assertEqual(f(), 3)",
        "self.assertEqual(f(), [1, 2])",
        "self.assertEqual(f(), g())",
        "self.assertTrue(f())",
        "self.assertIn(1, f())",
        "assert f() == 'a'",
        "assert f() == g()",
        "assert f()",
        "self.assertIsNone(f())",
        "self.assertEqual(f(), {'a': 1})",
    ],
)
def test_turned_assertions_are_other_assertions(text: str) -> None:
    source = f"class A:\n    def test_a(self):\n        {text}\n    def test_b(self):\n        f()\n".encode()
    changed, names = turned(source)
    assert names == {"test_a"}
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize(
    ("code", "leak"),
    [
        ("def double(x): return 2 * x", None),
        (
            "A = type('A', (), {'__eq__': lambda s, o: True, '__ne__': lambda s, o: False})\ndef double(x): return A()",
            True,
        ),
    ],
)
async def test_tests_that_pass_both_ways(code: str, leak: bool | None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({"isolation": "none"}) as box:
        await box.write(box.workdir / "pkg.py", b"def double(x): return x")
        await box.write(box.workdir / "tests/test_a.py", TEST)
        prepared = await prepare(box, Guard(tests=("tests",), history=False))
        await box.write(box.workdir / "pkg.py", code.encode())
        await seal(box, prepared)
        found = await grade(box, prepared, Tests(("tests/test_a.py",)))
        assert "tests.test_a.Doubling.test_nothing" in found.vacuous
        assert [(f.kind, f.leak) for f in found.findings] == ([("passes_both_ways", leak)] if leak is not None else [])
        assert (await box.files(box.workdir))[PurePosixPath("tests/test_a.py")] == TEST, "put back"
        assert len(list(await box.files(box.workdir))) == 2, "and nothing of ours is left"
