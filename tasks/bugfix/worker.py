"""Runs a project's tests where the project is: a program for the inside of a sandbox; standard library and pytest.

Reads one JSON job on standard input in the project's folder, writes one JSON line a result. Every run of tests is a
fork of a process that has pytest but not the project: it costs no start of an interpreter and leaves nothing behind.

    {"mode": "run", "paths": [...], "tests": null | [...], "cover": "src/", "edits": [{"path", "text"} | null, ...]}
        the tests with each edit on disk: {"outcomes": {test: "passed" | {"error", "line", "ours"}}, "cpu_s", ...}
    {"mode": "screen", "paths": [...], "path": "src/x.py", "bugs": [{"function", "line", "text", "tests"}, ...]}
        the tests are collected once, and each bug's code is put into the live functions of a fork

What may not be trusted here is the project under test: the process that judges an agent's work is another one.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

Outcome = Any  # "passed", "skipped", or what failed
MESSAGE = 600  # characters of an error kept


def forked(work: Callable[[], Any], cpu_s: float, wall_s: float) -> dict[str, Any]:
    """The result of ``work`` in a child, or {"broken": why}. The child's output goes nowhere."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nowhere, standard)
        limit = int(cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        status = 1
        try:
            found = json.dumps(work()).encode()
            while found:
                found = found[os.write(writing, found) :]
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    told, deadline = b"", time.monotonic() + wall_s
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            os.kill(pid, signal.SIGKILL)
            break
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        told += piece
    os.close(reading)
    _, status, used = os.wait4(pid, 0)
    if status == 0 and told:
        return {**json.loads(told), "cpu_s": used.ru_utime + used.ru_stime}
    hung = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
    return {"broken": "it hangs" if hung else "the process ended"}


class Tests:
    """A pytest plugin: takes the wanted tests, keeps their outcomes, and where each failure shows in its test."""

    def __init__(self, wanted: list[str] | None) -> None:
        self.wanted = None if wanted is None else set(wanted)
        self.outcomes: dict[str, Outcome] = {}
        self.collection: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.wanted is not None:
            items[:] = [item for item in items if item.nodeid in self.wanted]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collection.append(f"{report.nodeid}: {str(report.longrepr)[-MESSAGE:]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if report.failed or (report.when == "call" and item.nodeid not in self.outcomes):
            self.outcomes[item.nodeid] = _failure(item, call) if report.failed else report.outcome
        if report.when == "setup" and report.skipped:
            self.outcomes[item.nodeid] = "skipped"
        return report

    def found(self) -> dict[str, Any]:
        return {"outcomes": self.outcomes, "collection": self.collection}


def _failure(item: pytest.Item, call: pytest.CallInfo[None]) -> dict[str, Any]:
    """What was raised, and the line of the test's file on the way there. ``ours``: raised by the test's own line."""
    if call.excinfo is None:
        return {"error": "failed", "line": 0, "ours": True, "parameters": {}}
    frames = [(str(entry.path), entry.lineno + 1) for entry in call.excinfo.traceback]
    here = [line for path, line in frames if path == str(item.path)]
    try:
        said = str(call.excinfo.value)
    except Exception:  # noqa: BLE001 - the exception is the broken project's own, and may not even have a text
        said = ""
    callspec = getattr(item, "callspec", None)
    return {
        "error": f"{call.excinfo.typename}: {said}"[:MESSAGE],
        "parameters": {name: repr(value)[:80] for name, value in callspec.params.items()} if callspec else {},
        "line": here[-1] if here else 0,
        "ours": bool(frames) and frames[-1][0] == str(item.path),
    }


class Coverage:
    """Which functions of the project each test calls, as ``path:first line``."""

    def __init__(self, under: str) -> None:
        self.under = os.path.join(os.getcwd(), under)
        self.by_test: dict[str, list[str]] = {}
        self.seen: set[types.CodeType] = set()
        self.start()

    def start(self) -> None:
        seen = self.seen

        def note(frame: types.FrameType, event: str, _: Any) -> None:
            if event == "call":
                seen.add(frame.f_code)

        threading.setprofile(note)
        sys.setprofile(note)

    def taken(self) -> list[str]:
        seen = self.seen.copy()  # the original grows by the calls made here
        self.seen.clear()
        codes = [c for c in seen if c.co_filename.startswith(self.under) and c.co_name != "<module>"]
        return sorted({f"{os.path.relpath(c.co_filename)}:{c.co_firstlineno}" for c in codes})

    def pytest_collection_finish(self) -> None:
        self.by_test[""] = self.taken()  # called while the tests were imported

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.seen.clear()
        self.start()
        result = yield
        self.by_test[item.nodeid] = self.taken()
        return result


ARGUMENTS = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "--import-mode", "prepend"]


def run(job: dict[str, Any], edit: dict[str, str] | None) -> dict[str, Any]:
    """The tests with one file as ``edit`` has it; the file is as it was afterwards. An edit may have tests and paths of
    its own."""
    job = {**job, **(edit or {})}

    def work() -> dict[str, Any]:
        tests = Tests(job["tests"])
        coverage = Coverage(job["cover"]) if job.get("cover") is not None else None
        status = pytest.main([*ARGUMENTS, *job["paths"]], plugins=[tests, *([coverage] if coverage else [])])
        sys.setprofile(None)
        return {**tests.found(), "status": int(status), **({"covered": coverage.by_test} if coverage else {})}

    if edit is None:
        return forked(work, job["cpu_s"], job["wall_s"])
    with open(edit["path"], encoding="utf-8", newline="") as file:
        before = file.read()
    try:
        _write(edit["path"], edit["text"])
        return forked(work, job["cpu_s"], job["wall_s"])
    finally:
        _write(edit["path"], before)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)


class Screen:
    """A pytest plugin in place of the loop over tests: one fork a bug, over tests that are collected already."""

    def __init__(self, job: dict[str, Any], tests: Tests) -> None:
        self.job, self.tests = job, tests
        self.results: list[Any] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        path = os.path.abspath(self.job["path"])
        items = {item.nodeid: item for item in session.items}
        live = [f for f in gc.get_objects() if isinstance(f, types.FunctionType) and f.__code__.co_filename == path]
        gc.freeze()
        for bug in self.job["bugs"]:
            chosen = [items[test] for test in bug["tests"] if test in items]
            at = (bug["function"], bug["line"])
            there = [f for f in live if (f.__code__.co_qualname, f.__code__.co_firstlineno) == at]

            def work(bug: Any = bug, chosen: Any = chosen, there: Any = there, at: Any = at) -> dict[str, Any]:
                code = next((c for c in _codes(compile(bug["text"], path, "exec")) if _at(c) == at), None)
                if code is None or not there:
                    return {"unscreened": True}
                try:
                    for function in there:
                        function.__code__ = code
                except ValueError:  # another number of free variables: only a run from the disk can tell
                    return {"unscreened": True}
                for number, item in enumerate(chosen):
                    after = chosen[number + 1] if number + 1 < len(chosen) else None
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                return self.tests.found()

            self.results.append(forked(work, self.job["cpu_s"], self.job["wall_s"]))
        return True


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _at(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def screen(job: dict[str, Any]) -> list[Any]:
    def work() -> dict[str, Any]:
        wanted = sorted({test for bug in job["bugs"] for test in bug["tests"]})
        tests = Tests(wanted)
        screening = Screen(job, tests)
        pytest.main([*ARGUMENTS, *job["paths"]], plugins=[tests, screening])
        return {"results": screening.results}

    many = len(job["bugs"]) + 1
    found = forked(work, job["cpu_s"] * many, job["wall_s"] * many)
    return found.get("results") or [{"unscreened": True}] * len(job["bugs"])


def main() -> None:
    job = json.load(sys.stdin)
    sys.dont_write_bytecode = True  # a stale cache of a mutated file would be the wrong code
    answers = screen(job) if job["mode"] == "screen" else (run(job, edit) for edit in job["edits"])
    for answer in answers:
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
