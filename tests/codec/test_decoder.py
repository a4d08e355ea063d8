"""Ids to deltas: the same answer for every chunking, stop strings, characters split over tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.talk import CHATML, SHELL, codec_of, encode, examples, tiny
from uniagent.engine.gateway.decoder import Decoded, Decoder, _written
from uniagent.engine.messages import Delta, Message, ModelCall

CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls é"}}\n</tool_call>'
PIECES = [
    "Hello",
    " world ",
    "\n\n",
    "é😀",
    "<think>\nhm\n</think>\n\n",
    CALL,
    "<tool_call>",
    "</tool_call>",
    "{",
    "END",
    "EN",
    "\ufdd0",
]


def decoder(stop: tuple[str, ...] = ()) -> Decoder:
    call = ModelCall((Message("user", "hi"),), (SHELL,), stop=stop)
    return codec_of(CHATML).decoder(call, lambda index, name: f"id{index}")


def ids_of(text: str) -> np.ndarray:
    return encode(codec_of(CHATML), text)


def run(
    ids: np.ndarray, cuts: list[int], stop: tuple[str, ...] = (), finish: str = "stop"
) -> tuple[list[Delta], Decoded]:
    d, deltas, at = decoder(stop), [], 0
    for n in [*cuts, len(ids)]:
        deltas += d.feed(ids[at : at + n])
        at += n
    decoded = d.finish(finish)
    return [*deltas, *decoded.deltas], decoded


def told(deltas: list[Delta]) -> tuple[str, str, list[tuple[str | None, str | None, str]]]:
    calls = [(d.call_id, d.call_name, d.arguments) for d in deltas if d.call_index is not None]
    return "".join(d.text for d in deltas), "".join(d.reasoning for d in deltas), calls


@examples
@given(
    st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
    st.lists(st.integers(1, 9), max_size=30),
    st.sampled_from([(), ("END",), ("\n\n", "é"), ("<tool_call>",)]),
    st.booleans(),
)
def test_every_chunking_gives_the_same_answer(text: str, cuts: list[int], stop: tuple[str, ...], ends: bool) -> None:
    ids = ids_of(text + "<|im_end|>" * ends)
    _, whole = run(ids, [], stop)
    deltas, decoded = run(ids, cuts, stop)
    by_one, single = run(ids, [1] * len(ids), stop)
    for part, answer in ((deltas, decoded), (by_one, single)):
        assert (answer.text, answer.reasoning, answer.calls, answer.finish, answer.used, answer.problem) == (
            whole.text, whole.reasoning, whole.calls, whole.finish, whole.used, whole.problem
        )  # fmt: skip
        assert answer.reasoning_tokens == whole.reasoning_tokens
        wrote = [(c.id, c.name, c.arguments) for c in answer.calls]
        assert told(part) == (answer.text, answer.reasoning, wrote)


def test_a_call() -> None:
    _, decoded = run(ids_of("Let me look.\n" + CALL + "<|im_end|>"), [])
    assert (decoded.text, decoded.finish, decoded.closed) == ("Let me look.", "tool_calls", True)
    assert [(c.id, c.name, c.arguments) for c in decoded.calls] == [("id0", "shell", '{"command": "ls é"}')]


@pytest.mark.parametrize("reasoning", ["I think é 😀 so", "two\n\nparagraphs", ""])
def test_tokens_of_reasoning_are_counted(reasoning: str) -> None:
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    _, decoded = run(ids_of(f"{thought}so be it, I think\n{CALL}<|im_end|>"), [])
    assert decoded.reasoning == reasoning
    assert decoded.reasoning_tokens == len(ids_of(reasoning))


def test_reasoning_in_several_stretches_is_counted_without_what_stands_between() -> None:
    pieces = [b"<open>", b"one ", b"two", b"<close><open>", b"three", b" four five", b"<close>", b"one"]
    assert [_written(pieces, s) for s in ("one twothree four", "one two", "three", "one twoone", "\ufffd", "")] == [
        4, 2, 1, 3, 0, 0,
    ]  # fmt: skip


def test_text_streams_token_by_token() -> None:
    d = decoder()
    assert [delta.text for i in ids_of("one two three") for delta in d.feed(np.array([i]))] != []
    assert "".join(x.text for i in ids_of(" four") for x in d.feed(np.array([i]))) == " four"


def test_a_character_split_over_tokens_comes_whole() -> None:
    ids = ids_of("😀")
    assert len(ids) > 1
    d = decoder()
    assert [d.feed(ids[n : n + 1]) for n in range(len(ids) - 1)] == [[]] * (len(ids) - 1)
    assert d.feed(ids[-1:])[0].text == "😀"


def test_a_character_cut_off_is_a_replacement() -> None:
    _, decoded = run(ids_of("a😀")[:-1], [], finish="length")
    assert decoded.text.startswith("a\ufffd")
    assert decoded.finish == "length"
    assert not decoded.closed


@pytest.mark.parametrize("chunks", [[], [1] * 99])
def test_a_stop_string_cuts_at_a_token_boundary(chunks: list[int]) -> None:
    ids = ids_of("one two STOP three")
    _, decoded = run(ids, chunks, ("STOP",))
    kept = ids_of("one two STOP three")[: decoded.used]
    assert decoded.finish == "stop"
    assert not decoded.closed
    plain = "".join(d.text for d in run(kept, [])[0])
    assert decoded.text == plain.rstrip() or decoded.text == plain
    assert "one two" in decoded.text
    assert "STOP" not in decoded.text


def test_a_stop_string_is_announced_at_once_and_nothing_after_it_counts() -> None:
    d, ids = decoder(("STOP",)), ids_of("a STOP")
    for i in ids:
        d.feed(np.array([i]))
    assert d.stopped
    assert d.feed(ids_of("more")) == []
    assert d.finish("aborted").text.strip() == "a"


def test_a_beginning_of_a_stop_string_is_held_back_and_then_told() -> None:
    d = decoder(("STOP",))
    assert "".join(x.text for x in d.feed(ids_of("a ST"))) == "a"
    assert d.finish("stop").text == "a ST"


def test_length_and_calls() -> None:
    _, decoded = run(ids_of(CALL + "<tool_call>\n{"), [], finish="length")
    assert decoded.finish == "length"
    assert len(decoded.calls) == 1
    assert decoded.problem == "the answer ended inside a tool call"


def test_special_tokens_are_silent_and_a_stop_id_ends_the_answer() -> None:
    _, decoded = run(ids_of("a<|im_start|>b<|im_end|>c"), [])
    assert decoded.text == "ab"
    assert decoded.used == len(ids_of("a<|im_start|>b<|im_end|>"))


def test_text_that_only_spells_a_control_token_is_text() -> None:
    codec = codec_of(CHATML)
    spelled = codec.encoder.encode(codec.encoder.protect("say <think> or " + CALL, _marks()), _marks())[0]
    _, decoded = run(spelled, [])
    assert decoded.text == "say <think> or " + CALL
    assert decoded.calls == ()


def _marks():  # type: ignore[no-untyped-def]
    from uniagent.engine.gateway.encoder import marks_for

    return marks_for([])


def test_the_tiny_model_speaks() -> None:
    codec = tiny()
    d = codec.decoder(ModelCall((Message("user", "x"),), (SHELL,)), lambda index, name: "c")
    d.feed(
        encode(codec, '<tool_call>\n{"name": "shell", "arguments": {"command": "rm plum.txt"}}\n</tool_call><|im_end|>')
    )
    decoded = d.finish("stop")
    assert decoded.calls[0].value == {"command": "rm plum.txt"}
    assert decoded.used == 8
