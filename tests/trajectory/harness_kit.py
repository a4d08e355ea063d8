"""A scripted harness with a codec of one token a word, and what must hold of any session it had.

Content words are numbers below 1,000,000; every sampled token is a number of its own above, so that each can be
followed wherever it turns up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from attrs import define, evolve, field, frozen

from uniagent.engine.messages import Call, Message, ModelCall
from uniagent.engine.ports import Sampling, VersionSpan
from uniagent.engine.trajectory import export
from uniagent.engine.trajectory.tree import Node, Pending, Place, TreePolicy, TurnTree
from uniagent.engine.trajectory.types import Export, Provenance, Sampled, Segment

ROLES = {"tools": 1, "system": 2, "user": 3, "assistant": 4, "tool": 5}
END = 6
FIRST_SAMPLED = 1_000_000
SYS, USER = Message("system", "be brief"), Message("user", "make the file")
LS = (("run", '{"cmd": "ls"}'),)
BAD = (("run", '{"cmd": "l'),)


def tools(*names: str) -> tuple[dict[str, Any], ...]:
    return tuple({"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in names)


RUN = tools("run")


@frozen
class Answer:
    """What the model will say."""

    text: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reasoning: str = ""
    ids: bool = True  # the calls get ids
    finish: str = "stop"
    overrun: int = 0  # tokens past a stop string
    problem: str | None = None


@frozen(eq=False)
class Asked:
    """A request on its way: where it stands, what the engine is given."""

    place: Place
    delta: tuple[Segment, ...]
    prompt: tuple[int, ...]
    at: float
    event: int


@define(eq=False)
class Harness:
    """A harness, its gateway and the engine, on a counting clock. ``events`` is what happened, for replaying it."""

    policy: TreePolicy = field(factory=TreePolicy)
    now: float = 0.0
    tick: float = 1.0  # 0: the clock stands still
    words: dict[str, int] = field(factory=dict)
    serial: int = 0
    sampled: int = 0
    prompts: dict[int, tuple[int, ...]] = field(factory=dict)  # by order
    events: list[Callable[[Any], None]] = field(factory=list)
    rows: dict[str, list[int]] = field(factory=dict)  # the situations met, by name: the actions in question
    tree: TurnTree = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tree = TurnTree(self.policy)

    # ---- the codec

    def encode(self, text: str) -> list[int]:
        return [self.words.setdefault(w, 100 + len(self.words)) for w in text.split()]

    def delta(self, call: ModelCall, pending: Iterable[Pending], anchor: Node | None) -> tuple[Segment, ...]:
        out: list[Segment] = []

        def add(kind: Provenance, ids: Iterable[int], action: int | None = None) -> None:
            out.append(Segment(kind, np.array(list(ids), np.int32), action))

        if anchor is None:
            add(Provenance.TEMPLATE, [ROLES["tools"]])
            add(Provenance.CONTENT, self.encode(" ".join(sorted(call.tool_names))))
        elif not anchor.sampled.closed:
            add(Provenance.REPAIR, [END])
        for p in pending:
            add(Provenance.TEMPLATE, [ROLES[p.message.role]])
            if p.moved is None:
                written = [f"{c.name} {c.arguments}" for c in p.message.calls]
                add(Provenance.CONTENT, self.encode(" ".join([p.message.text, *written])))
                add(Provenance.TEMPLATE, [END])
            else:
                action, n = p.moved
                add(Provenance.SAMPLED, action.sampled.said[:n], action.order)
                if n < len(action.sampled.said) or not action.sampled.closed:
                    add(Provenance.REPAIR, [END])
        add(Provenance.TEMPLATE, [ROLES["assistant"]])
        return tuple(out)

    def sample(self, answer: Answer) -> tuple[Sampled, Message]:
        """The answer as tokens, and as it is sent."""
        self.serial += 1
        made = tuple(Call(f"c{self.serial}_{i}" if answer.ids else None, *c) for i, c in enumerate(answer.calls))
        reply = Message("assistant", answer.text, made, answer.reasoning)
        ends = [0] * len(answer.reasoning.split())
        for word in answer.text.split():
            ends.append(answer.text.index(word, ends[-1] if ends else 0) + len(word))
        call_ends = tuple(len(ends) + n + 1 for n in range(len(made)))
        ends += [len(answer.text)] * (len(made) + (answer.finish == "stop") + answer.overrun)
        n = len(ends)
        ids = np.arange(self.sampled, self.sampled + n, dtype=np.int32) + FIRST_SAMPLED
        self.sampled += n
        middle = n // 2
        spans = tuple(VersionSpan(v, s, e) for v, s, e in ((2, 0, middle), (3, middle, n)) if s < e)
        sampled = Sampled(
            token_ids=ids,
            logprobs=logprobs_of(ids),
            versions=spans,
            kv_versions=(),
            finish=answer.finish,
            sampling=Sampling(64),
            used=n - answer.overrun if answer.overrun else None,
            closed=answer.finish == "stop" and not answer.overrun,
            text_ends=np.array(ends, np.int32),
            call_ends=call_ends,
        )
        return sampled, reply

    # ---- one request

    def start(self, messages: Iterable[Message], tools: tuple[Any, ...] = RUN, apart: bool = False, **kw: Any) -> Asked:
        """A request comes and is given to the engine; ``apart``: as a chain of its own, as its template needs it."""
        call = ModelCall(tuple(messages), tools, **kw)
        self.now += self.tick
        at = self.now
        self.events.append(lambda tree: tree.locate(call, at, apart))
        place = self.tree.locate(call, at)
        place = place.apart() if apart else place
        delta = place.known_delta
        if delta is None:
            delta = self.delta(call, place.pending, place.anchor)
        prompt = tuple(place.prompt(delta).tolist())
        assert prompt[: len(place.prefix())] == tuple(place.prefix().tolist())
        return Asked(place, delta, prompt, at, len(self.events) - 1)

    def finish(self, asked: Asked, answer: Answer | None, delivered: bool = True) -> Node:
        """The engine has answered (None: it had nothing) and the answer is sent."""
        self.now += self.tick
        sampled, reply = self.sample(answer) if answer is not None else (None, None)
        arguments: dict[str, Any] = {
            "delta": asked.delta,
            "answer": sampled,
            "reply": reply,
            "started": asked.at,
            "ended": self.now,
            "parse_problem": answer.problem if answer is not None else None,
        }
        self.events.append(lambda tree: tree.commit(asked.event, **arguments))
        node = self.tree.commit(asked.place, **arguments)
        if answer is not None:
            self.prompts[node.order] = asked.prompt
            if delivered:
                self.deliver(node)
        return node

    def deliver(self, node: Node) -> None:
        order = node.order
        self.events.append(lambda tree: tree.mark_delivered(order))
        self.tree.mark_delivered(node)

    def ask(self, messages: Iterable[Message], text: str = "", calls: tuple[Any, ...] = (), **kw: Any) -> Node:
        """A request and its answer, nothing in between."""
        mine = {k: kw.pop(k) for k in ("reasoning", "ids", "finish", "overrun", "problem") if k in kw}
        delivered = kw.pop("delivered", True)
        return self.finish(self.start(messages, **kw), Answer(text, calls, **mine), delivered)

    def export(self) -> Export:
        """As of now; the tree lives on."""
        return export.build(self.tree.history, self.tree.policy)

    def fates(self) -> list[str]:
        return list(self.export().fates)

    def met(self, row: str, *nodes: Node) -> None:
        self.rows.setdefault(row, []).extend(n.order for n in nodes)


def logprobs_of(ids: Any) -> Any:
    return -(ids % 97 + 1).astype(np.float32) / 100


def result(node: Node, text: str = "ok", i: int = 0) -> Message:
    return Message("tool", text, answers=node.message.calls[i].id)


def alter(message: Message, **changes: Any) -> Message:
    return evolve(message, **changes)


# ---------------------------------------------------------------- what must hold


def check(h: Harness) -> Export:
    """The invariants of any session, at any moment: conservation, prefix, alignment, once, at home; and that every
    token of a live answer is in a chain, and trained unless the policy keeps it as context."""
    out = h.export()
    actions = [n.acted for n in h.tree.history.actions]
    trained: dict[int, int] = {}
    seen: set[int] = set()
    home = {t: (a.order, i) for a in actions for i, t in enumerate(a.sampled.token_ids.tolist())}
    for chain in out.trajectories:
        ids = chain.token_ids.tolist()
        arrays = (chain.provenance, chain.loss_mask, chain.logprobs, chain.versions)
        assert all(len(a) == len(ids) for a in arrays), "alignment"
        assert ids == [t for s in chain_pieces(chain) for t in s], "spans"
        for span in chain.actions:
            assert not span.home or tuple(ids[: span.start]) == h.prompts[span.order], "home"
        for i, token in enumerate(ids):
            is_sampled = chain.provenance[i] == Provenance.SAMPLED
            assert is_sampled == (token >= FIRST_SAMPLED), "provenance"
            assert is_sampled == bool(np.isfinite(chain.logprobs[i])) == bool(chain.versions[i] >= 0), "alignment"
            if is_sampled:
                order, k = home[token]
                span = next(v for v in actions[order].sampled.versions if v.start <= k < v.end)
                assert chain.versions[i] == span.version, "versions"
                seen.add(token)
            if chain.loss_mask[i]:
                order, k = home[token]
                trained[token] = trained.get(token, 0) + 1
                said = actions[order].sampled.token_ids[:k].tolist()
                assert ids[:i] == [*h.prompts[order], *said], "home"
                assert out.fates[order] == "live", "only live answers are trained"
        np.testing.assert_array_equal(
            chain.logprobs[chain.versions >= 0], logprobs_of(chain.token_ids[chain.versions >= 0])
        )
    assert all(n == 1 for n in trained.values()), "once"
    ledger = out.ledger
    assert ledger.sampled == h.sampled == ledger.trainable + ledger.context + sum(ledger.discarded.values())
    assert ledger.trainable == len(trained)
    assert abs(sum(c.weight for c in out.trajectories) - bool(trained)) < 1e-9, "a session weighs 1"
    kept = {a.order: (a.size if a.whole else a.kept) for a in actions if out.fates[a.order] == "live"}
    for order, n in kept.items():
        said = actions[order].sampled.said[:n].tolist()
        assert all(t in seen for t in said), "a live answer is in a chain"
        if h.policy.edited == "train":
            assert all(t in trained for t in said), "a live answer is trained"
    discarded: dict[str, int] = {}
    for a in actions:
        causes = {"stop_overrun": len(a.sampled.token_ids) - a.size}
        causes["undelivered" if a.order in kept else out.fates[a.order]] = a.size - kept.get(a.order, 0)
        for cause, n in causes.items():
            discarded[cause] = discarded.get(cause, 0) + n
    assert dict(ledger.discarded) == {k: n for k, n in discarded.items() if n}, "every discard has its cause"
    for node in h.tree.history.actions:
        prompt = h.prompts[node.order]
        if node.above is not None:  # what was seen and said before stands at the beginning
            up = node.above
            before = (*h.prompts[up.order], *up.sampled.said.tolist())
            assert prompt[: len(before)] == before, "prefix"
    return out


def chain_pieces(chain: Any) -> Iterable[list[int]]:
    """A chain cut at its action spans: those hold the sampled tokens, all of them and nothing else."""
    start = 0
    for span in chain.actions:
        assert not (chain.provenance[start : span.start] == Provenance.SAMPLED).any()
        yield chain.token_ids[start : span.start].tolist()
        assert (chain.provenance[span.start : span.end] == Provenance.SAMPLED).all()
        assert span.home or not chain.loss_mask[span.start : span.end].any()
        yield chain.token_ids[span.start : span.end].tolist()
        start = span.end
    assert not (chain.provenance[start:] == Provenance.SAMPLED).any()
    yield chain.token_ids[start:].tolist()


def found_again(h: Harness, asked: Asked, node: Node) -> None:
    """A request that was committed is found again to its end, from where the last search ended and from the root
    alike, and what the engine saw can be had again."""
    tree, call = h.tree, asked.place.call
    near = tree.locate(call, h.now)
    tips, tree._tips = tree._tips, []
    for n in tree.history.nodes:
        n.memo = None
    far = tree.locate(call, h.now)
    tree._tips = tips
    for place in (near, far):
        assert not place.fresh, "found again"
        assert place.node.depth == len(call.messages) + 1, "to the end"
    assert near.node is far.node, "one path"
    assert len(near.echoes) == len(far.echoes)
    end = node.parent if node.action is not None else node
    if end is far.node:  # else an answer of the meantime was found in place of the same content
        assert not far.echoes, "nothing new"
    if end is far.node and far.known_delta is not None:
        assert tuple(far.prompt(far.known_delta).tolist()) == asked.prompt, "what the engine saw"


class Replay:
    """A tree fed with recorded events: requests are known by the place of their event, answers by their order."""

    def __init__(self, policy: TreePolicy) -> None:
        self.tree = TurnTree(policy)
        self.places: dict[int, Place] = {}
        self.event = -1

    def locate(self, call: ModelCall, at: float, apart: bool) -> None:
        copied = evolve(call, messages=tuple(evolve(m) for m in call.messages))  # equal, but other objects
        place = self.tree.locate(copied, at)
        self.places[self.event] = place.apart() if apart else place

    def commit(self, event: int, **arguments: Any) -> None:
        self.tree.commit(self.places[event], **arguments)

    def mark_delivered(self, order: int) -> None:
        self.tree.mark_delivered(self.tree.history.actions[order])


def replayed(h: Harness) -> Export:
    """The export of a tree rebuilt from what was recorded."""
    replay = Replay(h.policy)
    for replay.event, event in enumerate(h.events):
        event(replay)
    return replay.tree.export()


def same_export(a: Export, b: Export) -> None:
    assert a.fates == b.fates
    assert a.ledger == b.ledger
    assert len(a.trajectories) == len(b.trajectories)
    for x, y in zip(a.trajectories, b.trajectories, strict=True):
        assert (x.kind, x.parent, x.weight, x.echo_tiers) == (y.kind, y.parent, y.weight, y.echo_tiers)
        for name in ("token_ids", "provenance", "loss_mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name))
