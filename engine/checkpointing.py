"""When and where a run's checkpoints are written: ``checkpoints/step-N/{dcp,hf}``, the newest few and the best kept.

Invariants: a step is saved once; a folder named step-N is whole; training goes on while one is written, and the next
one waits for it. How a checkpoint is written is the learner's (``engine.learner.snapshots``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import trio
from attrs import define

from uniagent.engine.learner import checkpoints
from uniagent.engine.node import Node
from uniagent.engine.ports import Json
from uniagent.engine.run_folder import RunFolder


@define(eq=False)
class Checkpoints:
    """``keep`` the newest, and the best by ``best``. ``nursery`` outlives what is being written."""

    node: Node
    folder: RunFolder
    keep: int
    nursery: trio.Nursery
    newest: Path | None = None  # whole, or being written
    _writing: trio.Event | None = None

    async def save(self, step: int, extra: Mapping[str, Json]) -> None:
        """Begin to write step-N; returns once the state is copied. Not cut short by a drain."""
        target = self.folder.checkpoint(step)
        if target == self.newest:
            return
        team = self.node.team
        assert team is not None
        with trio.CancelScope(shield=True):
            await self.written()
            pending = await self.node.accelerator.run(
                functools.partial(team.save, target, extra, self.node.model_folder), kind="checkpoint"
            )
            self._writing = trio.Event()
            self.newest = target
            self.nursery.start_soon(self._finish, pending, self._writing)

    def go_on(self, step: int) -> None:
        """A run goes on after a step, whose checkpoint may be in the folder."""
        checkpoints.forget_best(self.folder.checkpoints, after=step)
        found = self.folder.checkpoint(step)
        self.newest = found if found.is_dir() else None

    def best(self, step: int, success: float) -> bool:
        """A step's score on the held-out samples: whether it is the best so far, which is kept."""
        return checkpoints.mark_best(self.folder.checkpoints, step, success)

    async def written(self) -> None:
        """Until what is being written is whole."""
        if self._writing is not None:
            await self._writing.wait()

    async def _finish(self, pending: object, written: trio.Event) -> None:
        with trio.CancelScope(shield=True):
            try:
                await trio.to_thread.run_sync(pending.finish)  # type: ignore[attr-defined]
                await trio.to_thread.run_sync(checkpoints.prune, self.folder.checkpoints, self.keep)
            finally:
                written.set()
