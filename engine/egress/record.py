"""One sandbox's way out: whose it is, what may pass, and every request that was made.

Invariant: a request is in the record before its answer begins, refused ones too. The record is kept short for a session
that asks without end: the first requests and all that a leak rule refused. Knows no socket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from attrs import define, evolve, field, frozen

from uniagent.engine.egress.rules import Both, Listed, Rules, Verdict
from uniagent.engine.ports import Json, SessionId

KEPT = 2000
KEPT_LEAKS = 500


@frozen
class Access:
    """One request. ``time_s`` on the node's clock; ``session`` and ``turn``: the last action before it (-1: none yet);
    ``status`` and ``received`` (bytes of the body) of the answer, once there was one."""

    time_s: float
    session: SessionId
    turn: int
    method: str
    url: str
    host: str
    allowed: bool
    rule: str
    leak: bool = False
    status: int | None = None
    received: int = 0

    def as_json(self) -> dict[str, Json]:
        return {
            "time_s": round(self.time_s, 3),
            "session": self.session,
            "turn": self.turn,
            "method": self.method,
            "url": self.url,
            "host": self.host,
            "allowed": self.allowed,
            "rule": self.rule,
            "leak": self.leak,
            "status": self.status,
            "received": self.received,
        }


@define(eq=False)
class Egress:
    """``policy``: allowlist (hosts) or guarded (whole URLs). ``listed``: what the sandbox section allows. A task sets
    ``rules``; until then only ``listed`` may be reached. ``actor`` gives the session and its last action."""

    policy: str
    listed: Listed = field(factory=Listed)
    pinned: set[tuple[str, int]] = field(factory=set)  # hosts whose certificate a client would take from nobody else
    rules: Rules | None = None
    actor: Callable[[], tuple[SessionId, int]] | None = None
    closed: bool = False  # nothing may be reached any more
    dropped: int = 0
    _accesses: dict[int, Access] = field(factory=dict)
    _count: int = 0
    _leaks: int = 0

    @property
    def active(self) -> Rules:
        """What is asked for a verdict now."""
        if self.closed:
            return Listed()
        return Both(self.rules, self.listed) if self.rules is not None else self.listed

    @property
    def accesses(self) -> tuple[Access, ...]:
        return tuple(self._accesses.values())

    def note(self, time_s: float, method: str, url: str, host: str, verdict: Verdict) -> int:
        """Remember a request; gives its number."""
        session, turn = self.actor() if self.actor is not None else ("", -1)
        self._count += 1
        room = len(self._accesses) - self._leaks < KEPT if not verdict.leak else self._leaks < KEPT_LEAKS
        if room:
            self._leaks += verdict.leak
            self._accesses[self._count] = Access(
                time_s, session, turn, method, url[:2000], host, verdict.allowed, verdict.rule, verdict.leak
            )
        else:
            self.dropped += 1
        return self._count

    def answered(self, number: int, status: int | None, received: int) -> None:
        if (access := self._accesses.get(number)) is not None:
            self._accesses[number] = evolve(access, status=status, received=received)

    def as_json(self) -> Mapping[str, Json]:
        """For the session's record."""
        return {"policy": self.policy, "dropped": self.dropped, "requests": [a.as_json() for a in self.accesses]}


@runtime_checkable
class HasEgress(Protocol):
    """A sandbox with a way out that the node watches; ``egress`` is None where there is none."""

    @property
    def egress(self) -> Egress | None: ...


def egress_of(sandbox: object) -> Egress | None:
    """A sandbox's way out; None: it has none, or the node does not see it."""
    return sandbox.egress if isinstance(sandbox, HasEgress) else None
