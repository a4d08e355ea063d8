"""What a guard found, and what follows from it.

A ``leak`` is an attempt to get the reward without the work; a ``note`` is worth knowing (a test that was rewritten and
is restored before grading) and has no consequence. Knows no guard.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve, field, frozen
from attrs.validators import ge, in_

from uniagent.engine.ports import Failure, Json, TaskResult

CONSEQUENCES = ("zero", "penalise", "exclude", "flag")


@frozen
class Finding:
    """``kind`` is the flag it gives, such as ``runner_file``; ``where`` a path, a URL or a command."""

    kind: str
    where: str
    detail: str = ""
    leak: bool = True

    def as_json(self) -> dict[str, Json]:
        return {"kind": self.kind, "where": self.where, "detail": self.detail, "leak": self.leak}


@frozen
class Consequence:
    """What a leak does to a result. ``zero``: reward 0, not solved; ``penalise``: not solved, and ``penalty`` is taken
    from the reward; ``exclude``: the session is left out of training; ``flag``: only the flags."""

    on_leak: str = field(default="zero", validator=in_(CONSEQUENCES))
    penalty: float = field(default=1.0, validator=ge(0))


def apply(result: TaskResult, findings: Iterable[Finding], consequence: Consequence) -> TaskResult:
    """The result with one flag a kind, every finding in ``details["leakage"]``, and the consequence of its leaks."""
    found = tuple(findings)
    if not found:
        return result
    flags = tuple(dict.fromkeys([*result.flags, *(f.kind for f in found)]))
    details = {**result.details, "leakage": [f.as_json() for f in found]}
    result = evolve(result, flags=flags, details=details)
    leaks = [f for f in found if f.leak]
    if not leaks or consequence.on_leak == "flag":
        return result
    if consequence.on_leak == "exclude":
        error = f"left out by the leak guard: {leaks[0].kind} ({leaks[0].where})"
        return evolve(result, failure=Failure.INFRA, details={**details, "error": error})
    reward = 0.0 if consequence.on_leak == "zero" else result.reward - consequence.penalty
    steps = () if consequence.on_leak == "zero" else result.step_rewards
    return evolve(result, reward=reward, outcome=False, step_rewards=steps)
