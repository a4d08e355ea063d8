"""Random sessions: a harness that does, in any order, all that harnesses were seen to do, and worse."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from harness_kit import BAD, LS, RUN, SYS, USER, Answer, Asked, Harness, alter, check, found_again, result, tools

from uniagent.engine.messages import Call, Message
from uniagent.engine.trajectory.tree import Node, TreePolicy
from uniagent.engine.trajectory.types import Export, Provenance

WORDS = ("a", "b", "ok", "the file is there")


WHOLE = -1


class Talk:
    """One conversation of the harness, as it holds it."""

    def __init__(self, messages: list[Message], offered: tuple[Any, ...] = RUN) -> None:
        self.messages, self.tools = messages, offered


class Session:
    """``rng`` has the methods of random.Random. Every step ends with the invariants when ``checked``."""

    def __init__(self, rng: Any, policy: TreePolicy, checked: bool = True) -> None:
        self.rng, self.h, self.checked = rng, Harness(policy), checked
        self.talks = [Talk([SYS, USER])]
        self.open: list[Asked] = []  # requests that the engine takes long to answer
        self.held: dict[int, tuple[Message, Node | None, int]] = {}  # assistant messages, as what the harness means

    def run(self, steps: int) -> Harness:
        moves: list[Callable[[Talk], None]] = [self.turn] * 9 + [
            self.retry, self.overlap, self.refused_request, self.broken, self.cut, self.one_off, self.rewind,
            self.compact, self.trim, self.change_tools, self.subagent, self.title, self.forget, self.bigger,
            self.guard, self.wander,
        ]  # fmt: skip
        for _ in range(steps):
            self.rng.choice(moves)(self.rng.choice(self.talks))
            if self.open and self.rng.random() < 0.3:
                self.settle()
            if self.checked:
                check(self.h)
        while self.open:
            self.settle()
        return self.h

    # ---- parts

    def say(self) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(1, 3)))

    def answer(self) -> Answer:
        calls = self.rng.choice([(), LS, LS, (*LS, ("run", '{"n": 1.0, "cmd": "cat"}')), BAD])
        return Answer(
            text=self.say() if self.rng.random() < 0.8 or not calls else "",
            calls=calls,
            reasoning=self.rng.choice(["", "hm so"]),
            ids=self.rng.random() < 0.7,
            finish=self.rng.choice(["stop"] * 5 + ["length"]),
            overrun=self.rng.choice([0] * 9 + [2]),
            problem="bad call" if calls == BAD else None,
        )

    def ask(self, talk: Talk, answer: Answer | None = None, delivered: bool = True) -> Node:
        return self.end(self.start(talk), answer or self.answer(), delivered)

    def start(self, talk: Talk) -> Asked:
        asked = self.h.start(talk.messages, talk.tools, apart=self.rng.random() < 0.04)
        if self.checked:
            self.stands_as_meant(asked)
        return asked

    def hold(self, message: Message, node: Node | None, kept: int = WHOLE) -> Message:
        """The harness means this action by a message, or the first ``kept`` tokens of it, or (None) nothing we said."""
        self.held[id(message)] = message, node, kept
        return message

    def stands_as_meant(self, asked: Asked) -> None:
        """Every assistant message of a request stands in the tree as what the harness means by it."""
        place = asked.place
        stands = [(n, n.acted.size) if n.action else n.moved for n in place.node.path()[1:]]
        stands += [p.moved for p in place.fresh if p.message.role != "tools"]
        for message, found in zip(place.call.messages, stands, strict=True):
            if id(message) not in self.held:
                continue
            _, meant, kept = self.held[id(message)]
            if meant is None:
                assert found is None, "what the harness wrote is content"
            elif kept != WHOLE:
                assert found in (None, (meant, kept)), "the head of a cut stream"
            elif any(c.name == "invalid" and c.id == "mine" for c in message.calls):
                assert found is None or found[1] == found[0].acted.size, "repaired under another id: it or a twin"
            elif any(c.id for c in message.calls):
                assert found == (meant, meant.acted.size), "by its id, it is that action"
            elif meant.message.calls and not message.calls:
                assert found is None or found[0] is meant or not any(c.id for c in found[0].message.calls), (
                    "written out"
                )
            else:
                assert found is not None, "what we sampled stays what we sampled"
                assert found[1] == found[0].acted.size

    def end(self, asked: Asked, answer: Answer | None, delivered: bool = True) -> Node:
        node = self.h.finish(asked, answer, delivered)
        if self.checked:
            found_again(self.h, asked, node)
        return node

    def go_on(self, talk: Talk, node: Node, back: Message | None) -> None:
        """The harness holds an answer as ``back`` and adds what it has to say to it."""
        if back is not None and id(back) not in self.held:
            self.hold(back, node)
        more = [result(node, self.say(), k) for k in range(len(node.message.calls))] if back and back.calls else []
        talk.messages = [*talk.messages, *([back] if back else []), *(more or [Message("user", self.say())])]

    def echo(self, node: Node) -> Message | None:
        """How the harness holds an answer: mostly as it was sent."""
        m, rng = node.message, self.rng
        bad = any(c.value is None for c in m.calls)
        how = rng.choice(["same"] * 6 + ["trim", "bare", "object", "repair", "text", "replace", "drop"])
        if how == "trim":
            return alter(m, text=m.text + " \n", reasoning="")
        if how == "bare":
            return alter(m, calls=tuple(alter(c, id=None) for c in m.calls))
        if how == "object" and not bad:
            return alter(m, calls=tuple(alter(c, arguments=dict(reversed((c.value or {}).items()))) for c in m.calls))
        named = all(c.id for c in m.calls)
        if how == "repair" and bad and named:
            self.h.met("repaired", node)
            other = {"id": "mine"} if rng.random() < 0.5 else {}
            back = [alter(c, name="invalid", arguments={"raw": c.arguments}, **other) for c in m.calls]
            return alter(m, calls=tuple(back))
        if how == "text" and m.calls and named:
            self.h.met("written out", node)
            called = " ".join(f"{c.id} {c.name} {c.arguments if bad else json.dumps(c.value)}" for c in m.calls)
            return Message("assistant", f"{m.text} {called}")
        if how == "replace":
            self.h.met("replaced", node)
            return self.hold(Message("assistant", "by hand " + self.say()), None)
        if how == "drop":
            self.h.met("refused" if bad else "dropped", node)
            return None
        return m

    # ---- moves

    def turn(self, talk: Talk) -> None:
        node = self.ask(talk)
        if len(node.message.calls) > 1:
            self.h.met("parallel", node)
        self.go_on(talk, node, self.echo(node))

    def retry(self, talk: Talk) -> None:
        first, second = self.ask(talk), self.ask(talk)
        self.h.met("retried", first)
        self.go_on(talk, second, second.message)

    def overlap(self, talk: Talk) -> None:
        first, second = self.start(talk), self.start(talk)
        nodes = [self.end(second, self.answer())]
        third = self.start(talk)  # beside the first only
        nodes += [self.end(first, self.answer()), self.end(third, self.answer())]
        self.h.met("overlapping", *nodes)
        self.go_on(talk, node := self.rng.choice(nodes), node.message)

    def refused_request(self, talk: Talk) -> None:
        self.end(self.start(talk), None)

    def broken(self, talk: Talk) -> None:
        """The connection breaks before the last byte; the gateway may notice late."""
        if self.rng.random() < 0.5:
            lost = self.ask(talk, delivered=False)
            again = self.ask(talk)
        else:
            first, second = (self.start(talk) for _ in range(2))
            lost = self.end(first, self.answer(), delivered=False)
            again = self.end(second, self.answer())
        self.h.met("undelivered", lost)
        self.go_on(talk, again, again.message)

    def cut(self, talk: Talk) -> None:
        """A cut stream is taken for the end."""
        one = f"one{self.h.serial}"
        calls = self.rng.choice([(), LS, (*LS, ("run", '{"cmd": "pwd"}'))])
        node = self.ask(talk, Answer(f"{one} two three", calls), delivered=False)
        self.h.met("cut", node)
        if len(calls) > 1 and self.rng.random() < 0.5:
            self.h.met("cut between calls", node)
            first = node.message.calls[:1]
            head = self.hold(Message("assistant", node.message.text, first), node, 4)
            after = Message("tool", self.say(), answers=first[0].id)
        else:
            kept = self.rng.choice([one, f"{one} two", f"{one} two "])
            head = self.hold(Message("assistant", kept), node, len(kept.split()))
            after = Message("user", self.say())
        talk.messages = [*talk.messages, head, after]

    def one_off(self, talk: Talk) -> None:
        """An answer is left out of one request and comes back in the next."""
        node = self.ask(talk)
        self.ask(Talk([*talk.messages, Message("user", "is this a new topic?")], talk.tools))
        self.h.met("left out and back", node)
        self.go_on(talk, node, node.message)
        self.ask(talk)

    def rewind(self, talk: Talk) -> None:
        at = [i for i, m in enumerate(talk.messages) if m.role == "assistant"]
        if len(at) > 1:
            self.h.met("rewound")
            talk.messages = [*talk.messages[: self.rng.choice(at[:-1])], Message("user", "no, " + self.say())]

    def compact(self, talk: Talk) -> None:
        """The history gives way to a summary, some of its end is kept; or the last answer alone gives way."""
        text = f"summary number {self.h.serial} of all that was done"
        self.h.met("compacted")
        if self.rng.random() < 0.3:
            self.ask(talk)
            self.ask(Talk([Message("system", "you summarise"), Message("user", "transcript")], ()), Answer(text))
            talk.messages = [*talk.messages, Message("user", "so far: " + text)]
        else:
            asked = [*talk.messages, Message("user", "summarise")]
            self.ask(Talk(asked, self.rng.choice([(), talk.tools])), Answer(text))
            k = self.rng.randint(1, len(talk.messages))
            talk.messages = [*talk.messages[:1], Message("user", "so far: " + text), *talk.messages[k:]]

    def trim(self, talk: Talk) -> None:
        at = [i for i, m in enumerate(talk.messages) if m.role == "tool"]
        if at:
            self.h.met("trimmed")
            k = self.rng.choice(at)
            talk.messages = [*talk.messages[:k], alter(talk.messages[k], text="trimmed"), *talk.messages[k + 1 :]]

    def change_tools(self, talk: Talk) -> None:
        self.h.met("tools changed")
        talk.tools = self.rng.choice([RUN, tools("run", "look")])

    def subagent(self, talk: Talk) -> None:
        if len(self.talks) < 4:
            pair = [Talk([Message("system", f"you help {self.say()}"), USER], tools("run", f"t{i}")) for i in range(2)]
            started = [self.start(t) for t in pair]
            for t, s in zip(pair, started, strict=True):
                node = self.end(s, Answer("on it", LS))
                self.h.met("subagents", node)
                self.go_on(t, node, node.message)
            self.talks += pair

    def title(self, talk: Talk) -> None:
        text = f"a title of this thing, number {self.h.serial}"
        node = self.ask(Talk([Message("system", "you write titles"), USER], ()), Answer(text))
        self.h.met("side call", node)

    def forget(self, talk: Talk) -> None:
        """Any message is lost."""
        if len(talk.messages) > 2:
            k = self.rng.randrange(len(talk.messages))
            talk.messages = [m for i, m in enumerate(talk.messages) if i != k]

    def bigger(self, talk: Talk) -> None:
        """A truncated call is asked for again with more room, then repaired and run."""
        first = self.ask(talk, Answer("go", BAD, finish="length", problem="bad call"))
        second = self.ask(talk, Answer("go", BAD, finish="length", problem="bad call"))
        self.h.met("bigger", first)
        fixed = tuple(alter(c, arguments={"cmd": "l"}) for c in second.message.calls)
        self.go_on(talk, second, alter(second.message, calls=fixed))

    def wander(self, talk: Talk) -> None:
        """A request whose answer comes much later; it may hold what another request holds, or answers."""
        known = [Message("assistant", WORDS[0]), *(n.message for n in self.h.tree.history.actions[-3:])]
        extra = [self.rng.choice(known), Message("user", self.say())] if self.rng.random() < 0.5 else []
        self.open.append(self.h.start([*talk.messages, *extra], talk.tools))

    def settle(self) -> None:
        asked = self.open.pop(self.rng.randrange(len(self.open)))
        self.end(asked, self.rng.choice([None, Answer("late"), self.answer()]), self.rng.random() < 0.7)

    def guard(self, talk: Talk) -> None:
        node = self.ask(talk, Answer("go", (("run", '{"cmd": "rm -r /"}'),)))
        self.h.met("guarded", node)
        safe = tuple(Call(c.id, c.name, {"cmd": "true"}) for c in node.message.calls)
        self.go_on(talk, node, self.hold(alter(node.message, calls=safe), None))


def rows(h: Harness, out: Export) -> set[str]:
    """The situations whose expected outcome this session really shows."""
    fates = {row: {out.fates[o] for o in orders} for row, orders in h.rows.items()}
    tiers = {r.tier for r in h.tree.records()}
    edited = {r.order for r in h.tree.records() if r.tier == "edited"}
    found = {f"echoed {tier}" for tier in tiers if tier}
    for row in ("replaced", "dropped", "refused", "retried", "undelivered"):
        found |= {row} & fates.get(row, set())
    for row in ("left out and back", "overlapping", "subagents", "parallel"):
        found |= {row} if "live" in fates.get(row, ()) else set()
    for row in ("repaired", "written out"):
        found |= {row} if edited & set(h.rows.get(row, ())) else set()
    if "replaced" in fates.get("guarded", ()):
        found.add("guarded")
    if fates.get("bigger", set()) & {"retried", "refused"}:
        found.add("bigger")
    if "side_call" in fates.get("side call", ()):
        found.add("side call")
    if "rewound" in h.rows:
        found |= {"rewound"} & set(out.fates) | (
            {"split"} if any(t.kind == "branch" for t in out.trajectories) else set()
        )
    moved = any(not s.home for t in out.trajectories for s in t.actions)
    found |= {row for row in ("compacted", "trimmed", "tools changed") if row in h.rows and moved}
    for row in ("cut", "cut between calls"):
        cut = [h.tree.history.actions[o].acted for o in h.rows.get(row, ())]
        found |= {row} if any(a.echoes and not a.whole for a in cut) else set()
    if any((t.provenance == Provenance.REPAIR).any() for t in out.trajectories):
        found.add("repair")
    return found


ROWS = (
    "echoed verbatim", "echoed normalised", "echoed edited", "repaired", "written out", "replaced", "dropped",
    "refused", "guarded", "left out and back", "undelivered", "cut", "cut between calls", "retried", "overlapping",
    "split", "rewound", "compacted", "trimmed", "tools changed", "bigger", "parallel", "subagents", "side call",
    "repair",
)  # fmt: skip
