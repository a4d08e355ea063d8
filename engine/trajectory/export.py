"""A finished session as training data: trajectories, fates, and the ledger of every sampled token.

A trajectory is one root-to-leaf chain of live answers, with the tokens exactly as the engine saw them. A sampled token
is trained at home only, that is, after exactly the tokens it was sampled after, and in the first chain that has it.
Where an answer stands elsewhere (a moved echo) its tokens are context.

Invariants, asserted: sampled = trainable + context + discarded; all arrays of a trajectory have one length; every
sampled token has a finite logprob and a version; the mask is on sampled tokens only, and no token is trained twice.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from uniagent.engine.ports import Ids, VersionSpan
from uniagent.engine.trajectory import fates
from uniagent.engine.trajectory.nodes import History, Node, TreePolicy
from uniagent.engine.trajectory.types import ActionSpan, Export, Ledger, Provenance, Trajectory


@frozen(eq=False)
class _Leaf:
    """Where a chain ends: after the first ``kept`` tokens of an answer, in the answer's own place."""

    node: Node
    kept: int


@frozen(eq=False)
class _Piece:
    """A run of a chain: of one provenance, and of one answer where it was sampled."""

    kind: Provenance
    ids: Ids
    action: Node | None = None
    home: bool = False


@frozen(eq=False)
class _Chain:
    leaf: _Leaf
    pieces: list[_Piece]


def build(history: History, policy: TreePolicy) -> Export:
    """Pure: may be asked for at any time, of a tree that lives on."""
    verdicts = fates.judge(history, policy)
    chains = _chains(history, verdicts)
    trained = [0] * len(history.actions)  # of each action, how many of its first tokens
    bodies = [_body(chain, verdicts, policy, trained) for chain in chains]
    weights = sum(bool(t.loss_mask.any()) for t in bodies)
    relations = _relations(history, chains)
    trajectories = tuple(
        evolve(body, kind=kind, parent=parent, weight=1 / weights if body.loss_mask.any() else 0.0)
        for body, (kind, parent) in zip(bodies, relations, strict=True)
    )
    return Export(trajectories, tuple(verdicts), _ledger(history, verdicts, trained))


# ---------------------------------------------------------------- chains


def _chains(history: History, verdicts: list[str]) -> list[_Chain]:
    """One a leaf: depth first, older answers first. The head of a cut stream is a leaf where no chain goes through
    it at home."""
    live = [n for n in history.actions if verdicts[n.order] == fates.LIVE]
    inner: set[int] = set()
    for node in live:
        up = node.above
        while up is not None and up.order not in inner:
            inner.add(up.order)
            up = up.above
    leaves = [_Leaf(n, n.acted.size) for n in live if n.acted.whole and n.order not in inner]
    chains = [_Chain(leaf, _pieces(history, leaf)) for leaf in leaves]
    through = {(p.action.order, len(p.ids)) for c in chains for p in c.pieces if p.action is not None and p.home}
    heads = [_Leaf(n, n.acted.kept) for n in live if not n.acted.whole]
    chains += [_Chain(h, _pieces(history, h)) for h in heads if (h.node.order, h.kept) not in through]
    return sorted(chains, key=lambda c: [n.order for n in c.leaf.node.chain()])


def _pieces(history: History, leaf: _Leaf) -> list[_Piece]:
    out: list[_Piece] = []
    for node in leaf.node.chain():
        start = 0
        for s in node.acted.delta.segments:
            action = history.actions[s.action] if s.action is not None else None
            out.append(_Piece(s.kind, s.ids, action, action is not None and _at_home(action, node, start)))
            start += len(s.ids)
        said = node.sampled.said
        out.append(_Piece(Provenance.SAMPLED, said[: leaf.kept] if node is leaf.node else said, node, home=True))
    return out


def _at_home(action: Node, node: Node, start: int) -> bool:
    """Whether the tokens before position ``start`` of a node's delta are those that an action was sampled after."""
    before = action.acted.delta.ids
    return action.above is node.above and start == len(before) and np.array_equal(node.acted.delta.ids[:start], before)


def _relations(history: History, chains: list[_Chain]) -> list[tuple[str, int | None]]:
    """Kind and parent of each chain: a branch has answers of an earlier chain, in their place or moved."""
    main = fates.main_opening(history) if chains else None
    owner: dict[int, int] = {}  # by action: the first chain it stands in at home
    out: list[tuple[str, int | None]] = []
    for i, chain in enumerate(chains):
        path = chain.leaf.node.chain()
        shared = [owner[n.order] for n in path if n.order in owner]
        shared = shared or [owner[p.action.order] for p in chain.pieces if p.action and p.action.order in owner]
        for node in path:
            owner.setdefault(node.order, i)
        if shared:
            out.append(("branch", shared[-1]))
        elif main is not None and not path[-1].acted.echoes and fates.is_side_call(history, path[-1], main):
            out.append(("side", None))
        else:
            out.append(("main" if fates.opening(chain.leaf.node) == main else "subagent", None))
    return out


# ---------------------------------------------------------------- arrays


def _body(chain: _Chain, verdicts: list[str], policy: TreePolicy, trained: list[int]) -> Trajectory:
    """The arrays of a chain; advances ``trained`` by what its mask takes."""
    pieces = chain.pieces
    total = sum(len(p.ids) for p in pieces)
    mask = np.zeros(total, np.bool_)
    logprobs = np.full(total, np.nan, np.float32)
    versions = np.full(total, -1, np.int32)
    spans, start = [], 0
    for piece in pieces:
        end = start + len(piece.ids)
        if piece.action is not None:
            order, action, n = piece.action.order, piece.action.acted, len(piece.ids)
            sampled = action.sampled
            logprobs[start:end] = sampled.logprobs[:n]
            for v in _clipped(sampled.versions, n):
                versions[start + v.start : start + v.end] = v.version
            allowed = verdicts[order] == fates.LIVE and not (action.tier == "edited" and policy.edited == "context")
            if piece.home and allowed and n > trained[order]:
                mask[start + trained[order] : end] = True
                trained[order] = n
            spans.append(
                ActionSpan(
                    order=order,
                    start=start,
                    end=end,
                    sampling=sampled.sampling,
                    tier=action.tier,
                    home=piece.home,
                    fate=verdicts[order],
                    kept=sampled.kept[:n] if sampled.kept is not None else None,
                    kv_versions=_clipped(sampled.kv_versions, end) if piece.home else (),
                )
            )
        start = end
    kinds = np.array([p.kind for p in pieces], np.uint8)
    provenance: npt.NDArray[np.uint8] = np.repeat(kinds, [len(p.ids) for p in pieces])
    token_ids = np.concatenate([p.ids for p in pieces], dtype=np.int32)
    _check(mask, provenance, logprobs, versions)
    return Trajectory(token_ids, provenance, mask, logprobs, versions, tuple(spans))


def _clipped(spans: tuple[VersionSpan, ...], end: int) -> tuple[VersionSpan, ...]:
    """The spans over [0, end)."""
    return tuple(evolve(s, end=min(s.end, end)) for s in spans if s.start < end)


def _check(
    mask: npt.NDArray[np.bool_],
    provenance: npt.NDArray[np.uint8],
    logprobs: npt.NDArray[np.float32],
    versions: npt.NDArray[np.int32],
) -> None:
    sampled = provenance == Provenance.SAMPLED
    if (mask & ~sampled).any():
        raise AssertionError("the loss mask is on a token that was not sampled")
    if (np.isfinite(logprobs) != sampled).any() or ((versions >= 0) != sampled).any():
        raise AssertionError("sampled tokens, and no others, have a logprob and a version")


def _ledger(history: History, verdicts: list[str], trained: list[int]) -> Ledger:
    sampled = context = 0
    discarded: Counter[str] = Counter()
    for node in history.actions:
        action, fate = node.acted, verdicts[node.order]
        tokens, size = len(action.sampled.token_ids), action.size
        sampled += tokens
        discarded["stop_overrun"] += tokens - size
        if fate == fates.LIVE:
            kept = size if action.whole else action.kept
            context += kept - trained[node.order]
            discarded["undelivered"] += size - kept
        else:
            discarded[fate] += size
    return Ledger(sampled, sum(trained), context, {cause: n for cause, n in sorted(discarded.items()) if n})
