"""The order of work of one training step: which rows are scored, trained, and when the optimizer steps.

A plan is data; the trainer runs its pieces one at a time, so that a caller may do something else in between. What must
be known before a row can be trained is scored first, and only then: the policy at the batch's start when more than one
optimizer step is taken on it, and sessions that lie in several rows when the loss looks at whole sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np
from attrs import frozen

from uniagent.engine.learner.batch import Batch
from uniagent.engine.learner.forest import Index
from uniagent.engine.learner.packing import Cost, Item, Row, pack


class Work(Enum):
    """What is done with a row."""

    REFERENCE = "reference"  # its tokens are scored under the reference model
    OLD = "old"  # under the policy at the batch's start
    CURRENT = "current"  # under the policy as it is, for sessions that other rows share
    TRAIN = "train"  # forward and backward
    STEP = "step"  # no row: the optimizer steps on what was accumulated


@frozen(eq=False)
class Piece:
    """One thing to do; ``row`` is None for STEP. ``minibatch`` counts optimizer steps of this batch."""

    work: Work
    minibatch: int
    row: Row | None = None


@frozen
class Needs:
    """What the loss has to know beforehand."""

    reference: bool
    old: bool  # the policy at the batch's start
    sessions: bool  # whole sessions under the current policy


@frozen(eq=False)
class Plan:
    """pieces in order, the last STEP left out (``Trainer.apply`` takes it); tokens[m] are those of minibatch m."""

    pieces: tuple[Piece, ...]
    tokens: tuple[Index, ...]


def plan(
    batch: Batch,
    *,
    minibatches: int,
    micro_tokens: int,
    share: bool,
    cost: Cost,
    needs: Needs,
    rng: np.random.Generator,
) -> Plan:
    """Groups are dealt to at most ``minibatches`` optimizer steps, in an order drawn from ``rng`` when there are
    several; each is packed into rows of ``micro_tokens``. A batch without a trained token has no piece."""
    dealt = _deal(batch, minibatches, rng)
    rows = [pack([_item(batch, i) for i in chains], micro_tokens, cost=cost, share=share) for chains in dealt]
    pieces: list[Piece] = []
    for work, wanted in ((Work.REFERENCE, needs.reference), (Work.OLD, needs.old)):
        pieces += [Piece(work, m, r) for m, mine in enumerate(rows) for r in mine if wanted]
    for m, mine in enumerate(rows):
        if needs.sessions:
            pieces += [Piece(Work.CURRENT, m, r) for r in _sharing_sessions(batch, mine)]
        pieces += [Piece(Work.TRAIN, m, r) for r in mine]
        pieces.append(Piece(Work.STEP, m))
    tokens = tuple(np.sort(np.concatenate([r.tokens for r in mine])) for mine in rows)
    return Plan(tuple(pieces[:-1]), tokens)


def optimizer_steps(batch: Batch, minibatches: int) -> int:
    """How many optimizer steps a batch gives: minibatches are whole groups."""
    return min(minibatches, len({c.group for c in batch.chains}))


def _deal(batch: Batch, minibatches: int, rng: np.random.Generator) -> list[list[int]]:
    """Chains of each minibatch, whole groups."""
    groups = sorted({c.group for c in batch.chains})
    count = optimizer_steps(batch, minibatches)
    if count > 1:
        groups = [groups[i] for i in rng.permutation(len(groups))]
    place = {group: i % count for i, group in enumerate(groups)}
    return [[i for i, c in enumerate(batch.chains) if place[c.group] == m] for m in range(count)]


def _item(batch: Batch, number: int) -> Item:
    chain = batch.chains[number]
    return Item(chain.ids, chain.trained, np.arange(chain.first, chain.first + len(chain.trained)), chain.group)


def _sharing_sessions(batch: Batch, rows: Sequence[Row]) -> Iterable[Row]:
    """Rows with a token of a session that another row has tokens of too."""
    seen = [np.unique(batch.session[r.tokens]) for r in rows]
    found = np.concatenate([*seen, np.empty(0, np.int64)])
    names, counts = np.unique(found, return_counts=True)
    split = names[counts > 1]
    return [r for r, sessions in zip(rows, seen, strict=True) if np.isin(sessions, split).any()]
