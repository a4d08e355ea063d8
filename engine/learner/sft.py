"""Supervised training on token sequences with a mask: the same rows, attention and scoring as in RL.

Draws its batches from one seeded generator and uses no global one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from uniagent.engine.learner.optimizer import adamw, clip, set_learning_rate
from uniagent.engine.learner.packing import Item, pack
from uniagent.engine.learner.policy import Policy
from uniagent.engine.learner.schedule import learning_rate
from uniagent.engine.ports import Ids

Example = tuple[Ids, npt.NDArray[np.bool_]]  # ids [T], which of them are learned [T]


@frozen
class SftStep:
    """What one optimizer step did. loss: mean negative log-likelihood of the learned tokens, in nats."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int  # in the batch
    learned: int  # of them, in the loss


def sft(
    model: Any,
    sequences: Sequence[Example],
    *,
    steps: int,
    tokens_per_step: int,
    lr: float,
    seed: int,
    warmup: int = 20,
    schedule: str = "linear",
    floor: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.98),
    weight_decay: float = 0.01,
    max_grad_norm: float = 1.0,
    micro_tokens: int = 8192,
    on_step: Callable[[SftStep], None] | None = None,
) -> list[SftStep]:
    """Trains ``model`` (a Hugging Face causal LM) in place for ``steps`` steps of at least ``tokens_per_step`` tokens.

    A step takes whole sequences in a seeded order, all of them once before any comes again. A token is learned when its
    mask is set and it is not the first of its sequence. Raises ValueError when no sequence has a token to learn.
    """
    policy = Policy(model)
    items = [_item(ids, mask) for ids, mask in sequences]
    items = [i for i in items if len(i.trained)]
    if not items:
        raise ValueError("no sequence has a token to learn: every mask is empty")
    optimizer = adamw(policy, betas=betas, weight_decay=weight_decay)
    batches = _batches(items, tokens_per_step, np.random.default_rng(seed))
    done = []
    for step in range(steps):
        batch = next(batches)
        learned = sum(len(i.trained) for i in batch)
        loss = torch.zeros((), dtype=torch.float64)
        for row in pack(batch, micro_tokens, cost=policy.cost()):
            with policy.running():
                lp, _ = policy(policy.inputs(row)[0])
                nll = -lp.sum() / learned
                nll.backward()
            loss += nll.detach().cpu()
        norm = clip(policy.parameters(), max_grad_norm)
        rate = learning_rate(step, peak=lr, warmup=warmup, total=steps, kind=schedule, floor=floor)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done.append(SftStep(step, float(loss), float(norm), rate, sum(len(i.ids) for i in batch), learned))
        if on_step is not None:
            on_step(done[-1])
    return done


def _item(ids: Ids, mask: npt.NDArray[np.bool_]) -> Item:
    trained = np.flatnonzero(mask)
    trained = trained[trained > 0]
    return Item(np.asarray(ids, np.int32), trained, np.arange(len(trained)), unit=0)


def _batches(items: Sequence[Item], tokens: int, rng: np.random.Generator) -> Iterator[list[Item]]:
    order: list[int] = []
    while True:
        batch: list[Item] = []
        while sum(len(i.ids) for i in batch) < tokens:
            order = order or rng.permutation(len(items)).tolist()
            batch.append(items[order.pop()])
        yield batch
