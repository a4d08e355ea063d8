"""Random harnesses in every dialect over several templates and tokenizers, through the whole gateway but its sockets.

After every step: the ledger balances, nothing is trained twice, and what is trained stands after exactly the tokens the
engine was given. At the end the session, rebuilt from its record, is the same.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import trio
from attrs import define, evolve, field
from gateway_kit import Unscripted, codec
from harness_wire import WIRES, Answered, Call, Result, Said, Style
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_demands import FORCED

from tests.codec.talk import CHATML, codec_of, encode, tiny
from tests.codec.test_codec import MOVES, MOVES_TOKENS, OPENS, OPENS_TOKENS
from uniagent.adapters.engines.scripted import Answer, ScriptedEngine
from uniagent.engine.gateway.codec import Codec
from uniagent.engine.gateway.export_json import export_json
from uniagent.engine.gateway.record import replay
from uniagent.engine.gateway.session import GatewaySession, SessionParts, inline
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.messages import Problem
from uniagent.engine.ports import Finish, Ids, Sampling, SessionSampling
from uniagent.engine.registry import load
from uniagent.engine.trajectory import export
from uniagent.engine.trajectory.nodes import TreePolicy
from uniagent.engine.trajectory.types import Export

CODECS = {
    "tools and reasoning": codec,
    "chatml": lambda: codec_of(CHATML),
    "tiny": tiny,
    "openers": lambda: codec_of(OPENS, OPENS_TOKENS),
    "re-render": lambda: codec_of(MOVES, MOVES_TOKENS),
}
CALL = '<tool_call>\n{"name": "run", "arguments": {"cmd": "CMD", "n": 1}}\n</tool_call>'
SAID = ["Let me look. \n", "All is done.", "über 🌸 ", "<think>\nso it is\n</think>\n\nYes, that is so.", ""]
POLICIES = st.builds(TreePolicy, st.sampled_from(["split", "discard"]), edited=st.sampled_from(["train", "context"]))
STEPS = ("go_on",) * 5 + ("retry", "drop", "replace", "rewind", "compact", "lose", "cut_tools", "demand", "edit")


@define(eq=False)
class Talk:
    """One harness, its session and the engine behind it."""

    rng: Any
    dialect: str
    codec: Codec
    policy: TreePolicy
    items: list[Any] = field(factory=lambda: [Said("You work in a directory.", "system"), Said("make the file")])
    tools: tuple[str, ...] = ("run",)
    prompts: list[Ids] = field(factory=list)
    answers: list[Answer] = field(factory=list)
    delivered: list[bool] = field(factory=list)
    met: Counter[str] = field(factory=Counter)

    def open(self, respond: Any) -> GatewaySession:
        engine = Unscripted if self.codec.strategy.shape.calls else ScriptedEngine
        gateway = Gateway(SessionParts(self.codec, engine(respond), inline), self.policy, secret=b"secret")
        return gateway.open("s", SessionSampling())

    def respond(self, prompt: Ids, sampling: Sampling, session: str) -> Answer:
        rng = self.rng
        self.prompts.append(prompt.copy())
        text = rng.choice(SAID)
        for _ in range(rng.choice([0, 1, 1, 2])):
            text += CALL.replace("CMD", rng.choice(["ls", "cat é", "echo"])) if rng.random() < 0.9 else CALL[:50]
        ids = encode(self.codec, text)
        if rng.random() < 0.1:  # it babbles
            babble = [rng.randrange(self.codec.vocab_size) for _ in range(8)]
            ids = np.array([i for i in babble if i not in self.codec.stop_ids], np.int32)
        if rng.random() < 0.1 and len(ids):
            self.answers.append(Answer(ids, finish=Finish.LENGTH))
        else:
            self.answers.append(Answer(np.append(ids, np.int32(self.codec.stop_ids[0]))))
        return self.answers[-1]

    async def run(self, steps: int) -> None:
        wire, dialect = WIRES[self.dialect], load("dialects", self.dialect)()
        session, memo = self.open(self.respond), dialect.memo()
        for _ in range(steps):
            step = self.rng.choice(STEPS)
            options = FORCED[self.dialect] if step == "demand" and self.codec.strategy.shape.calls else {}
            style = Style(*(self.rng.random() < 0.3 for _ in range(3)), self.rng.choice(["kept", "trimmed", "dropped"]))
            body = json.loads(json.dumps(wire.body(self.items, self.tools, style, **options)))
            call = dialect.parse(body, memo)
            try:
                replies = await session.complete(call)
            except Problem as problem:
                if problem.status != 400:
                    raise
                self.met["refused"] += 1
                self.items = self.items[:2]
                continue
            dialect.sent(call, replies, memo)
            self.delivered.append(step != "lose")
            if step != "lose":
                session.delivered(replies)
            self.met[step] += 1
            self.next(step, wire.read(json.loads(json.dumps(dialect.reply(call, replies)))))
            self.check(export.build(session.tree.history, self.policy))
        done = await session.finish(1.0)
        self.check(done)
        if self.met["refused"] == 0:
            assert export_json(await self.rebuilt(session.turns), 1.0) == export_json(done, 1.0)

    def next(self, step: str, answer: Answered) -> None:
        """What the harness makes of an answer."""
        more: list[Any] = [Result(c.id, f"result of {c.arguments}") for c in answer.calls] or [Said("go on")]
        if step in ("retry", "lose"):
            return
        if step == "drop":
            self.items.append(Said(f"no, do it otherwise {len(self.items)}"))
        elif step == "replace":
            self.items += [Answered(f"words of my own {len(self.items)}"), Said("and so on")]
        elif step == "rewind":
            self.items = [*self.items[: max(2, len(self.items) // 2)], Said(f"from here again {len(self.items)}")]
        elif step == "compact":
            self.items = [*self.items[:1], Said(f"Summary {len(self.items)}"), answer, *more]
        elif step == "edit" and answer.calls:
            calls = tuple(
                Call(c.id, c.name, json.dumps(dict(reversed(json.loads(c.arguments).items()))))
                if c.arguments.endswith("}") and c.arguments.startswith('{"')
                else c
                for c in answer.calls
            )
            self.items += [evolve(answer, text=answer.text.strip(), calls=calls), *more]
        else:
            if step == "cut_tools":
                self.tools = self.rng.choice([("run",), ("run", "walk")])
            self.items += [answer, *self.rng.sample(more, len(more))]

    def check(self, out: Export) -> None:
        ledger, trained = out.ledger, Counter[tuple[int, int]]()
        assert ledger.sampled == sum(len(a.token_ids) for a in self.answers)
        assert ledger.sampled == ledger.trainable + ledger.context + sum(ledger.discarded.values())
        for t in out.trajectories:
            for a in t.actions:
                said = self.answers[a.order].token_ids
                assert t.token_ids[a.start : a.end].tolist() == said[: a.end - a.start].tolist()
                at_home = np.array_equal(t.token_ids[: a.start], self.prompts[a.order])
                assert at_home or not t.loss_mask[a.start : a.end].any()
                assert at_home or not a.home
                trained.update((a.order, int(n)) for n in np.flatnonzero(t.loss_mask[a.start : a.end]))
            spans = sum(a.end - a.start for a in t.actions)
            assert spans == int((t.provenance == 2).sum()), "every sampled token is some action's"
        assert set(trained.values()) <= {1}
        assert len(trained) == ledger.trainable

    async def rebuilt(self, turns: Any) -> Export:
        answers = iter(self.answers)
        session = self.open(lambda *_: next(answers))
        dialect = load("dialects", self.dialect)()
        for request, delivered in zip(replay(json.loads(json.dumps(turns))), self.delivered, strict=True):
            replies = await session.complete(dialect.parse(request))
            if delivered:
                session.delivered(replies)
        return await session.finish(1.0)


@pytest.mark.parametrize("dialect", WIRES)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    rng=st.randoms(use_true_random=False), name=st.sampled_from(list(CODECS)), policy=POLICIES, steps=st.integers(1, 9)
)
def test_random_talks(dialect: str, rng: Any, name: str, policy: TreePolicy, steps: int) -> None:
    trio.run(Talk(rng, dialect, CODECS[name](), policy).run, steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_many_random_talks(name: str) -> None:
    met: Counter[str] = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        talk = Talk(rng, rng.choice(list(WIRES)), CODECS[name](), TreePolicy(rng.choice(["split", "discard"])))
        trio.run(talk.run, 25)
        met.update(talk.met)
    unheard = {"demand"} if name == "re-render" else set()  # its template has no words that begin a call
    assert met.keys() == {*STEPS, *(("refused",) if unheard else ())} - unheard
