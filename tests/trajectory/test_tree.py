"""The tree's contract with the gateway and the learner, beyond what becomes of answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from harness_kit import BAD, LS, RUN, SYS, USER, Answer, Harness, alter, check, result, tools

from uniagent.engine.messages import Message, ModelCall
from uniagent.engine.ports import Sampling, VersionSpan
from uniagent.engine.trajectory.tree import TurnTree
from uniagent.engine.trajectory.types import Provenance, Sampled, Segment

NOTHING: dict[str, Any] = {"answer": None, "reply": None, "started": 0.0, "ended": 0.0}


def sampled(n: int = 3, **changes: Any) -> Sampled:
    given: dict[str, Any] = {
        "token_ids": np.arange(n, dtype=np.int32) + 1_000_000,
        "logprobs": -np.ones(n, np.float32),
        "versions": (VersionSpan(0, 0, n),),
        "kv_versions": (),
        "finish": "stop",
        "sampling": Sampling(8),
    }
    return Sampled(**given | changes)


def content(*ids: int) -> Segment:
    return Segment(Provenance.CONTENT, np.array(ids, np.int32))


# ---------------------------------------------------------------- places


def test_a_fresh_request_is_pending_from_its_first_message() -> None:
    place = TurnTree().locate(ModelCall((SYS, USER), RUN), 0.0)
    assert [p.message for p in place.pending] == [SYS, USER]
    assert place.anchor is None
    assert place.known_delta is None
    assert place.prefix().tolist() == []


def test_after_an_answer_only_what_follows_it_is_pending() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "go", LS)
    place = h.tree.locate(ModelCall((SYS, USER, a.message, result(a), USER), RUN), 9.0)
    assert [p.message.role for p in place.pending] == ["tool", "user"]
    assert place.anchor is a
    assert [e.tier for e in place.echoes] == ["verbatim"]
    assert place.prefix().tolist() == [*h.prompts[0], *a.sampled.said.tolist()]


def test_known_context_is_pending_with_what_is_new() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "go", LS)
    h.ask([SYS, USER, a.message, result(a)], "bad", BAD)
    place = h.tree.locate(ModelCall((SYS, USER, a.message, result(a), Message("user", "error")), RUN), 9.0)
    assert [p.message.text for p in place.pending] == ["ok", "error"]
    assert place.anchor is a


def test_the_same_request_again_needs_no_encoding() -> None:
    h = Harness()
    h.ask([SYS, USER], "one")
    place = h.tree.locate(ModelCall((SYS, alter(USER, text=USER.text + " \n")), RUN), 9.0)
    assert place.known_delta is h.tree.history.actions[0].acted.delta.segments
    assert h.tree.locate(ModelCall((SYS,), RUN), 9.0).known_delta is None


def test_a_request_may_end_with_an_answer() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "go", finish="length")
    place = h.tree.locate(ModelCall((SYS, USER, a.message), RUN), 9.0)
    assert (place.node, place.anchor, place.pending) == (a, a, ())
    b = h.ask([SYS, USER, a.message], "on")
    assert b.parent is a
    assert h.start([SYS, USER, a.message]).place.known_delta is not None
    assert h.fates() == ["live", "live"]
    check(h)


def test_the_tool_list_belongs_to_the_conversation() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "go", LS)
    turn = (SYS, USER, a.message, result(a))
    marked = tuple({**t, "cache_control": {"type": "ephemeral"}} for t in RUN)
    assert h.tree.locate(ModelCall(turn, marked), 9.0).anchor is a
    other = h.tree.locate(ModelCall(turn, tools("run", "look")), 9.0)
    assert other.anchor is None
    assert [p.moved for p in other.pending] == [None, None, (a, 3), None]


def test_requests_without_messages_are_harmless() -> None:
    h = Harness()
    h.ask([], "hello")
    h.ask([], "again", tools=())
    assert h.fates() == ["live", "live"]
    assert [len(r.path()) for r in h.tree.history.actions] == [2, 2]


def test_lone_surrogates_pass_through() -> None:
    h = Harness()
    odd = Message("user", "\ud83d")
    a = h.ask([odd], "\udc00", (("run", '{"a": "\ud83d"}'),))
    h.ask([odd, alter(a.message, text="\udc00 "), result(a, "\udfff")], "done")
    assert h.fates() == ["live", "live"]
    check(h)


# ---------------------------------------------------------------- tokens that do not fit


@pytest.mark.parametrize(
    "broken",
    [
        {"logprobs": np.ones(2, np.float32)},
        {"logprobs": np.array([-1, np.nan, -1], np.float32)},
        {"logprobs": np.array([-1, -np.inf, -1], np.float32)},
        {"versions": ()},
        {"versions": (VersionSpan(0, 0, 2),)},
        {"versions": (VersionSpan(0, 0, 1), VersionSpan(1, 2, 3))},
        {"versions": (VersionSpan(-1, 0, 3),)},
        {"kept": (None,)},
        {"text_ends": np.zeros(2, np.int32)},
        {"used": 4},
    ],
    ids=str,
)
def test_misaligned_tokens_are_refused_and_change_nothing(broken: dict[str, Any]) -> None:
    tree = TurnTree()
    place = tree.locate(ModelCall((SYS,)), 0.0)
    with pytest.raises(AssertionError):
        tree.commit(
            place, delta=(content(1),), **NOTHING | {"answer": sampled(**broken), "reply": Message("assistant")}
        )
    assert len(tree.history.nodes) == 1
    assert not tree.history.requests


def test_a_moved_echo_must_be_what_was_sampled() -> None:
    tree = TurnTree()
    said = {**NOTHING, "answer": sampled(), "reply": Message("assistant", "x")}
    tree.commit(tree.locate(ModelCall((SYS,)), 0.0), delta=(content(1),), **said)
    place = tree.locate(ModelCall((USER, Message("assistant", "x"))), 1.0)
    right = Segment(Provenance.SAMPLED, sampled().token_ids, 0)
    for wrong in (Segment(Provenance.SAMPLED, right.ids), evolve(right, ids=right.ids[::-1])):
        with pytest.raises(AssertionError):
            tree.commit(place, delta=(content(1), wrong), **NOTHING)
    tree.commit(place, delta=(content(1), right), **NOTHING)


# ---------------------------------------------------------------- the end


def test_export_once() -> None:
    h = Harness()
    h.ask([SYS, USER], "go")
    asked = h.start([SYS, USER])
    h.tree.export()
    with pytest.raises(RuntimeError, match="exported already"):
        h.tree.export()
    with pytest.raises(RuntimeError, match="nothing can be committed"):
        h.finish(asked, Answer("late"))


def test_a_session_without_answers_exports_nothing() -> None:
    h = Harness()
    h.finish(h.start([SYS, USER]), None)
    out = h.tree.export()
    assert (out.trajectories, out.fates, out.ledger.sampled) == ((), (), 0)
    assert TurnTree().export().trajectories == ()


def test_kept_sets_and_kv_spans_go_with_their_tokens() -> None:
    tree = TurnTree()
    kept = (None, np.array([1, 2], np.int32), None)
    answer = sampled(kept=kept, kv_versions=(VersionSpan(4, 0, 2), VersionSpan(5, 2, 5)), used=2, closed=False)
    place = tree.locate(ModelCall((SYS,)), 0.0)
    node = tree.commit(
        place, delta=(content(1, 2),), **NOTHING | {"answer": answer, "reply": Message("assistant", "x")}
    )
    tree.mark_delivered(node)
    end = Segment(Provenance.REPAIR, np.array([6], np.int32))
    moved = Segment(Provenance.SAMPLED, answer.said, 0)
    call = ModelCall((USER, Message("assistant", "x"), USER))
    last = {**NOTHING, "answer": sampled(), "reply": Message("assistant", "y")}
    tree.mark_delivered(tree.commit(tree.locate(call, 1.0), delta=(content(3), moved, end), **last))
    out = tree.export()
    home, away = out.trajectories[0].actions[0], out.trajectories[1].actions[0]
    assert (home.kept, away.kept) == (kept[:2], kept[:2])
    assert home.kv_versions == (VersionSpan(4, 0, 2), VersionSpan(5, 2, 4))
    assert away.kv_versions == ()
    assert dict(out.ledger.discarded) == {"stop_overrun": 1}


def test_records_say_what_happened_whatever_its_fate() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "go ", LS, reasoning="hm")
    h.ask(
        [SYS, USER, alter(a.message, text="go", reasoning=""), result(a)], "x", BAD, delivered=False, problem="no end"
    )
    first, second = h.tree.records()
    assert (first.order, first.tier, first.differences, first.messages) == (0, "normalised", ("text", "reasoning"), 2)
    assert (second.tier, second.delivered, second.parse_problem, second.messages) == (None, False, "no end", 4)
    assert (first.tokens, first.started, first.ended) == (4, 1.0, 2.0)


def test_importing_the_tree_loads_no_tensor_library() -> None:
    import subprocess
    import sys

    code = "import sys, uniagent.engine.trajectory.tree; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
