"""Prefix trees of token sequences, laid out so that every shared prefix is computed once.

A row holds a forest of segments in depth-first order, so that all descendants of a segment are one contiguous block.
Attention is then a short list of calls: each segment to itself, causally, and each inner segment seen by the block of
its descendants, without a mask. Sequences that share nothing are a forest of roots, which is plain packing.
Knows token ids and nothing else: no torch, no model, no loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from uniagent.engine.ports import Ids

Index = npt.NDArray[np.int64]


@frozen
class Call:
    """One attention call: queries [q0, q1) see keys [k0, k1), causally or all of them."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool


@frozen(eq=False)
class Forest:
    """A laid-out row. ids and positions [L]; places[i] [T_i] is where the tokens of sequence i stand in the row."""

    ids: Ids
    positions: Index
    calls: tuple[Call, ...]
    places: tuple[Index, ...]

    @property
    def pairs(self) -> int:
        """Query-key pairs that attention computes: its cost, up to a factor."""
        return sum(_pairs(c) for c in self.calls)

    @property
    def ends(self) -> Index:
        """[L] where the descendants of each token's segment end: it is seen from itself up to there, not beyond."""
        return ends(self.calls, len(self.ids))


def ends(calls: Sequence[Call], length: int) -> Index:
    """See ``Forest.ends``."""
    out = np.zeros(length, np.int64)
    for call in calls:
        out[call.k0 : call.k1] = np.maximum(out[call.k0 : call.k1], call.q1)
    return out


def _pairs(call: Call) -> int:
    n = call.q1 - call.q0
    return n * (n + 1) // 2 if call.causal else n * (call.k1 - call.k0)


@define(eq=False)
class _Node:
    ids: Ids
    parent: _Node | None
    depth: int  # tokens before it
    children: list[_Node] = field(factory=list)
    start: int = 0  # its place in the row


def grow(sequences: Sequence[Ids], *, least: int = 16) -> Forest:
    """The forest of sequences [T_i], sharing equal prefixes of at least ``least`` tokens (a shorter one costs more in
    attention calls than it saves). ``least = 0`` shares nothing. Raises ValueError for an empty sequence."""
    root = _Node(np.empty(0, np.int32), None, 0)
    leaves = [_insert(root, np.asarray(ids, np.int32), least) for ids in sequences]
    order, calls = _depth_first(root)
    return Forest(
        ids=np.concatenate([n.ids for n in order]),
        positions=np.concatenate([np.arange(n.depth, n.depth + len(n.ids)) for n in order]),
        calls=calls,
        places=tuple(_places(leaf) for leaf in leaves),
    )


def _insert(root: _Node, ids: Ids, least: int) -> _Node:
    """Adds one sequence and gives the node at whose end it ends."""
    if len(ids) == 0:
        raise ValueError("a sequence without tokens cannot be trained")
    at, done = root, 0
    while done < len(ids):
        common, child = max(
            ((_common(c.ids, ids[done:]), c) for c in at.children), key=lambda x: x[0], default=(0, None)
        )
        if child is None or least == 0 or common < min(least, len(ids) - done, len(child.ids)):
            child = _Node(ids[done:], at, done)
            at.children.append(child)
            return child
        if common < len(child.ids):
            child = _split(child, common)
        at, done = child, done + common
    return at


def _common(a: Ids, b: Ids) -> int:
    """Length of the longest common prefix."""
    if a[0] != b[0]:
        return 0
    n = min(len(a), len(b))
    for end in (min(n, 32), n):  # most differ early
        different = a[:end] != b[:end]
        if different.any():
            return int(different.argmax())
    return n


def _split(node: _Node, at: int) -> _Node:
    """Puts a new node over the first ``at`` tokens. The old one keeps the rest, so what ended there still does."""
    assert node.parent is not None
    top = _Node(node.ids[:at], node.parent, node.depth, [node])
    node.parent.children[node.parent.children.index(node)] = top
    node.ids, node.parent, node.depth = node.ids[at:], top, node.depth + at
    return top


def _depth_first(root: _Node) -> tuple[list[_Node], tuple[Call, ...]]:
    order: list[_Node] = []
    inner: list[Call] = []
    at, todo = 0, [(n, False) for n in reversed(root.children)]
    while todo:  # no recursion: a session may branch hundreds of times
        node, seen = todo.pop()
        end = node.start + len(node.ids)
        if seen:
            inner.append(Call(end, at, node.start, end, False))
            continue
        node.start = at
        order.append(node)
        at += len(node.ids)
        if node.children:
            todo.append((node, True))
            todo += [(n, False) for n in reversed(node.children)]
    own = [Call(n.start, n.start + len(n.ids), n.start, n.start + len(n.ids), True) for n in order]
    return order, tuple(own + inner)  # every query once before any is merged


def _places(leaf: _Node) -> Index:
    path: list[Index] = []
    node: _Node | None = leaf
    while node is not None and node.parent is not None:
        path.append(np.arange(node.start, node.start + len(node.ids)))
        node = node.parent
    return np.concatenate(path[::-1])
