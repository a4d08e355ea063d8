"""Trains the policy on batches: optimizer, schedule, clipping, and what to do with a step that went wrong.

A step is a plan of pieces that the accelerator thread runs one at a time (``plan``, ``micro``, ``apply``), so that
other work can go in between; ``step`` runs them all. A step with a non-finite loss or gradient changes nothing and is
counted; three in a row stop the run. No global generator is used. Knows tensors; no task, no gateway, no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field, frozen

from uniagent.engine.config import Learner
from uniagent.engine.errors import UserError
from uniagent.engine.learner import lora
from uniagent.engine.learner.batch import Batch, describe
from uniagent.engine.learner.forest import Index
from uniagent.engine.learner.objective import Objective, needs
from uniagent.engine.learner.optimizer import adamw, clip, set_learning_rate
from uniagent.engine.learner.packing import Item, pack_row
from uniagent.engine.learner.planning import Piece, Work, optimizer_steps, plan
from uniagent.engine.learner.policy import Policy
from uniagent.engine.learner.ranks import ALONE, Ranks
from uniagent.engine.learner.schedule import learning_rate
from uniagent.engine.ports import Floats, Ids

BAD_STEPS = 3  # skipped steps in a row that stop a run


@frozen
class Taken:
    """One optimizer step; ``taken`` is False when it was skipped."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    taken: bool


@define
class _Open:
    """A batch between ``plan`` and ``apply``."""

    batch: Batch
    objective: Objective
    loss: torch.Tensor
    steps: list[Taken] = field(factory=list)


class Trainer:
    """``model`` is a Hugging Face causal LM, trained in place; ``steps`` the batches of the whole run, at which the
    schedule ends; ``reference`` a frozen copy for the KL term (with adapters: the model without them, by itself).
    ``train_step`` counts optimizer steps. Weights are kept in fp32, whatever they were loaded in."""

    def __init__(
        self, model: Any, config: Learner, *, seed: int, steps: int, reference: Any = None, ranks: Ranks = ALONE
    ) -> None:
        if config.kl_coef and reference is None and not config.lora_rank:
            raise ValueError("learner.kl_coef > 0 needs a reference model")
        if config.lora_rank:
            lora.add(model, rank=config.lora_rank, alpha=config.lora_alpha, seed=seed)
        elif model.dtype in (torch.bfloat16, torch.float16):
            model.float()  # an update is smaller than what these can add
        self.config, self.seed, self.steps = config, seed, steps
        self.ranks = ranks
        precision = _precision(config.precision, next(model.parameters()).device.type)
        self.policy = Policy(model, ranks, autocast=precision, recompute=config.recompute)
        self.reference = None
        if reference is not None:
            self.reference = Policy(reference.requires_grad_(False), ranks, autocast=precision)
        self.optimizer = adamw(self.policy, betas=config.betas, weight_decay=config.weight_decay)
        self.train_step = 0
        self.batches = 0
        self.skipped = 0
        self.lost: dict[str, int] = {}  # of the latest batch: session -> tokens of skipped steps
        self._bad: list[list[str]] = []  # the sessions of each skipped step since the last good one
        self._open: _Open | None = None

    def step(self, batch: Batch) -> dict[str, float]:
        """Trains on one batch and gives its metrics."""
        for piece in self.plan(batch):
            self.micro(piece)
        return self.apply()

    def plan(self, batch: Batch) -> tuple[Piece, ...]:
        """Opens a batch. Its pieces are given to ``micro`` in order, then ``apply`` closes it."""
        if self._open is not None:
            raise RuntimeError("a batch is open: call apply() before the next plan()")
        planned = plan(
            batch,
            minibatches=self.config.minibatches,
            micro_tokens=self.config.micro_tokens,
            share=self.config.prefix_tree,
            cost=self.policy.cost(),
            needs=needs(self.config, single=optimizer_steps(batch, self.config.minibatches) <= 1),
            rng=np.random.default_rng([self.seed, self.batches]),
            ranks=self.ranks,
        )
        objective = Objective(batch, planned.tokens, self.policy, self.config)
        self.lost = {}
        self._open = _Open(batch, objective, torch.zeros((), dtype=torch.float64, device=self.policy.device))
        return planned.pieces

    def micro(self, piece: Piece) -> None:
        """Runs one piece."""
        now = self._now()
        if piece.work is Work.TRAIN:
            if piece.row is None:
                self._optimize(now)
            else:
                now.loss += now.objective.train(piece.row, piece.minibatch, idle=piece.idle)
            return
        into = getattr(now.objective, piece.work.value)
        if piece.row is None:
            now.objective.exchange(into, piece.minibatch)
        elif piece.work is not Work.REFERENCE:
            now.objective.score(piece.row, self.policy, into, idle=piece.idle)
        elif self.reference is not None:
            now.objective.score(piece.row, self.reference, into, idle=piece.idle)
        else:
            with lora.disabled(self.policy.model):
                now.objective.score(piece.row, self.policy, into, idle=piece.idle)

    def apply(self) -> dict[str, float]:
        """The last optimizer step of the batch, and its metrics: those of ``diagnostics``, the batch's ledger, loss,
        grad_norm, lr, train_step, skipped_steps. Raises UserError after three skipped steps in a row."""
        now = self._now()
        if now.objective.minibatches:
            self._optimize(now)
        self._open = None
        self.batches += 1
        skipped = sum(s.tokens for s in now.steps if not s.taken)
        out = dict(describe(now.batch.ledger.skipped(skipped)))
        out |= {"train_step": float(self.train_step), "skipped_steps": float(self.skipped)}
        if now.steps:
            out["loss"] = float(np.mean([s.loss for s in now.steps]))
            out["grad_norm"] = float(np.mean([s.grad_norm for s in now.steps]))
            out["lr"] = now.steps[-1].lr
            out |= now.objective.metrics()
        return out

    def logprobs(self, ids: Ids, trained: Index, *, temperature: float = 1.0) -> Floats:
        """Log-probabilities of the tokens of ids [T] at the positions trained [n] (all > 0) under the current weights:
        [n] float32. For canaries and replay checks; opens no batch. All ranks call it, with the same tokens."""
        row = pack_row([Item(ids, trained, np.arange(len(trained)), unit=0)], self.policy.cost(), least=0)
        x, mine = self.policy.inputs(row)
        out = torch.zeros(len(trained), device=self.policy.device)
        scored = self.policy.score(evolve(x, temperature=torch.full_like(out[mine], temperature)))
        out[mine] = scored.float() / (self.ranks.shares if self.ranks.size > 1 else 1)
        return np.asarray(self.ranks.sum(out).cpu().numpy(), np.float32)

    def counters(self) -> dict[str, int]:
        """What a resumed trainer has to know beside weights and optimizer."""
        return {"train_step": self.train_step, "batches": self.batches, "skipped": self.skipped}

    def restore(self, counters: Mapping[str, int]) -> None:
        self.train_step, self.batches, self.skipped = (counters[n] for n in ("train_step", "batches", "skipped"))

    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        c = self.config
        total = self.steps * c.minibatches
        return learning_rate(self.train_step, peak=c.lr, warmup=c.warmup_steps, total=total, kind=c.schedule)

    def _now(self) -> _Open:
        if self._open is None:
            raise RuntimeError("no batch is open: call plan() first")
        return self._open

    def _optimize(self, now: _Open) -> None:
        """One optimizer step on what was accumulated, or none when it is not finite."""
        loss, lr = float(self.ranks.sum(now.loss)), self.learning_rate()
        norm = clip(self.policy.parameters(), self.config.max_grad_norm)
        taken = bool(np.isfinite(loss) and np.isfinite(norm))
        tokens = now.objective.minibatches[len(now.steps)]
        if taken:
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
            self.train_step += 1
            self._bad.clear()
        else:
            self.skipped += 1
            touched, counts = np.unique(now.batch.session[tokens.cpu().numpy()], return_counts=True)
            sessions = [now.batch.sessions[i] for i in touched]
            for name, count in zip(sessions, counts.tolist(), strict=True):
                self.lost[name] = self.lost.get(name, 0) + count
            self._bad.append(now.objective.take_bad() or sessions)
        self.optimizer.zero_grad(set_to_none=True)
        now.steps.append(Taken(loss, norm, lr, len(tokens), taken))
        now.loss.zero_()
        if len(self._bad) >= BAD_STEPS:
            names = ", ".join(sorted({name for names in self._bad for name in names}))
            raise UserError(
                f"{BAD_STEPS} optimizer steps in a row had a non-finite loss or gradient (sessions: {names}): "
                "lower learner.lr, or look at these sessions' tokens"
            )


def _precision(wanted: str, device: str) -> torch.dtype | None:
    """The dtype of matrix products; None: that of the weights."""
    if wanted == "auto":
        wanted = "bfloat16" if device == "cuda" else "float32"
    return torch.bfloat16 if wanted == "bfloat16" else None
