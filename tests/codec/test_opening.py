"""Calls that a client demands: what begins the model's turn is what its template writes, and its parser reads."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codec.talk import (
    CHATML,
    CHATML_TOKENS,
    SHELL,
    Action,
    Pending,
    codec_of,
    decode,
    encode,
    joined,
    pend,
    sampled,
    texts,
    tiny,
)
from uniagent.engine.gateway.codec import Codec
from uniagent.engine.messages import Message, ModelCall, Problem
from uniagent.engine.trajectory.types import Provenance

ASK = Message("user", "hi")
THINKS = CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
NO_CALLS = CHATML.replace("m.tool_calls or []", "[]")
OUTSIDE = CHATML.replace("<tool_call>", "[call]").replace("</tool_call>", "[/call]")


def forced(codec: Codec, choice: str) -> str:
    return decode(codec, codec.opening(ModelCall((ASK,), (SHELL,), tool_choice=choice)))


@pytest.mark.parametrize(
    ("template", "required", "named"),
    [
        (CHATML, "<tool_call>", '<tool_call>\n{"name": "shell", "arguments":'),
        (THINKS, "\n</think>\n\n<tool_call>", '\n</think>\n\n<tool_call>\n{"name": "shell", "arguments":'),
    ],
)
def test_a_demanded_call_is_begun_as_the_template_writes_it(template: str, required: str, named: str) -> None:
    codec = codec_of(template)
    assert forced(codec, "required") == required
    assert forced(codec, "shell") == named


@pytest.mark.parametrize("template", [NO_CALLS, OUTSIDE])
def test_where_no_call_can_be_begun_the_request_is_refused(template: str) -> None:
    with pytest.raises(Problem, match="tool_choice to auto") as refused:
        codec_of(template).opening(ModelCall((ASK,), (SHELL,), tool_choice="required"))
    assert refused.value.status == 400


def test_a_name_that_spells_a_control_token_begins_nothing() -> None:
    with pytest.raises(Problem, match="tool_choice"):
        codec_of(CHATML).opening(ModelCall((ASK,), (SHELL,), tool_choice="<|im_end|>"))


@pytest.mark.parametrize(("choice", "more"), [("required", '\n{"name": "shell", "arguments": {}}'), ("shell", " {}}")])
@pytest.mark.parametrize("size", [1, 99])
def test_what_the_model_goes_on_with_is_the_call(choice: str, more: str, size: int) -> None:
    codec = codec_of(CHATML)
    call = ModelCall((ASK,), (SHELL,), tool_choice=choice)
    decoder = codec.decoder(call, lambda index, name: f"id{index}")
    decoder.begin(codec.opening(call))
    ids = encode(codec, more + "\n</tool_call><|im_end|>")
    deltas = [d for n in range(0, len(ids), size) for d in decoder.feed(ids[n : n + size])]
    out = decoder.finish("stop")
    assert [(c.id, c.name, c.value) for c in out.calls] == [("id0", "shell", {})]
    assert (out.used, out.closed, out.finish, out.problem) == (len(ids), True, "tool_calls", None)
    assert [d.call_name for d in (*deltas, *out.deltas)] == ["shell"]


def test_an_answer_that_moved_stands_behind_its_opening() -> None:
    codec = codec_of(CHATML)
    opening = codec.opening(ModelCall((ASK,), (SHELL,), tool_choice="required"))
    said = sampled(encode(codec, '\n{"name": "shell", "arguments": {}}\n</tool_call><|im_end|>'), opening=opening)
    action = Action(said, Message("assistant"))
    again = ModelCall((ASK, Message("assistant"), ASK), (SHELL,))
    pending = [*pend(ASK), Pending(Message("assistant"), (action, len(said.token_ids))), *pend(ASK)]
    segments = codec.delta(again, pending, None)
    assert '<tool_call>\n{"name": "shell", "arguments": {}}\n</tool_call><|im_end|>' in decode(codec, joined(segments))
    assert "<tool_call>" not in "".join(texts(codec, segments, Provenance.SAMPLED))


def test_the_tiny_model_can_be_made_to_call() -> None:
    codec = tiny()
    assert codec.strategy.shape.calls
    assert len(codec.opening(ModelCall((ASK,), (SHELL,), tool_choice="required"))) > 0


@pytest.mark.parametrize("size", [1, 7, 99])
def test_one_call_where_the_client_takes_only_one(size: int) -> None:
    codec = codec_of(CHATML, CHATML_TOKENS)
    one = 'Look.\n<tool_call>\n{"name": "shell", "arguments": {"command": "a"}}\n</tool_call>'
    ids = encode(codec, one + one.replace("Look.", "") + "<|im_end|>")
    decoder = codec.decoder(ModelCall((ASK,), (SHELL,), parallel=False), lambda index, name: f"id{index}")
    deltas = [d for n in range(0, len(ids), size) for d in decoder.feed(ids[n : n + size])]
    assert decoder.stopped
    out = decoder.finish("aborted")
    assert [c.value for c in out.calls] == [{"command": "a"}]
    assert (out.text, out.finish, out.closed) == ("Look.", "tool_calls", False)
    assert [d.call_index for d in (*deltas, *out.deltas) if d.call_index is not None] == [0]
    assert decode(codec, np.asarray(ids[: out.used])) == one
    alone = codec.decoder(ModelCall((ASK,), (SHELL,), parallel=False), lambda index, name: f"id{index}")
    alone.feed(encode(codec, one + "<|im_end|>"))
    assert (alone.stopped, alone.finish("stop").closed) == (False, True)
