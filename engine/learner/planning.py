"""The order of work of one training step: which rows are scored, trained, and when the optimizer steps.

A plan is data; the trainer runs its pieces one at a time, so that a caller may do something else in between. What must
be known before a row can be trained is scored first, and only then: the policy at the batch's start when more than one
optimizer step is taken on it, and sessions that lie in several rows when the loss looks at whole sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from attrs import frozen

from uniagent.engine.learner.batch import Batch
from uniagent.engine.learner.forest import Index
from uniagent.engine.learner.packing import Cost, Item, Row, pack, pack_row
from uniagent.engine.learner.ranks import ALONE, Ranks


class Work(Enum):
    """What is done with a row, or, without one, what is done with the results of the rows before."""

    REFERENCE = "reference"  # its tokens are scored under the reference model
    OLD = "old"  # under the policy at the batch's start
    CURRENT = "current"  # under the policy as it is, for sessions that other rows share
    TRAIN = "train"  # forward and backward; without a row: the optimizer steps on what was accumulated


@frozen(eq=False)
class Piece:
    """One thing to do. ``row`` None ends a phase: scores are exchanged between ranks, or the optimizer steps.
    ``minibatch`` counts optimizer steps of this batch. ``idle``: another rank has a row more; this one only keeps it
    company, and nothing of it counts."""

    work: Work
    minibatch: int
    row: Row | None = None
    idle: bool = False


@frozen
class Needs:
    """What the loss has to know beforehand."""

    reference: bool
    old: bool  # the policy at the batch's start
    sessions: bool  # whole sessions under the current policy


@frozen(eq=False)
class Plan:
    """pieces in order, the last optimizer step left out (``Trainer.apply`` takes it); tokens[m] are those of minibatch
    m. Every rank has as many pieces of each work, in the same order."""

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
    ranks: Ranks = ALONE,
) -> Plan:
    """Groups are dealt to at most ``minibatches`` optimizer steps, in an order drawn from ``rng`` when there are
    several; each is packed into rows of ``micro_tokens``, which are dealt to the ranks. A batch without a trained token
    has no piece."""
    dealt = _deal(batch, minibatches, rng)
    rows = [
        pack([_item(batch, i) for i in chains], micro_tokens, cost=cost, share=share, rows=ranks.shares)
        for chains in dealt
    ]
    pieces: list[Piece] = []

    def phase(work: Work, minibatch: int, chosen: Sequence[Row]) -> None:
        pieces.extend(Piece(work, minibatch, r, idle) for r, idle in _mine(chosen, ranks))
        pieces.append(Piece(work, minibatch))

    for work, wanted in ((Work.REFERENCE, needs.reference), (Work.OLD, needs.old)):
        if wanted:
            for m, mine in enumerate(rows):
                phase(work, m, mine)
    for m, mine in enumerate(rows):
        split = _sharing_sessions(batch, mine, ranks) if needs.sessions else []
        if split:
            phase(Work.CURRENT, m, split)
        phase(Work.TRAIN, m, mine)
    tokens = tuple(np.sort(np.concatenate([r.tokens for r in mine])) for mine in rows)
    return Plan(tuple(pieces[:-1]), tokens)


def _mine(rows: Sequence[Row], ranks: Ranks) -> list[tuple[Row, bool]]:
    """This rank's rows, and whether each only keeps others company. Rows of about the same cost are done at the same
    time, the costlier of them by who had less before."""
    ordered = sorted(rows, key=lambda r: -r.cost)
    spent = [0.0] * ranks.shares
    mine = []
    for start in range(0, len(ordered), ranks.shares):
        now = ordered[start : start + ranks.shares]
        free = sorted(range(ranks.shares), key=lambda i: (spent[i], i))
        place = free.index(ranks.share)
        mine.append((now[place], False) if place < len(now) else (_smallest(now[-1]), True))
        for i, row in zip(free, now, strict=False):
            spent[i] += row.cost
    return mine


def _smallest(row: Row) -> Row:
    """Two tokens of it: a forward and backward that costs next to nothing."""
    return pack_row([Item(row.forest.ids[:2], np.array([1]), row.tokens[:1], 0)], Cost(), least=0)


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


def _sharing_sessions(batch: Batch, rows: Sequence[Row], ranks: Ranks) -> list[Row]:
    """Rows with a token of a session that another row, or another rank's part of the row, has tokens of too."""
    if ranks.context > 1:
        return list(rows)
    seen = [np.unique(batch.session[r.tokens]) for r in rows]
    found = np.concatenate([*seen, np.empty(0, np.int64)])
    names, counts = np.unique(found, return_counts=True)
    split = names[counts > 1]
    return [r for r, sessions in zip(rows, seen, strict=True) if np.isin(sessions, split).any()]
