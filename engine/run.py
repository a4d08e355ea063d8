"""Entry points of a whole run, for the command line and for scripts: train and evaluate. Blocking; each runs trio.

The results are JSON-able and have ``exit_status``: 0, 128 + the signal that ended the run early, or 3 where an
alarm did.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio

from uniagent.engine.checkpointing import Checkpoints
from uniagent.engine.config import RunConfig
from uniagent.engine.curriculum.feed import shared_history
from uniagent.engine.evaluation import evaluate as evaluate_node
from uniagent.engine.journal import Journal
from uniagent.engine.node import Node, open_node
from uniagent.engine.observe.metrics import MetricsFile
from uniagent.engine.observe.progress import Progress
from uniagent.engine.position import Position
from uniagent.engine.run_folder import RunFolder
from uniagent.engine.signals import Stop
from uniagent.engine.training import Training


def train(
    config: RunConfig, folder: RunFolder, progress: Progress, *, start: Path | None = None, resumed: bool = False
) -> dict[str, Any]:
    """Train as the config says, into the folder; gives what summary.json holds. ``start``: the training checkpoint (a
    step-N) to go on from; ``resumed``: the folder is that of the run that goes on."""
    return trio.run(_train, config, folder, progress, start, resumed)


def evaluate(
    config: RunConfig, checkpoint: Path | None, progress: Progress, folder: RunFolder | None = None
) -> dict[str, Any]:
    """Evaluate the checkpoint (a Hugging Face folder; None: model.path); ``folder`` gets the episodes' record."""
    return trio.run(_evaluate, config, checkpoint, progress, folder)


async def _train(
    config: RunConfig, folder: RunFolder, progress: Progress, start: Path | None, resumed: bool
) -> dict[str, Any]:
    stop = Stop(config.run.drain_s)
    with _journal(folder) as journal:
        assert journal is not None
        async with open_node(config, stop=stop, progress=progress, trains=True) as node, _headed(node, folder):
            position = await node.restore(start) if start else Position()
            if node.head is not None:
                await node.head.begin()
            metrics = MetricsFile(
                folder.metrics, trio.current_time, after=position.step, spent_s=position.spent.get("wall_s", 0.0)
            )
            async with trio.open_nursery() as writing:
                checkpoints = Checkpoints(node, folder, config.checkpoint.keep, writing)
                checkpoints.go_on(position.step)
                training = Training(node, folder, journal, metrics, checkpoints, position, resumed)
                try:
                    await training.run()
                finally:
                    metrics.close()
                    folder.write_summary(training.summary())
            return {**training.summary(), "exit_status": stop.exit_status}


async def _evaluate(
    config: RunConfig, checkpoint: Path | None, progress: Progress, folder: RunFolder | None
) -> dict[str, Any]:
    stop = Stop(config.run.drain_s)
    result: dict[str, Any] = {"interrupted": True}
    with _journal(folder) as journal:
        async with open_node(config, stop=stop, progress=progress, trains=False, checkpoint=checkpoint) as node:
            async with shared_history(node, "eval") as history:
                with stop.draining() as limit:
                    scores = await evaluate_node(node, journal, name="eval", step=0, history=history)
            if not limit.cancelled_caught and not stop.event.is_set():
                result = {**scores, "checkpoint": str(node.model_folder)}
    return {**result, "exit_status": stop.exit_status}


@asynccontextmanager
async def _headed(node: Node, folder: RunFolder) -> AsyncIterator[None]:
    """In a separate run the node is its head."""
    if node.config.rollout.mode != "separate":
        yield
        return
    from uniagent.engine.separate.head import open_head

    async with open_head(node, folder):
        yield


@contextmanager
def _journal(folder: RunFolder | None) -> Iterator[Journal | None]:
    if folder is None:
        yield None
        return
    journal = Journal(folder.episodes)
    try:
        yield journal
    finally:
        journal.close()
