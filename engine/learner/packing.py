"""From sequences to rows: packed without padding, prefixes shared, balanced by cost.

A row is one forward and backward. Units that must stay together (a group's sequences, for their shared prompt) are put
into as few rows as the token budget allows, the costliest first, each into the row with the least cost that has room; a
unit larger than the budget is cut between its sequences. Deterministic: the same sequences give the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from uniagent.engine.learner.forest import Forest, Index, grow
from uniagent.engine.ports import Ids


@frozen
class Cost:
    """Of a row: ``token`` for each computed token, ``pair`` for each query-key pair of attention; any unit."""

    token: float = 1.0
    pair: float = 1 / 4096

    def of(self, forest: Forest) -> float:
        return self.token * len(forest.ids) + self.pair * forest.pairs


@frozen(eq=False)
class Row:
    """One forward: ids and positions [L]. The hidden state at sources[j] predicts targets[j], which is trained token
    tokens[j] of the flat arrays; all [n]."""

    forest: Forest
    sources: Index
    targets: Index
    tokens: Index
    cost: float


@frozen(eq=False)
class Item:
    """A sequence to train: ids [T], the positions that are trained [n] (all > 0), and where they stand in the flat
    arrays [n]. Items of one ``unit`` share a prefix and go together."""

    ids: Ids
    trained: Index
    tokens: Index
    unit: int


def pack(
    items: Sequence[Item], budget: int, *, cost: Cost | None = None, share: bool = True, rows: int = 1
) -> list[Row]:
    """Rows of at most ``budget`` computed tokens (a longer sequence has a row of its own), at least ``rows`` of them
    where there are as many pieces."""
    cost = cost or Cost()
    least = 16 if share else 0
    pieces = sorted(_pieces(items, budget, least, cost), key=lambda p: -p[1])
    count = max(rows, -(-sum(p[2] for p in pieces) // budget))
    bins: list[tuple[float, int, list[Item]]] = [(0.0, 0, []) for _ in range(count)]
    for piece, price, tokens in pieces:
        free = [i for i, b in enumerate(bins) if not b[2] or b[1] + tokens <= budget]
        if not free:
            bins.append((price, tokens, piece))
            continue
        at = min(free, key=lambda i: (bins[i][0], i))
        bins[at] = (bins[at][0] + price, bins[at][1] + tokens, bins[at][2] + piece)
    return [pack_row(b[2], cost, least) for b in bins if b[2]]


def pack_row(items: Sequence[Item], cost: Cost, least: int) -> Row:
    forest = grow([i.ids for i in items], least=least)
    sources = [place[item.trained - 1] for item, place in zip(items, forest.places, strict=True)]
    return Row(
        forest=forest,
        sources=np.concatenate(sources),
        targets=np.concatenate([i.ids[i.trained] for i in items]).astype(np.int64),
        tokens=np.concatenate([i.tokens for i in items]),
        cost=cost.of(forest),
    )


def _pieces(items: Sequence[Item], budget: int, least: int, cost: Cost) -> list[tuple[list[Item], float, int]]:
    """(items, cost, computed tokens) of what is placed as a whole. A unit that shares nothing is its sequences."""
    units: dict[int, list[Item]] = {}
    for i, item in enumerate(items):
        units.setdefault(item.unit if least else i, []).append(item)
    todo, done = list(units.values()), []
    while todo:
        unit = todo.pop()
        forest = grow([i.ids for i in unit], least=least)
        tokens = len(forest.ids)
        alone = len(unit) == 1
        if not alone and (tokens > budget or tokens == sum(len(i.ids) for i in unit)):
            half = len(unit) // 2
            todo += [unit[:half], unit[half:]]
        else:
            done.append((unit, cost.of(forest), tokens))
    return done
