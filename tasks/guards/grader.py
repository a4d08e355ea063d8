"""Tests run by a process that the agent's never touched, and whether the answer can be believed.

Each run has a nonce, and canaries that must fail. No answer, or a canary that did not fail, is a finding: the code
under test ended or changed its judge. Code under test shares the process with the runner, so what it changes is
detected, not prevented; ``commands.audit_code`` looks for the rest. Knows no benchmark.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from attrs import field, frozen

from uniagent.engine.ports import Completed, Sandbox
from uniagent.tasks.guards.findings import Finding

PROGRAM = Path(__file__).with_name("grader_program.py")
PASSED = ("passed", "xfailed")


@frozen
class Graded:
    """``tests`` maps every test's id to passed, failed, error, skipped or xfailed. ``output``: what the tests printed.
    ``timed_out``: they were stopped at their time limit. ``turned``: outcomes of the tests that assert something, with
    what they assert turned (``turning``); empty where that was not tried."""

    tests: Mapping[str, str]
    findings: tuple[Finding, ...] = ()
    output: str = ""
    timed_out: bool = False
    turned: Mapping[str, str] = field(factory=dict, repr=False)

    @property
    def vacuous(self) -> tuple[str, ...]:
        """Tests that pass whatever they assert."""
        both = (test for test, how in self.turned.items() if how in PASSED and self.tests.get(test) in PASSED)
        return tuple(sorted(both))

    def passed(self, required: Collection[str] = ()) -> bool:
        """Whether there is an answer to be believed and all ``required`` tests passed (none named: all there are)."""
        names = required or self.tests
        return (
            not any(f.leak for f in self.findings)
            and bool(names)
            and all(self.tests.get(name) in PASSED for name in names)
        )


@frozen
class Tests:
    """Which files to run, relative to the repository, and how. ``path``: directories put in front of the module path;
    ``env`` lies on top of a clean environment."""

    __test__ = False  # for pytest: this is no test class
    files: tuple[str, ...]
    runner: str = "unittest"  # or pytest
    path: tuple[str, ...] = ("", "src")
    env: Mapping[str, str] = field(factory=dict)
    timeout_s: float = 300.0


def clean_environment(home: str, extra: Mapping[str, str]) -> list[str]:
    """Words that start a program with an environment of its own; nothing of a shell the agent used."""
    base = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1", "PYTHONHASHSEED": "0"}  # fmt: skip
    return ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in {**base, **extra}.items())]


async def run_tests(sandbox: Sandbox, python: str, root: PurePosixPath, tests: Tests) -> Graded:
    """Run the files and read the answer. A judge that was ended or changed gives a finding and no tests."""
    nonce = secrets.token_hex(16)
    asked = {"nonce": nonce, "root": str(root), "path": list(tests.path), "files": list(tests.files)}
    home = f"/tmp/grading-{secrets.token_hex(6)}"
    flags = ["-P", "-B"] if tests.env else ["-I", "-B"]  # -I ignores PYTHON* variables
    argv = [*clean_environment(home, tests.env), python, *flags, "-c", PROGRAM.read_text()]
    request = json.dumps({**asked, "runner": tests.runner}).encode()
    done = await sandbox.exec(argv, stdin=request, timeout_s=tests.timeout_s)
    return read_answer(done, nonce)


def read_answer(done: Completed, nonce: str) -> Graded:
    """The verdict in what the grading process wrote."""
    said = done.errors.decode(errors="replace")
    lines = [line for line in done.output.decode(errors="replace").splitlines() if line.startswith(f"{nonce} ")]
    if done.timed_out:
        return Graded({}, (), said, timed_out=True)
    if done.code != 0 or len(lines) != 1:
        ended = Finding("grader_ended", f"exit status {done.code}", "the tests' process ended before it had its say")
        return Graded({}, (ended,), said)
    answer = json.loads(lines[0].partition(" ")[2])
    quiet = sorted(name for name, outcome in answer["canaries"].items() if outcome not in ("failed", "error"))
    if quiet or len(answer["canaries"]) != 12:
        names = ", ".join(quiet) or "missing"
        changed = Finding("canary", names, "a test that must fail did not: its judge was changed")
        return Graded(answer["tests"], (changed,), said)
    return Graded(answer["tests"], (), said)
