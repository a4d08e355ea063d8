"""When a training mesh that waits for its batch serves rollouts, and when it goes back: one pure decision.

Serving is worth it when the time it is predicted to save (missing groups x seconds a group of late x the mesh's share
of the replicas) exceeds both switches ``MARGIN`` times over; it ends when the wait that is left is down to one switch.
What a switch costs is measured: the mean of the latest ones. Invariants: where no other replica lives, the mesh serves
until its batch is there, so that no batch waits for nobody; it never serves when nothing is missing. Knows no clock,
process or engine: real training and the simulation ask the same object.
"""

from __future__ import annotations

from collections import deque

from attrs import define, field

MARGIN = 1.5  # the gain must be so many times the cost: hysteresis
MEMORY = 0.2  # weight of the newest batch in the expected seconds a group
MEASURED = 3  # switches that the expected cost is the mean of


@define
class Roles:
    """``own`` replicas are the mesh's. ``assumed_s`` is the cost of a switch before one was measured; ``since`` is when
    the run began, in seconds. ``switches`` counts changes of role, both ways."""

    own: int
    assumed_s: float
    since: float = 0.0
    serving: bool = False
    switches: int = 0
    _done: int = 0
    _group_s: float | None = None  # of rollout, at the rate of late
    _costs: deque[float] = field(factory=lambda: deque(maxlen=MEASURED))

    @property
    def switch_s(self) -> float:
        """What one switch is expected to cost."""
        return sum(self._costs) / len(self._costs) if self._costs else self.assumed_s

    def note(self, now: float, done: int) -> None:
        """So many groups were complete at ``now``, of the whole run. Call it once a batch."""
        if done > self._done:
            rate = (now - self.since) / (done - self._done)
            self._group_s = rate if self._group_s is None else self._group_s + MEMORY * (rate - self._group_s)
            self.since, self._done = now, done

    def wanted(self, *, missing: int, others: int) -> bool:
        """Whether the mesh should serve now: ``missing`` groups of its batch are not complete, ``others`` are the
        replicas that live beside its own."""
        if missing <= 0:
            return False
        if not others:
            return True
        wait = missing * (self._group_s or 0.0)
        if self.serving:
            return wait >= self.switch_s
        return wait * self.own / (self.own + others) > MARGIN * 2 * self.switch_s

    def switched(self, serving: bool) -> None:
        """A change of role begins."""
        self.serving = serving
        self.switches += 1

    def measured(self, seconds: float) -> None:
        """What a switch took."""
        self._costs.append(seconds)
