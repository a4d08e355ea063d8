"""Entry points of a whole run, for the command line and for scripts: train and evaluate. Blocking; each runs trio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio

from uniagent.engine.checkpointing import Checkpoints
from uniagent.engine.config import RunConfig
from uniagent.engine.errors import UserError
from uniagent.engine.evaluation import evaluate as evaluate_node
from uniagent.engine.journal import Journal
from uniagent.engine.node import open_node
from uniagent.engine.observe.metrics import MetricsFile
from uniagent.engine.observe.progress import Progress
from uniagent.engine.run_folder import RunFolder
from uniagent.engine.signals import Stop
from uniagent.engine.training import Training


def train(config: RunConfig, folder: RunFolder, progress: Progress) -> tuple[dict[str, Any], int]:
    """Train as the config says, into the folder. Returns (summary, exit status): 0, or 128 + the signal that ended it."""
    return trio.run(_train, config, folder, progress)


def evaluate(config: RunConfig, checkpoint: Path | None, progress: Progress) -> tuple[dict[str, Any], int]:
    """Evaluate the checkpoint (a Hugging Face folder; None: model.path). Returns (result, exit status)."""
    return trio.run(_evaluate, config, checkpoint, progress)


async def _train(config: RunConfig, folder: RunFolder, progress: Progress) -> tuple[dict[str, Any], int]:
    stop = Stop(config.run.drain_s)
    journal, metrics = Journal(folder.episodes), MetricsFile(folder.metrics, trio.current_time)
    try:
        async with open_node(config, stop=stop, progress=progress, trains=True) as node:
            training = Training(node, folder, journal, metrics, Checkpoints(node, folder, config.checkpoint.keep))
            try:
                await training.run()
            finally:
                folder.write_summary(training.summary())
            return training.summary(), stop.exit_status
    finally:
        journal.close()
        metrics.close()


async def _evaluate(config: RunConfig, checkpoint: Path | None, progress: Progress) -> tuple[dict[str, Any], int]:
    if not config.eval.data:
        raise UserError("eval.data is not set: name the held-out samples (a JSONL file, or NAME/SPLIT)")
    stop = Stop(config.run.drain_s)
    async with open_node(config, stop=stop, progress=progress, trains=False, checkpoint=checkpoint) as node:
        with stop.draining():
            result = await evaluate_node(node, None, name="eval", step=0)
            return {**result, "checkpoint": str(node.model_folder)}, stop.exit_status
        return {"interrupted": True}, stop.exit_status
