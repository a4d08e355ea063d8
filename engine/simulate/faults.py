"""What goes wrong in a simulated run, as data: a JSON list of faults, small enough to shrink and to mail.

``sandbox_dies``, ``sandbox_hangs``, ``sandbox_leaks`` and ``client_gone`` happen to session ``target`` (sample x
group_size + replica) at its turn ``at``; ``engine_stalls`` (for ``seconds``), ``replica_lost`` (an engine that crashed)
and ``node_lost`` (the engine, and the sessions that live beside it) to replica ``target`` at second ``at``;
``nan_step`` and ``slow_disk`` (for ``seconds``) at step ``at``. A fault of something that is not there does nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, fields, frozen

from uniagent.engine.errors import UserError, nearest

OF_SESSIONS = ("sandbox_dies", "sandbox_hangs", "sandbox_leaks", "client_gone")
OF_REPLICAS = ("engine_stalls", "replica_lost", "node_lost")
KINDS = (*OF_SESSIONS, *OF_REPLICAS, "nan_step", "slow_disk")


@frozen
class Fault:
    kind: str
    at: float
    target: int = 0
    seconds: float = 0.0


def of_session(faults: Sequence[Fault]) -> dict[int, dict[int, str]]:
    """session -> turn -> kind."""
    found: dict[int, dict[int, str]] = {}
    for fault in faults:
        if fault.kind in OF_SESSIONS:
            found.setdefault(fault.target, {})[int(fault.at)] = fault.kind
    return found


def read(path: Path) -> tuple[Fault, ...]:
    """A plan from a file; UserError says what is wrong with which fault."""
    try:
        return parse(json.loads(path.read_text()))
    except (OSError, ValueError) as problem:
        raise UserError(f"--faults {path}: cannot be read as JSON: {problem}") from problem


def parse(plan: Any) -> tuple[Fault, ...]:
    if not isinstance(plan, list):
        raise UserError('a fault plan is a JSON list of faults, [{"kind": ..., "at": ..., "target": ...}]')
    known = [f.name for f in fields(Fault)]
    faults = []
    for number, entry in enumerate(plan):
        where = f"fault {number} of the plan"
        if not isinstance(entry, dict) or "kind" not in entry or "at" not in entry:
            raise UserError(f"{where}: it needs kind and at; got {entry!r}")
        if entry["kind"] not in KINDS:
            raise UserError(f"{where}: there is no kind {entry['kind']!r}: {nearest(str(entry['kind']), list(KINDS))}")
        if unknown := sorted(set(entry) - set(known)):
            raise UserError(f"{where}: {unknown[0]} is no part of a fault; allowed: {', '.join(known)}")
        if wrong := [k for k in known[1:] if k in entry and not _number(entry[k])]:
            raise UserError(f"{where}: {wrong[0]} = {entry[wrong[0]]!r} must be a number, 0 or more")
        faults.append(Fault(**entry))
    return tuple(faults)


def dump(faults: Sequence[Fault]) -> str:
    return json.dumps([asdict(fault) for fault in faults])


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
