"""What the log of an evaluation says; pure.

Invariant: an evaluation that could not be carried out is told apart from code under test that is broken. The first
raises InfraError; the second has no statuses, which no expected test passes with.
"""

from __future__ import annotations

import re

from uniagent.engine.errors import InfraError
from uniagent.tasks.swe.grade import Statuses
from uniagent.tasks.swe.parsers import Parse
from uniagent.tasks.swe.script import END, EXIT_CODE, PATCH_FAILED, START

# what a change of source code can hardly cause; from swebench's harness/infra_failure.py
ENVIRONMENT = re.compile(
    r"Failed to launch|Failed to connect to the bus|cannot open display|Missing X server|unable to open X display"
    r"|Cannot allocate memory|OutOfMemoryError|^Killed$|Could not resolve host|Temporary failure in name resolution"
    r"|No space left on device",
    re.MULTILINE,
)
# that a runner of tests whose parser names failures alone ran at all; from swebench's harness/grading.py
RAN = re.compile(
    r"Executed [1-9]\d* of \d+|TOTAL: [1-9]\d* (?:SUCCESS|FAILED)|[1-9]\d* passing|Tests:\s+[1-9]\d*"
    r"|Test Suites:\s+(?:\d+ \w+, )*[1-9]\d* total|^# tests [1-9]\d*|[1-9]\d* specs?, \d+ failures?|': ok$",
    re.MULTILINE,
)
UNAPPLIED = re.compile(
    r"^error: (?:patch failed|corrupt patch|.*: patch does not apply|.*already exists in)", re.MULTILINE
)
MISSING_RUNNER = (126, 127)


def read_log(log: str, parse: Parse) -> Statuses | None:
    """Test statuses, None where the tests gave none that can be believed: the code under test broke the run, or the
    run failed and its log shows no failure. Raises InfraError where the tests were not put in place or not started."""
    before, started, rest = log.partition(START)
    if PATCH_FAILED in log or UNAPPLIED.search(before):
        raise InfraError(f"the test patch does not apply: {_tail(before)}")
    if not started:
        raise InfraError(f"the evaluation ended before the tests: {_tail(log)}")
    inside, ended, after = rest.partition(END)
    code = exit_code(after)
    statuses = parse(inside) or parse(log)
    if not statuses and not RAN.search(log):
        if found := ENVIRONMENT.search(rest):
            raise InfraError(f"the tests did not run: {found.group()!r}: {_tail(inside)}")
        if code in MISSING_RUNNER:
            raise InfraError(f"the test command is not there (exit status {code}): {_tail(inside)}")
        return None
    if not ended:
        return None
    if statuses and code not in (None, 0) and not {"FAILED", "ERROR"} & set(statuses.values()):
        return None
    return statuses


def exit_code(log: str) -> int | None:
    """The exit status of the last test command, None where the script did not record it."""
    found = re.search(rf"^{re.escape(EXIT_CODE)}: (\d+)$", log, re.MULTILINE)
    return int(found.group(1)) if found else None


def _tail(log: str) -> str:
    return log.strip()[-600:]
