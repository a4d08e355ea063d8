"""Echo tiers and normal form, message by message."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from harness_kit import BAD, LS, Answer, Harness
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.messages import Call, Message
from uniagent.engine.trajectory.echo import canonical, differences, echo_tier, head, key

RUN = frozenset({"run"})
SENT = Message("assistant", "go  \n", (Call("c1_0", "run", '{"cmd": "ls", "n": 1}'),), "hm")

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("echo", "tier"),
    [
        (SENT, "verbatim"),
        (evolve(SENT, calls=(Call("c1_0", "run", {"cmd": "ls", "n": 1}),)), "verbatim"),
        (evolve(SENT, calls=(Call("c1_0", "run", {"n": 1, "cmd": "ls"}),)), "normalised"),
        (evolve(SENT, reasoning=""), "normalised"),
        (evolve(SENT, reasoning="something else"), "edited"),
        (Message("assistant", "go", (Call("other", "run", '{"n":1.0,"cmd":"ls"}'),)), "normalised"),
        (Message("assistant", "go", (Call("c1_0", "run", {"cmd": "ls", "n": 1, "timeout": 9}),)), "edited"),
        (Message("assistant", "go\nCalling: run c1_0"), "edited"),
        (Message("assistant", "go: run ls 1"), "edited"),
        (Message("assistant", "go: run ls"), None),
        (Message("assistant", "go", (Call("c1_0", "run", '{"cmd": "rm"}'),)), None),
        (Message("assistant", "go", (Call("c1_0", "walk", '{"cmd": "ls", "n": 1}'),)), None),
        (Message("assistant", "go", (Call("c1_0", "run", '{"cmd": "ls'),)), None),
        (Message("assistant", "something else"), None),
        (Message("assistant", "something else", SENT.calls), None),
    ],
)
def test_tiers(echo: Message, tier: str | None) -> None:
    assert echo_tier(SENT, echo, RUN) == tier


@pytest.mark.parametrize("arguments", ['{"cmd": "ls', '["ls"]', "null", "ls"])
@pytest.mark.parametrize(
    "back",
    [
        Call("c1_0", "invalid", '{"error": "bad"}'),
        Call("c1_0", "run", {"__unparsedToolInput": {"raw": "ls"}}),
        Call("new", "run", '{"cmd":"ls"}'),
    ],
)
def test_a_call_that_could_not_run_comes_back_in_any_form(arguments: str, back: Call) -> None:
    sent = Message("assistant", "go", (Call("c1_0", "run", arguments),))
    assert echo_tier(sent, Message("assistant", "go", (back,)), RUN) == "edited"
    known = evolve(sent, calls=(Call("c1_0", "run", "{}"),))
    assert (echo_tier(known, Message("assistant", "go", (back,)), RUN) is None) == (back.name == "invalid")


def test_a_call_of_an_unknown_tool_could_not_run() -> None:
    sent = Message("assistant", "", (Call("a", "walk", "{}"),))
    back = Message("assistant", "", (Call("a", "invalid", "{}"),))
    assert echo_tier(sent, back, RUN) == "edited"
    assert echo_tier(sent, back, frozenset({"walk"})) is None


def test_of_two_calls_the_one_that_could_run_is_kept() -> None:
    good, bad = Call("a", "run", '{"cmd": "ls"}'), Call("b", "run", "{")
    sent = Message("assistant", "", (good, bad))
    assert echo_tier(sent, Message("assistant", "", (good,)), RUN) == "edited"
    assert echo_tier(sent, Message("assistant", "", (evolve(bad, name="invalid"), good)), RUN) == "edited"
    assert echo_tier(sent, Message("assistant", "", (bad,)), RUN) is None
    assert echo_tier(sent, Message("assistant", "", (evolve(good, arguments='{"cmd": "rm"}'), bad)), RUN) is None


def test_duplicate_ids_are_paired_in_order() -> None:
    sent = Message("assistant", "", (Call("a", "run", '{"n": 1}'), Call("a", "run", '{"n": 2}')))
    same = Message("assistant", "", (Call("a", "run", {"n": 1, "x": 0}), Call("a", "run", {"n": 2})))
    other = Message("assistant", "", (Call("a", "run", {"n": 2, "x": 0}), Call("a", "run", {"n": 2})))
    assert echo_tier(sent, same, RUN) == "edited"
    assert echo_tier(sent, other, RUN) is None


@pytest.mark.parametrize("written", ["a\nb'\"", "é \ud83d", "tab\t"])
def test_arguments_written_out_are_found_however_they_are_escaped(written: str) -> None:
    sent = Message("assistant", "", (Call(None, "run", json.dumps({"cmd": [written]})),))
    for form in (written, repr(written), json.dumps(written), json.dumps(written, ensure_ascii=False)):
        assert echo_tier(sent, Message("assistant", f"I called run with {form}"), RUN) == "edited"


def test_only_a_stop_string_that_was_asked_for_may_be_put_back() -> None:
    sent = Message("assistant", "<code>ls\n")
    back = Message("assistant", "<code>ls\n</code>")
    assert echo_tier(sent, back, RUN, ("Observation:", "</code>")) == "edited"
    assert echo_tier(sent, back, RUN) is None


@given(value=st.dictionaries(st.text(), JSON, max_size=4), indent=st.sampled_from([None, 1]), escaped=st.booleans())
def test_arguments_are_compared_as_json_values(value: dict[str, Any], indent: int | None, escaped: bool) -> None:
    turned = dict(reversed(value.items()))
    forms = [value, turned, json.dumps(turned, indent=indent, ensure_ascii=escaped), json.dumps(value)]
    assert len({canonical(f) for f in forms}) == 1
    assert canonical({**value, "and": 1}) != canonical({**value, "and": 2})
    assert canonical({**value, "and": True}) != canonical({**value, "and": 1})


def test_absent_arguments_are_alike() -> None:
    assert len({canonical(v) for v in (None, "", "{}", {}, " {} ")}) == 1


@pytest.mark.parametrize(
    "odd", ["[" * 100_000, "9" * 10_000, "NaN", "1e999", '{"a": "\ud83d"}', "\udfff", '{"a":1,"a":2}', "null"]
)
def test_odd_arguments_break_nothing(odd: str) -> None:
    sent = Message("assistant", odd, (Call("i\ud83d", "run", odd),), odd)
    for back in (sent, evolve(sent, reasoning=""), Message("assistant", odd), Message("assistant", "x", sent.calls)):
        echo_tier(sent, back, RUN)
        hash(key(back))
        differences(sent, back)


def test_the_difference_is_named() -> None:
    back = Message("assistant", "go", (Call("x", "walk", {}),))
    assert differences(SENT, back) == ("text", "reasoning", "ids", "names", "arguments")
    assert differences(SENT, SENT) == ()
    assert differences(SENT, evolve(SENT, calls=())) == ("calls",)


@pytest.mark.parametrize(
    ("kept", "calls", "tokens"),
    [
        ("one", (), 3),
        ("one t", (), 3),  # within a token: not that one
        ("one two ", (), 4),
        ("one two three", (), 0),  # all of it: an echo
        ("one two three", LS, 5),
        ("other", (), 0),
        ("", LS, 0),
    ],
)
def test_the_head_of_a_cut_stream_in_tokens(kept: str, calls: tuple[Any, ...], tokens: int) -> None:
    sampled, sent = Harness().sample(Answer("one two three", calls, "hm so"))
    assert head(sent, sampled, Message("assistant", kept)) == tokens
    assert head(sent, evolve(sampled, text_ends=None), Message("assistant", kept)) == 0
    assert head(sent, sampled, Message("assistant", kept, sent.calls)) == 0 or not calls


@pytest.mark.parametrize(
    ("text", "calls", "tokens"),
    [
        ("one two", 0, 2),
        ("one two", 1, 3),
        ("one two \n", 2, 4),
        ("", 1, 3),  # the text beside the call left out
        ("one two", 3, 0),  # all of it: an echo
        ("", 3, 0),
        ("one", 1, 0),  # the text came before the call
        ("other", 1, 0),
    ],
)
def test_the_head_of_a_stream_cut_between_calls(text: str, calls: int, tokens: int) -> None:
    three = tuple(("run", f'{{"cmd": "{c}"}}') for c in "abc")
    sampled, sent = Harness().sample(Answer("one two", three))
    assert head(sent, sampled, Message("assistant", text, sent.calls[:calls])) == tokens
    written = tuple(Call(None, c.name, c.value) for c in sent.calls[:calls])
    assert head(sent, sampled, Message("assistant", text, written)) == tokens
    if calls:
        other = (*sent.calls[: calls - 1], evolve(sent.calls[calls - 1], arguments='{"cmd": "x"}'))
        assert head(sent, sampled, Message("assistant", text, other)) == 0
        assert head(sent, evolve(sampled, call_ends=()), Message("assistant", text, sent.calls[:calls])) == 0


def test_text_from_behind_a_call_is_kept_only_with_the_call() -> None:
    sampled, sent = Harness().sample(Answer("one two", (*LS, *LS)))
    between = evolve(sampled, text_ends=np.array([3, 3, 7, 7, 7], np.int32), call_ends=(2, 4))
    assert [head(sent, between, Message("assistant", t, sent.calls[:n])) for t, n in (("one", 0), ("one two", 1))] == [
        1,
        3,
    ]
    assert head(sent, between, Message("assistant", "one two")) == 0
    sampled, sent = Harness().sample(Answer("one two", LS))
    behind = evolve(sampled, text_ends=np.array([3, 3, 7, 7], np.int32), call_ends=(2,))
    assert head(sent, behind, Message("assistant", "", sent.calls)) == 2


def test_text_that_is_held_back_counts_with_the_token_that_lets_it_out() -> None:
    sampled, sent = Harness().sample(Answer("one two three"))
    late = evolve(sampled, text_ends=np.array([0, 7, 7, 13], np.int32))
    assert head(sent, late, Message("assistant", "one two")) == 2


def test_unparsable_calls_do_not_count_as_text() -> None:
    sent = Message("assistant", "go", tuple(Call("c", *c) for c in BAD))
    assert echo_tier(sent, Message("assistant", "go"), RUN) == "edited"
    assert echo_tier(sent, Message("assistant", "stop"), RUN) is None
