"""What a turn costs: work that grows with what is new in it, not with the conversation; counted, not timed."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from attrs import evolve
from harness_kit import LS, RUN, SYS, USER, Harness, alter, result

from uniagent.engine.messages import Message, ModelCall
from uniagent.engine.trajectory import echo, match, tape
from uniagent.engine.trajectory.tree import Node, TurnTree


class Counted:
    """Calls of a function, by where it is looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.calls, fn = 0, getattr(owner, name)

        def counting(*args: object) -> object:
            self.calls += 1
            return fn(*args)

        monkeypatch.setattr(owner, name, counting)


def talk(h: Harness, turns: int, messages: list[Message] | None = None) -> list[Message]:
    """A linear conversation whose calls come back re-serialised, as most clients do it."""
    messages = messages or [SYS, USER]
    for _ in range(turns):
        node = h.ask(messages, "go", LS)
        back = alter(node.message, calls=tuple(alter(c, arguments={"cmd": "ls"}) for c in node.message.calls))
        messages = [*messages, back, result(node)]
    return messages


def test_a_turn_normalises_and_visits_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    keys, options = Counted(monkeypatch, echo, "key"), Counted(monkeypatch, match, "options")
    messages = talk(h, 20)
    per_turn = []
    for _ in range(2):
        keys.calls = options.calls = 0
        messages = talk(h, 20, messages)
        per_turn.append((keys.calls, options.calls))
    assert per_turn[0] == per_turn[1]
    assert per_turn[0][1] <= 20 * 4


def test_the_same_messages_in_other_objects_are_not_normalised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    messages = talk(h, 30)
    h.start(messages)
    h.tree._tips.clear()
    keys = Counted(monkeypatch, echo, "key")
    place = h.tree.locate(ModelCall(tuple(evolve(m) for m in messages), RUN), 0.0)
    assert keys.calls <= 3
    assert place.anchor is h.tree.history.actions[-1]


def test_conversations_side_by_side_do_not_walk_from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    talks = [[Message("system", f"helper {i}"), USER] for i in range(4)]
    talks = [talk(h, 10, t) for t in talks]
    options = Counted(monkeypatch, match, "options")
    talks = [talk(h, 1, t) for t in talks]
    assert options.calls <= 4 * 4


def test_ten_thousand_messages_need_no_recursion() -> None:
    h = Harness()
    shots = [Message("user" if i % 2 else "assistant", f"m{i}") for i in range(10_000)]
    a = h.ask([SYS, *shots, USER], "go", LS)
    messages = talk(h, 30, [SYS, *shots, USER, a.message, result(a)])
    assert len(messages) > 10_000 > sys.getrecursionlimit()
    h.ask([SYS, *messages[2:]], "all of it moved")
    h.tree._tips.clear()
    place = h.tree.locate(ModelCall(tuple(messages), RUN), 0.0)
    assert (place.node.depth, len(place.fresh)) == (len(messages), 1)
    assert [len(t.actions) for t in h.export().trajectories] == [31, 32]


def test_tokens_are_kept_once_whatever_the_branches() -> None:
    h = Harness()
    messages = talk(h, 10)
    for i in range(50):
        node = h.ask([*messages, Message("user", f"way {i}")], "go", LS)
        h.ask([*messages, Message("user", f"way {i}"), node.message, result(node)], "done")
    tapes = {id(n.acted.spoken.tape): n.acted.spoken.tape for n in h.tree.history.actions}
    own = sum(t.size for t in tapes.values())
    written = sum(len(n.acted.delta.ids) + len(n.sampled.said) for n in h.tree.history.actions)
    assert own == written
    assert len(tapes) == 50


def test_a_prefix_is_what_was_said_and_a_copy() -> None:
    h = Harness()
    messages = talk(h, 3)
    place = h.start(messages).place
    prefix = place.prefix()
    prefix[:] = 0
    assert place.prefix().all()
    assert place.prefix().dtype == np.int32
    assert h.tree.locate(ModelCall((SYS, USER), ()), 0.0).prefix().size == 0


def test_a_tape_that_branches_keeps_both_ways() -> None:
    def ids(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    stem = tape.extended(None, ids(*range(300)))
    one, two = tape.extended(stem, ids(1)), tape.extended(stem, ids(2), ids(3))
    three = tape.extended(two, ids(4))
    assert tape.read(one, ids(9)).tolist() == [*range(300), 1, 9]
    assert tape.read(three).tolist() == [*range(300), 2, 3, 4]
    assert one.tape is stem.tape
    assert three.tape is two.tape is not stem.tape


def test_locating_changes_nothing() -> None:
    h = Harness()
    messages = talk(h, 3)

    def state(tree: TurnTree) -> list[tuple[Node, int, int]]:
        return [(n, len(n.answers), sum(map(len, n.context.values()))) for n in tree.history.nodes]

    before = state(h.tree)
    for k in range(len(messages) + 1):
        h.tree.locate(ModelCall((*messages[:k], Message("assistant", "new"), USER), RUN), 0.0)
    assert state(h.tree) == before
    assert len(h.tree.history.requests) == 3
