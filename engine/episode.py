"""Episode: a session's result, the unit that groups, advantages and the record are made of."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from uniagent.engine.ports import Failure, Json, TaskResult
from uniagent.engine.trajectory.types import Export


@frozen(eq=False)
class Episode:
    """One session that ended. ``sample`` is the row's number in the order of the data, ``replica`` its number within
    the group; ``turns`` are the session's raw requests and replies as the record keeps them; ``timings`` in seconds
    (total, engine, sandbox, agent, verify)."""

    session: str
    task: str
    sample: int
    replica: int
    result: TaskResult
    export: Export
    row: Mapping[str, Json] = field(factory=dict, repr=False)
    turns: tuple[Mapping[str, Json], ...] = field(default=(), repr=False)
    timings: Mapping[str, float] = field(factory=dict)
    error: str | None = None

    @property
    def counts(self) -> bool:
        """Whether it takes part in group statistics: infrastructure failures do not."""
        return self.result.failure is not Failure.INFRA
