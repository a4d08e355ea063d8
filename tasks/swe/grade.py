"""Test statuses to a verdict, by the rules of SWE-bench (``harness/grading.py`` of swebench 5); pure.

A test of FAIL_TO_PASS must pass; one of PASS_TO_PASS may be skipped too; a test that is not in the log failed. Some
published names end inside a parameter (``test_x[a``): they stand for every test that begins so, where those agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

Statuses = Mapping[str, str]  # test -> PASSED, FAILED, SKIPPED, ERROR or XFAIL
PASSING = ("PASSED", "XFAIL")
FULL, PARTIAL, NO = "RESOLVED_FULL", "RESOLVED_PARTIAL", "RESOLVED_NO"


@frozen
class Report:
    """Which expected tests did as expected, and which did not."""

    fixed: tuple[str, ...]
    not_fixed: tuple[str, ...]
    kept: tuple[str, ...]
    broken: tuple[str, ...]

    @property
    def fail_to_pass(self) -> float:
        """The part of FAIL_TO_PASS that passes now; 1 where there is none."""
        return _part(self.fixed, self.not_fixed)

    @property
    def pass_to_pass(self) -> float:
        """The part of PASS_TO_PASS that still does; 1 where there is none."""
        return _part(self.kept, self.broken)

    @property
    def status(self) -> str:
        """RESOLVED_FULL, RESOLVED_PARTIAL (some of FAIL_TO_PASS, all of PASS_TO_PASS) or RESOLVED_NO."""
        if self.pass_to_pass < 1 or self.fail_to_pass == 0:
            return NO
        return FULL if self.fail_to_pass == 1 else PARTIAL


def report(
    statuses: Statuses, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str], *, fail_only: bool = False
) -> Report:
    """``fail_only``: the log names failures alone, so what it does not name passed."""

    def fixed(test: str) -> bool:
        return statuses.get(test) != "FAILED" if fail_only else _status(test, statuses) in PASSING

    def kept(test: str) -> bool:
        return fixed(test) if fail_only else _status(test, statuses) in (*PASSING, "SKIPPED")

    return Report(*_sorted(fail_to_pass, fixed), *_sorted(pass_to_pass, kept))


def _status(test: str, statuses: Statuses) -> str | None:
    if test in statuses:
        return statuses[test]
    if test.count("[") <= test.count("]"):
        return None
    found = [status for name, status in statuses.items() if name.startswith(test)]
    return found[0] if len({status in PASSING for status in found}) == 1 else None


def _sorted(tests: Sequence[str], good: Callable[[str], bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(t for t in tests if good(t)), tuple(t for t in tests if not good(t))


def _part(good: Sequence[str], bad: Sequence[str]) -> float:
    return len(good) / (len(good) + len(bad)) if good or bad else 1.0
