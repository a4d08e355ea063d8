"""What training goes on from: weights, optimizer, counters and what the caller adds, by torch.distributed.checkpoint.

Every rank writes its own shards while training goes on (they are copied first), and any number of ranks can load them.
The snapshot appears under its name only when all of it is on disk. The learner draws from generators keyed by its seed
and counters, so the counters are its random state; a caller's own generators, data position, policy version and
admission counters belong into ``extra``.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import async_save

from uniagent.engine.errors import UserError
from uniagent.engine.learner.checkpoints import begin, commit, exported, write_hf, writing
from uniagent.engine.learner.trainer import Trainer
from uniagent.engine.ports import Json
from uniagent.engine.run_folder import STATE

# one process is the usual case here, and no reason to warn
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@frozen(eq=False)
class Pending:
    """A snapshot on its way to disk. Call ``finish`` on every rank, from any thread, before the next one."""

    target: Path
    part: Path
    shards: Future[Any]
    trainer: Trainer
    weights: dict[str, torch.Tensor] | None
    tokenizer_folder: Path | None

    def finish(self) -> Path:
        """Waits until it is whole under its name. Raises UserError when it could not be written."""
        try:
            with writing(self.target):
                try:
                    self.shards.result()
                except CheckpointException as problem:
                    raise next(iter(problem.failures.values()))[0] from problem
                if self.trainer.ranks.rank == 0:
                    if self.weights is not None and self.tokenizer_folder is not None:
                        model = self.trainer.policy.model
                        write_hf(model, self.weights, self.tokenizer_folder, self.part / "hf")
                    commit(self.part, self.target)
        finally:
            if self.trainer.ranks.rank == 0:
                shutil.rmtree(self.part, ignore_errors=True)
        return self.target


def save(
    trainer: Trainer, target: Path, *, extra: Mapping[str, Json] | None = None, tokenizer_folder: Path | None = None
) -> Pending:
    """Begins to write ``target``/dcp and, with ``tokenizer_folder``, ``target``/hf. All ranks call it, on the thread
    that owns the device, between batches; it returns once the state is copied. ``extra`` is JSON, of rank 0."""
    ranks = trainer.ranks
    part = target.with_name(f".{target.name}.part")
    if ranks.rank == 0:
        part = begin(target)
        (part / STATE).write_text(json.dumps({"trainer": trainer.counters(), "extra": dict(extra or {})}))
    ranks.barrier()
    shards = async_save(
        _state(trainer), checkpoint_id=part / "dcp", process_group=ranks.io_group, no_dist=ranks.size == 1
    )
    assert isinstance(shards, Future)
    weights = None
    if tokenizer_folder is not None:
        copies = ((name, tensor.cpu().clone()) for name, tensor in exported(trainer.policy.model))
        weights = {name: copy for name, copy in copies if ranks.rank == 0}
    return Pending(target, part, shards, trainer, weights, tokenizer_folder)


def load(trainer: Trainer, folder: Path) -> dict[str, Json]:
    """Puts the trainer where it was when ``folder`` (a step-N) was saved, by whatever number of ranks, and gives
    ``extra``. All ranks call it."""
    if not (folder / STATE).exists():
        raise UserError(f"{folder} is not a training checkpoint: it has no {STATE}; resume from a step-N folder")
    state = _state(trainer)
    ranks = trainer.ranks
    load_shards(state, checkpoint_id=folder / "dcp", process_group=ranks.group, no_dist=ranks.size == 1)
    set_state_dict(
        trainer.policy, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    saved = json.loads((folder / STATE).read_text())
    trainer.restore(saved["trainer"])
    return dict(saved["extra"])


def _state(trainer: Trainer) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.policy, trainer.optimizer)
    return {"model": model, "optimizer": optimizer}
