"""What may go out: the verdicts, and the two policies that need no task.

A policy is asked for every request with its whole URL, and for a host alone where the proxy will not see URLs. What it
does not know it refuses. Tasks bring policies of their own. Knows no vendor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from attrs import field, frozen

from uniagent.engine.egress.target import Malformed, Target, authority

Headers = Sequence[tuple[bytes, bytes]]


@frozen
class Verdict:
    """``rule`` says in words which rule decided; ``leak``: a rule against leaks refused it. ``private``: the host may
    have an address of a private network, because a person named it."""

    allowed: bool
    rule: str
    leak: bool = False
    private: bool = False


UNLISTED = "not on the list of what may be reached"


class Withheld(Exception):
    """An answer that is not given to the sandbox, for what is in it; the message says why."""


class Rewrite(Protocol):
    """Changes what a server answers: an index without what is too young. ``optional``: an answer too large to be held
    passes as it is."""

    @property
    def optional(self) -> bool: ...

    def request(self, headers: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
        """The headers to ask with (names in lower case)."""
        ...

    def answer(self, target: Target, headers: Mapping[bytes, bytes], body: bytes) -> tuple[bytes, bytes]:
        """(content type, body) of a successful answer; called in a thread. Raises Withheld."""
        ...


class Rules(Protocol):
    """A policy."""

    def judge(self, method: str, target: Target) -> Verdict: ...
    def tunnel(self, host: str, port: int) -> Verdict:
        """Whether a host may be reached without a look at the URLs."""
        ...

    def rewrite(self, target: Target) -> Rewrite | None:
        """For an allowed target: how its answer is changed; None: not at all."""
        ...


@frozen
class Listed:
    """Hosts by name: ``host``, ``host:port``, or ``*.host`` for all below. Everything of them is allowed on ports 80
    and 443, or on the port named."""

    hosts: tuple[str, ...] = ()
    _exact: frozenset[tuple[str, int]] = field(init=False, repr=False)
    _below: tuple[str, ...] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        exact, below = set(), []
        for entry in self.hosts:
            if entry.startswith("*."):
                below.append("." + authority(entry[2:], 443)[0])
            else:
                host, port = authority(entry, 0)
                exact |= {(host, port)} if port else {(host, 80), (host, 443)}
        object.__setattr__(self, "_exact", frozenset(exact))
        object.__setattr__(self, "_below", tuple(below))

    def has(self, host: str, port: int) -> bool:
        return (host, port) in self._exact or (port in (80, 443) and host.endswith(self._below) and bool(self._below))

    def judge(self, method: str, target: Target) -> Verdict:
        return self.tunnel(target.host, target.port)

    def tunnel(self, host: str, port: int) -> Verdict:
        if self.has(host, port):
            return Verdict(True, "on the sandbox's list", private=True)
        return Verdict(False, UNLISTED)

    def rewrite(self, target: Target) -> Rewrite | None:
        return None


@frozen
class Both:
    """A task's rules, and a person's list for what they neither know nor call a leak."""

    task: Rules
    listed: Listed

    def judge(self, method: str, target: Target) -> Verdict:
        return self._first(self.task.judge(method, target), target.host, target.port)

    def tunnel(self, host: str, port: int) -> Verdict:
        return self._first(self.task.tunnel(host, port), host, port)

    def _first(self, verdict: Verdict, host: str, port: int) -> Verdict:
        if verdict.allowed or verdict.leak or verdict.rule != UNLISTED:
            return verdict
        return self.listed.tunnel(host, port)

    def rewrite(self, target: Target) -> Rewrite | None:
        return self.task.rewrite(target)


def hosts_checked(hosts: Iterable[str]) -> str | None:
    """What is wrong with a list of hosts; None: nothing."""
    for entry in hosts:
        try:
            authority(entry.removeprefix("*."), 443)
        except Malformed as problem:
            return str(problem)
        if "/" in entry:
            return f"{entry!r} has a path: name hosts only"
    return None
