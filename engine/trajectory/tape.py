"""The tokens of a tree's chains, kept so that any prefix is one copy.

A tape grows at its end; a chain that branches off goes on with a tape of its own, based on a position of the old one.
So each token is written once, whatever the number of branches, and reading a prefix costs its bytes and one step a
branching. What stands before a position never changes. Knows nothing of nodes.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field, frozen

from uniagent.engine.ports import Ids


@define(eq=False)
class Tape:
    base: Position | None = None  # what stands before it
    size: int = 0
    ids: Ids = field(factory=lambda: np.empty(256, np.int32))  # [capacity]


@frozen(eq=False)
class Position:
    """The first ``end`` tokens of a tape, and all before them."""

    tape: Tape
    end: int


def extended(at: Position | None, *pieces: Ids) -> Position:
    """The position after more tokens: on the same tape where it ends there, else on a new one."""
    tape = at.tape if at is not None and at.end == at.tape.size else Tape(at)
    for piece in pieces:
        end = tape.size + len(piece)
        if end > len(tape.ids):
            grown = np.empty(max(end, 2 * len(tape.ids)), np.int32)
            grown[: tape.size] = tape.ids[: tape.size]
            tape.ids = grown
        tape.ids[tape.size : end] = piece
        tape.size = end
    return Position(tape, tape.size)


def read(at: Position | None, *more: Ids) -> Ids:
    """[P] the tokens through a position and more after them, in one copy."""
    out = list(more[::-1])
    while at is not None:
        out.append(at.tape.ids[: at.end])
        at = at.tape.base
    return np.concatenate([*out[::-1], np.empty(0, np.int32)], dtype=np.int32)
