"""When and where a run's checkpoints are written: ``checkpoints/step-N``, the newest few kept.

Invariants: a step is saved once; a folder named step-N is whole. How a model is written is the learner's
(``engine.learner.checkpoints``).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import trio
from attrs import define, field

from uniagent.engine.node import Node
from uniagent.engine.run_folder import RunFolder


@define(eq=False)
class Checkpoints:
    """``keep`` the newest."""

    node: Node
    folder: RunFolder
    keep: int
    saved: list[Path] = field(factory=list)

    @property
    def newest(self) -> Path | None:
        return self.saved[-1] if self.saved else None

    async def save(self, step: int) -> None:
        """Write step-N, then remove what is older than the newest ``keep``. Not cut short by a drain."""
        target = self.folder.checkpoint(step)
        if target in self.saved:
            return
        with trio.CancelScope(shield=True):
            await self.node.accelerator.run(self._write, target, kind="checkpoint")
            self.saved.append(target)
            while len(self.saved) > self.keep:
                await trio.to_thread.run_sync(shutil.rmtree, self.saved.pop(0))

    def _write(self, target: Path) -> None:
        from uniagent.engine.learner.checkpoints import save_hf

        save_hf(self.node.model, self.node.model_folder, target / "hf")
