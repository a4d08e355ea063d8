"""One row over several ranks: each holds a part of the tokens and attends to the keys of all.

The row is cut into 2 n chunks and rank i takes chunks i and 2 n - 1 - i, which balances causal attention (as in Llama
3, arXiv:2407.21783, section 3.3.2). Knows positions in a row; no tensors of a model.
"""

from __future__ import annotations

import numpy as np
from attrs import evolve, frozen

from uniagent.engine.learner.forest import Call, Index, ends
from uniagent.engine.learner.packing import Row
from uniagent.engine.ports import Ids


@frozen(eq=False)
class Part:
    """A rank's part of a row, l tokens. ids and positions [l]; calls with local queries and global keys; sources [m]
    are local places that predict trained tokens, the row's numbers ``kept`` [m]; order[i] is where global token i
    stands when the parts of all ranks are put behind each other. places [l] are the global places of its tokens, ends
    [L] where the descendants of each global token's segment end."""

    ids: Ids
    positions: Index
    calls: tuple[Call, ...]
    sources: Index
    kept: Index
    order: Index
    places: Index
    ends: Index


def part(row: Row, number: int, parts: int) -> Part:
    """Part ``number`` of ``parts``. The row is padded to a multiple of 2 x parts; padding attends to itself."""
    length = len(row.forest.ids)
    chunk = -(-length // (2 * parts))
    padded = 2 * parts * chunk
    calls = row.forest.calls
    if padded > length:
        calls = (*calls, Call(length, padded, length, padded, True))
    places = [_places(p, parts, chunk) for p in range(parts)]
    order = np.empty(padded, np.int64)
    order[np.concatenate(places)] = np.arange(padded)
    mine = places[number]
    local = np.full(padded, -1, np.int64)
    local[mine] = np.arange(len(mine))
    sources = local[row.sources]
    kept = np.flatnonzero(sources >= 0)
    ids, positions = (
        np.concatenate([x, np.zeros(padded - length, x.dtype)]) for x in (row.forest.ids, row.forest.positions)
    )
    first, second = (number * chunk, (2 * parts - 1 - number) * chunk)
    own = [piece for c in calls for piece in (*_clip(c, first, chunk, 0), *_clip(c, second, chunk, chunk))]
    return Part(
        ids=ids[mine],
        positions=positions[mine],
        calls=tuple(sorted(own, key=lambda c: not c.causal)),  # every query once before any is merged
        sources=sources[kept],
        kept=kept,
        order=order,
        places=mine,
        ends=ends(calls, padded),
    )


def _places(number: int, parts: int, chunk: int) -> Index:
    ends = (number, 2 * parts - 1 - number)
    return np.concatenate([np.arange(e * chunk, (e + 1) * chunk) for e in ends])


def _clip(call: Call, start: int, chunk: int, offset: int) -> list[Call]:
    """The part of a call whose queries are in [start, start + chunk), moved to local place ``offset``."""
    a, b = max(call.q0, start), min(call.q1, start + chunk)
    if a >= b:
        return []
    move = offset - start
    if not call.causal:
        return [evolve(call, q0=a + move, q1=b + move)]
    above = [Call(a + move, b + move, call.k0, a, False)] if a > call.k0 else []
    return [Call(a + move, b + move, a, b, True), *above]
