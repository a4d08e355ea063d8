"""A program of its own, run inside a sandbox: runs test files and says what became of each test.

stdin: ``{"nonce", "root", "path", "files", "runner"}``. The last line it writes to its stdout is the nonce, a space and
``{"tests": {id: outcome}, "canaries": {name: outcome}}``; what tests print goes to stderr. Canaries are tests that must
fail, one for each way of asserting, run before and after the others: when one does not fail, somebody has changed what
a test is. The standard library alone, and pytest where ``runner`` says so.
"""

import json
import os
import sys
import types
import unittest
from typing import Any

write, dumps, put_out, flush = os.write, json.dumps, os._exit, sys.stderr.flush
loads_tests, make_suite = unittest.TestLoader, unittest.TestSuite


class Canaries(unittest.TestCase):
    """Each must fail."""

    def test_assert(self) -> None:
        assert len("ab") == 1

    def test_equal(self) -> None:
        self.assertEqual(1, 2)  # noqa: PT009

    def test_true(self) -> None:
        self.assertTrue(False)  # noqa: PT009

    def test_raises(self) -> None:
        with self.assertRaises(ValueError):  # noqa: PT027
            pass

    def test_in(self) -> None:
        self.assertIn(1, [2])  # noqa: PT009

    def test_error(self) -> None:
        raise RuntimeError


class Outcomes(unittest.TestResult):
    """A result that knows no name but its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, str] = {}

    def note(self, test: unittest.TestCase, outcome: str) -> None:
        self.seen.setdefault(test.id(), outcome)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.note(test, "passed")

    def addError(self, test: unittest.TestCase, error: Any) -> None:
        self.note(test, "error")

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        self.note(test, "failed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.note(test, "skipped")

    def addExpectedFailure(self, test: unittest.TestCase, error: Any) -> None:
        self.note(test, "xfailed")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self.note(test, "failed")

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, error: Any) -> None:
        if error is not None:
            self.seen[test.id()] = "failed"


def canaries(when: str) -> dict[str, str]:
    outcome = Outcomes()
    loads_tests().loadTestsFromTestCase(Canaries).run(outcome)
    return {f"{when}:{name.rpartition('.')[2]}": how for name, how in outcome.seen.items()}


def with_unittest(files: list[str]) -> dict[str, str]:
    outcome = Outcomes()
    for file in files:
        name = file.removesuffix(".py").replace("/", ".")
        try:
            module = types.ModuleType(name)
            module.__file__ = os.path.join(os.getcwd(), file)
            sys.modules[name] = module
            with open(file, "rb") as source:
                exec(compile(source.read(), module.__file__, "exec"), module.__dict__)
            suite = loads_tests().loadTestsFromModule(module)
        except BaseException as problem:  # noqa: BLE001 - whatever tests raise is their outcome
            outcome.seen[f"{name}:import"] = f"error: {problem!r}"
            continue
        suite.run(outcome)
    return outcome.seen


def with_pytest(files: list[str]) -> dict[str, str]:
    import pytest

    seen: dict[str, str] = {}

    class Outcome:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                how = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
                if seen.get(report.nodeid) in (None, "passed"):
                    seen[report.nodeid] = how

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                seen[f"{report.nodeid}:import"] = "error"

    pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[Outcome()])
    return seen


def main() -> None:
    asked = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)
    os.chdir(asked["root"])
    sys.path[:0] = [os.path.join(asked["root"], place) for place in asked["path"]]
    sys.dont_write_bytecode = True
    nonce = asked.pop("nonce")
    answer = {"canaries": canaries("before")}
    run = {"unittest": with_unittest, "pytest": with_pytest}[asked["runner"]]
    answer["tests"] = run(asked["files"])
    answer["canaries"].update(canaries("after"))
    line = f"{nonce} {dumps(answer)}\n".encode()
    while line:
        line = line[write(out, line) :]
    put_out(0)


if __name__ == "__main__":
    main()
