"""The ranks that train together, as one: rank 0 runs the node and says what to do, the others follow.

Rank 0's trainer calls go through ``Team``: each is written to a command log that every rank reads in the same order, so
that all make the same collectives. Invariants: only the accelerator's thread of a rank (its main thread, where the
rank only follows) touches torch.distributed; a follower does nothing that the log does not say; when rank 0 is gone,
the others end with an error. With one rank there is no log and nothing of torch.distributed.

Knows the trainer's verbs, and carries the commands of an engine over several ranks; no sessions.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from uniagent.engine.config import RunConfig
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Floats, Ids, Json

if TYPE_CHECKING:
    from uniagent.engine.learner.batch import Batch
    from uniagent.engine.learner.planning import Piece
    from uniagent.engine.learner.ranks import Ranks
    from uniagent.engine.learner.snapshots import Pending
    from uniagent.engine.learner.trainer import Trainer


def world(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(rank, size) that torchrun gave this process; (0, 1) without it."""
    return int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))


def join(config: RunConfig, device: str) -> Ranks:
    """Starts torch.distributed where torchrun started several ranks. All ranks call it."""
    import torch.distributed as dist

    from uniagent.engine.learner import ranks

    if world()[1] > 1 and not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        train = config.placement.train_ranks if config.rollout.mode == "separate" else 0
        return ranks.join(context=config.learner.context_parallel, device=device, train=train)
    except ValueError as problem:
        raise UserError(str(problem)) from problem


class Team:
    """The trainer's verbs, made on every rank. Call them on rank 0, on the accelerator's thread. ``synced`` is what a
    follower with an engine does with new weights and their version."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.engine: Any = None  # of a follower: its part of an engine over several ranks
        self.synced: Callable[[list[tuple[str, Any]], int], None] | None = None
        self._pieces: tuple[Piece, ...] = ()
        self._saving: Pending | None = None

    def plan(self, batch: Batch) -> int:
        """Opens a batch; how many pieces it has, the same number on every rank."""
        return int(self._all("plan", batch))

    def micro(self, piece: int) -> None:
        self._all("micro", piece)

    def apply(self) -> dict[str, float]:
        found: dict[str, float] = self._all("apply")
        return found

    def logprobs(self, prompt: Ids, answer: Ids) -> Floats:
        """[T] of the answer after the prompt, under the learner's current weights."""
        found: Floats = self._all("logprobs", prompt, answer)
        return found

    def weights(self, version: int) -> list[tuple[str, Any]]:
        """All weights whole, for engines with a copy of their own, which have this policy version with them."""
        found: list[tuple[str, Any]] = self._all("weights", version)
        return found

    def save(self, target: Path, extra: Mapping[str, Json], tokenizer_folder: Path) -> Pending:
        """Begins a checkpoint; ``finish`` what it gives, off this thread, before the next one."""
        pending: Pending = self._all("save", target, dict(extra), tokenizer_folder)
        return pending

    def load(self, folder: Path) -> dict[str, Json]:
        """Goes on from a checkpoint (a step-N) of whatever number of ranks; gives what was saved beside the state."""
        extra: dict[str, Json] = self._all("load", folder)
        return extra

    def serve(self, shift: int) -> None:
        """The followers close the log and roll out, until ``gather``."""
        self._all("serve", shift)

    def gather(self) -> None:
        """Returns when every follower reads the log again."""
        self._all("gather")

    def commands(self, commands: list[Any] | None) -> list[Any]:
        """The leader's engine tells its followers'."""
        self._all("engine", commands)
        return commands or []

    def tensor(self, tensor: Any) -> Any:
        """Rank 0's, in the memory of every rank's."""
        import torch.distributed as dist

        dist.broadcast(tensor, src=0, group=self.trainer.ranks.group)
        return tensor

    def end(self) -> None:
        """The followers leave."""
        self._all("end")

    def follow(self) -> list[Any]:
        """What ranks other than 0 do: read the log, until it ends or they are to serve; gives that last command."""
        import torch.distributed as dist

        while True:
            if self._saving is not None:
                self._saving.finish()
                self._saving = None
            box: list[Any] = [None]
            dist.broadcast_object_list(box, src=0, group=self.trainer.ranks.group)
            command: list[Any] = box[0]
            self._do(*command)
            if command[0] in ("serve", "end"):
                return command

    def _all(self, verb: str, *args: Any) -> Any:
        if self.trainer.ranks.size > 1:
            import torch.distributed as dist

            dist.broadcast_object_list([[verb, *args]], src=0, group=self.trainer.ranks.group)
        return self._do(verb, *args)

    def _do(self, verb: str, *args: Any) -> Any:
        trainer = self.trainer
        if verb == "plan":
            self._pieces = trainer.plan(*args)
            return len(self._pieces)
        if verb == "micro":
            return trainer.micro(self._pieces[args[0]])
        if verb == "apply":
            return trainer.apply()
        if verb == "logprobs":
            prompt, answer = args
            ids = np.concatenate([prompt, answer]).astype(np.int32)
            return trainer.logprobs(ids, np.arange(len(prompt), len(ids)))
        if verb == "weights":
            from uniagent.engine.learner.weights import named_weights

            mine = trainer.ranks.rank == 0 or self.synced is not None
            found = [(name, tensor) for name, tensor in named_weights(trainer.policy.model) if mine]
            if trainer.ranks.rank and self.synced is not None:
                self.synced(found, *args)
            return found
        if verb == "save":
            from uniagent.engine.learner import snapshots

            target, extra, tokenizer_folder = args
            self._saving = snapshots.save(trainer, target, extra=extra, tokenizer_folder=tokenizer_folder)
            return self._saving
        if verb == "load":
            from uniagent.engine.learner import snapshots

            return snapshots.load(trainer, *args)
        if verb == "engine":
            return self.engine.replay(*args) if self.engine is not None else None
        if verb == "gather":
            return trainer.ranks.barrier()
        if verb not in ("serve", "end"):
            raise ValueError(f"the command log says {verb!r}, which no rank knows")
        return None


def follow(config: RunConfig) -> None:
    """A rank other than 0, from start to end. Signals are rank 0's business: it drains, then ends the log."""
    from uniagent.engine.node import build_trainer

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    build_trainer(config).follow()
    leave()


def leave() -> None:
    """At the end of a rank."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
