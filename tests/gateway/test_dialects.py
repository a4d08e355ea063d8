"""Dialects without a socket: what harnesses send becomes tree messages, and answers stream to what they are whole."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from gateway_kit import sse
from harness_wire import WIRES
from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.adapters.dialects.anthropic import Anthropic
from uniagent.adapters.dialects.chat import Chat
from uniagent.adapters.dialects.responses import Responses
from uniagent.engine.messages import Call, Delta, Message, ModelCall, Problem, Reply, Usage

CHAT, ANTHROPIC, RESPONSES = Chat(lambda: 1.0), Anthropic(), Responses(lambda: 1.0)
DIALECTS: dict[str, Any] = {"chat": CHAT, "anthropic": ANTHROPIC, "responses": RESPONSES}
USER = {"role": "user", "content": "hi"}
FUNCTION = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


def chat(messages: list[Any], **more: Any) -> ModelCall:
    return CHAT.parse({"messages": messages, **more})


def anthropic(messages: list[Any], **more: Any) -> ModelCall:
    return ANTHROPIC.parse({"messages": messages, "max_tokens": 9, **more})


def responses(items: list[Any], **more: Any) -> ModelCall:
    return RESPONSES.parse({"input": items, **more})


def reply_of(text: str = "", reasoning: str = "", *calls: Call, finish: str = "stop") -> Reply:
    return Reply("abc", text, reasoning, calls, finish, Usage(5, 3))


# ---------------------------------------------------------------- chat


def test_chat_reads_roles_parts_reasoning_and_calls():
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}}
    parsed = chat(
        [
            {"role": "developer", "content": "sys", "name": None},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "out"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "x "}, {"type": "text", "text": "y"}]},
        ]
    )
    assert parsed.messages == (
        Message("system", "sys"),
        Message("user", "a\nb"),
        Message("assistant", "", (Call("c1", "run", '{"a": 1}'),), "hm"),
        Message("tool", "out", answers="c1"),
        Message("assistant", "x y"),
    )


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_comes_back_under_either_key(key):
    assert chat([USER, {"role": "assistant", "content": "x", key: "hm"}]).messages[1].reasoning == "hm"


def test_optional_fields_may_be_null():
    nulls = (
        "tools",
        "tool_choice",
        "stream",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "temperature",
        "top_p",
        "seed",
        "response_format",
        "logprobs",
        "logit_bias",
        "parallel_tool_calls",
        "user",
        "stream_options",
        "frequency_penalty",
        "functions",
        "function_call",
        "modalities",
        "audio",
    )
    call = chat([{**USER, "name": None}], **dict.fromkeys(nulls))
    assert (call.n, call.stream, call.max_tokens, call.stop, call.tool_choice, call.asked) == (
        1,
        False,
        None,
        (),
        "auto",
        {},
    )
    assistant = {"role": "assistant", "content": "x", "tool_calls": None, "function_call": None, "reasoning": None}
    assert chat([USER, assistant]).messages[1] == Message("assistant", "x")


def test_the_smaller_of_both_token_limits_counts():
    assert chat([USER], max_tokens=9, max_completion_tokens=5).max_tokens == 5
    assert chat([USER], max_completion_tokens=7).max_tokens == 7


def test_a_forced_tool_must_exist_and_none_offers_no_tools():
    assert chat([USER], tools=[FUNCTION], tool_choice="required").tool_choice == "required"
    named = {"type": "function", "function": {"name": "run"}}
    assert chat([USER], tools=[FUNCTION], tool_choice=named).tool_choice == "run"
    assert chat([USER], tools=[FUNCTION], tool_choice="none").tools == ()
    with pytest.raises(Problem, match="not among the tools: run"):
        chat([USER], tools=[FUNCTION], tool_choice={"type": "function", "function": {"name": "no"}})


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"n": 0}, "n must be"),
        ({"n": 500}, "n must be"),
        ({"modalities": ["audio"]}, "text"),
        ({"stop": [1]}, "stop"),
        ({"top_p": 3}, "top_p"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"tool_choice": 5}, "tool_choice"),
    ],
)
def test_what_chat_cannot_honour_is_refused_by_name(more, word):
    with pytest.raises(Problem, match=word) as refused:
        chat([USER], **more)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file"},
    ],
)
def test_what_is_no_text_is_refused(part):
    with pytest.raises(Problem, match="text only"):
        chat([{"role": "user", "content": [{"type": "text", "text": "look"}, part]}])


def test_cache_control_does_not_reach_the_model():
    marked = {**FUNCTION, "cache_control": {"type": "ephemeral"}}
    marked["function"] = {**FUNCTION["function"], "cache_control": {"type": "ephemeral"}}
    assert chat([USER], tools=[marked]).tools == chat([USER], tools=[FUNCTION]).tools
    tool = {"name": "run", "input_schema": {"type": "object"}}
    plain = anthropic([USER], tools=[tool])
    cached = anthropic(
        [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}],
        tools=[{**tool, "cache_control": {"type": "ephemeral"}}],
    )
    assert (plain.tools, plain.messages) == (cached.tools, cached.messages)


def test_legacy_functions_and_function_calls():
    call = chat(
        [
            USER,
            {"role": "assistant", "function_call": {"name": "run", "arguments": "{}"}},
            {"role": "function", "content": "r"},
        ],
        functions=[FUNCTION["function"]],
    )
    assert call.tools[0]["function"]["name"] == "run"
    assert call.messages[1].calls == (Call(None, "run", "{}"),)
    assert call.messages[2].role == "tool"


def test_custom_tools_of_chat():
    body = {"messages": [USER], "tools": [{"type": "custom", "custom": {"name": "patch", "description": "d"}}]}
    call = CHAT.parse(body)
    assert call.tools[0]["function"]["parameters"]["required"] == ["input"]
    out = CHAT.reply(call, [reply_of("", "", Call("c", "patch", '{"input": "*** Begin"}'), finish="tool_calls")])
    wire = out["choices"][0]["message"]["tool_calls"][0]
    assert wire == {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    echo = CHAT.parse({**body, "messages": [USER, {"role": "assistant", "tool_calls": [wire]}]})
    assert echo.messages[1].calls[0].value == {"input": "*** Begin"}


def test_n_answers_share_one_prompt():
    call = chat([USER], n=2)
    out = CHAT.reply(call, [reply_of("a"), reply_of("b")])
    assert [c["message"]["content"] for c in out["choices"]] == ["a", "b"]
    assert [c["index"] for c in out["choices"]] == [0, 1]
    usage = out["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 6, 11)


@pytest.mark.parametrize("streamed", [False, True])
def test_usage_tells_of_cached_tokens_and_of_reasoning(streamed):
    used = Usage(prompt_tokens=100, completion_tokens=30, cached_tokens=90, reasoning_tokens=20)
    reply = Reply("abc", "a", "hm", (), "stop", used)
    found = {}
    for name, dialect in DIALECTS.items():
        call = dialect.parse(
            {"messages": [USER], "input": [USER], "max_tokens": 9, "stream_options": {"include_usage": True}}
        )
        body = dialect.reply(call, [reply])
        if streamed:
            writer = dialect.events(call)
            events = [d for _, d in sse((writer.start("abc", 100) + writer.finish([reply])).decode()) if d != "[DONE]"]
            bodies = [e.get("response", e) for e in events]
            body = next(b for b in reversed(bodies) if b.get("usage"))
        found[name] = body["usage"]
    assert found["chat"] == {
        "prompt_tokens": 100,
        "completion_tokens": 30,
        "total_tokens": 130,
        "prompt_tokens_details": {"cached_tokens": 90},
        "completion_tokens_details": {"reasoning_tokens": 20},
    }
    assert found["responses"] == {
        "input_tokens": 100,
        "output_tokens": 30,
        "total_tokens": 130,
        "input_tokens_details": {"cached_tokens": 90},
        "output_tokens_details": {"reasoning_tokens": 20},
    }
    assert found["anthropic"] == {
        "input_tokens": 10,
        "cache_read_input_tokens": 90,
        "cache_creation_input_tokens": 0,
        "output_tokens": 30,
    }


def test_usage_is_streamed_when_asked_for():
    for asked in (True, False):
        call = chat([USER], stream=True, stream_options={"include_usage": asked})
        writer = CHAT.events(call)
        text = (writer.start("x", 5) + writer.delta(Delta("a")) + writer.finish([reply_of("a")])).decode()
        chunks = [d for _, d in sse(text) if d != "[DONE]"]
        assert any(c.get("usage") for c in chunks) == asked


# ---------------------------------------------------------------- anthropic


def test_anthropic_takes_messages_apart():
    use = [{"type": "tool_use", "id": f"t{i}", "name": "run", "input": {"n": i}} for i in (1, 2)]
    call = anthropic(
        [
            {"role": "system", "content": "mid"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "t"},
                    *use,
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "two"}]},
                    {"type": "tool_result", "tool_use_id": "t1", "content": "one", "is_error": True},
                    {"type": "text", "text": "and then"},
                ],
            },
        ],
        system=[{"type": "text", "text": "s1", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "s2"}],
    )
    assert call.messages == (
        Message("system", "s1\ns2"),
        Message("system", "mid"),
        Message("user", "a\nb"),
        Message("assistant", "t", (Call("t1", "run", {"n": 1}), Call("t2", "run", {"n": 2})), "hm"),
        Message("tool", "one", answers="t1"),
        Message("tool", "two", answers="t2"),
        Message("user", "and then"),
    )


def test_the_billing_line_of_claude_code_is_left_out():
    def with_line(suffix: str) -> ModelCall:
        line = f"x-anthropic-billing-header: cc_version=2.1.{suffix}; cch={suffix};"
        return anthropic([USER], system=[{"type": "text", "text": line}, {"type": "text", "text": "be brief"}])

    assert with_line("1").messages == with_line("2").messages == (Message("system", "be brief"), Message("user", "hi"))


def test_tools_of_anthropics_own_servers_are_accepted_and_not_offered():
    call = anthropic(
        [USER],
        tools=[
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "custom", "name": "run", "input_schema": {}},
            {"name": "late", "input_schema": {"type": "object"}, "defer_loading": True},
        ],
    )
    assert call.tool_names == {"run", "late"}


def test_tool_references_are_shown_as_they_are():
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "tool_reference", "tool_name": "WebFetch"}],
    }
    assert "WebFetch" in anthropic([{"role": "user", "content": [result]}]).messages[0].text


def test_arguments_that_are_no_object_go_out_whole_and_come_back_as_sampled():
    raw = '{"cmd": "ls'
    call = anthropic([USER])
    out = ANTHROPIC.reply(call, [reply_of("", "", Call("t", "run", raw), finish="tool_calls")])
    block = out["content"][0]
    assert block["input"] == {"__unparsedToolInput": {"raw": raw}}
    assert anthropic([USER, {"role": "assistant", "content": [block]}]).messages[1].calls == (Call("t", "run", raw),)


def test_thinking_is_sent_to_those_who_ask_for_it():
    for thinking, sent in (
        ({"type": "enabled", "budget_tokens": 9}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
        (None, False),
    ):
        call = anthropic([USER], thinking=thinking)
        out = ANTHROPIC.reply(call, [reply_of("x", "hm")])
        assert [b["type"] for b in out["content"]] == (["thinking", "text"] if sent else ["text"])
        if sent:
            assert out["content"][0]["signature"]


def test_stop_reasons():
    call = anthropic([USER], stop_sequences=["END"])
    stopped = Reply("i", "x", "", (), "stop", Usage(1, 1), stop="END")
    assert ANTHROPIC.reply(call, [stopped])["stop_reason"] == "stop_sequence"
    assert ANTHROPIC.reply(call, [stopped])["stop_sequence"] == "END"
    for finish, reason in (("stop", "end_turn"), ("length", "max_tokens"), ("tool_calls", "tool_use")):
        assert ANTHROPIC.reply(call, [reply_of("x", finish=finish)])["stop_reason"] == reason


def test_forced_tools_of_anthropic():
    tools = [{"name": "run", "input_schema": {}}]
    assert anthropic([USER], tools=tools, tool_choice={"type": "any"}).tool_choice == "required"
    assert anthropic([USER], tools=tools, tool_choice={"type": "tool", "name": "run"}).tool_choice == "run"
    assert anthropic([USER], tools=tools, tool_choice={"type": "none"}).tools == ()
    with pytest.raises(Problem, match="tool_choice"):
        anthropic([USER], tools=tools, tool_choice={"type": "tool", "name": "x"})


# ---------------------------------------------------------------- responses


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def test_responses_joins_the_items_of_an_answer():
    call = responses(
        [
            item("message", role="developer", content=[item("input_text", text="dev")]),
            {"role": "user", "content": "hi"},
            item("reasoning", id="rs_1", summary=[], content=[item("reasoning_text", text="hm")]),
            item("message", role="assistant", content=[item("output_text", text="look", annotations=[])]),
            item("function_call", call_id="c1", name="run", arguments='{"a": 1}'),
            item("function_call", call_id="c2", name="run", arguments="{}"),
            item("function_call_output", call_id="c2", output="two"),
            item("function_call_output", call_id="c1", output=[item("input_text", text="one")]),
            item("message", role="assistant", content="done"),
            item("message", role="user", content="more"),
        ],
        instructions="be brief",
    )
    assert call.messages == (
        Message("system", "be brief"),
        Message("system", "dev"),
        Message("user", "hi"),
        Message("assistant", "look", (Call("c1", "run", '{"a": 1}'), Call("c2", "run", "{}")), "hm"),
        Message("tool", "one", answers="c1"),
        Message("tool", "two", answers="c2"),
        Message("assistant", "done"),
        Message("user", "more"),
    )


def test_input_may_be_a_string_and_hosted_tools_are_not_offered():
    call = RESPONSES.parse({"input": "hi", "tools": [item("web_search"), item("function", name="run", parameters={})]})
    assert call.messages == (Message("user", "hi"),)
    assert call.tool_names == {"run"}


def test_namespaces_are_flattened_and_named_in_the_answer():
    tools = [item("namespace", name="multi_agent_v1", tools=[item("function", name="spawn_agent", parameters={})])]
    call = responses([USER], tools=tools)
    assert call.tool_names == {"spawn_agent"}
    out = RESPONSES.reply(call, [reply_of("", "", Call("c", "spawn_agent", "{}"), finish="tool_calls")])
    assert out["output"][0]["namespace"] == "multi_agent_v1"
    echo = responses([USER, out["output"][0]], tools=tools)
    assert echo.messages[1].calls == (Call("c", "spawn_agent", "{}"),)


def test_free_text_tools_of_responses():
    tools = [item("custom", name="apply_patch", format={"type": "grammar"})]
    call = responses([USER], tools=tools, stream=True)
    reply = reply_of("", "", Call("c", "apply_patch", '{"input": "*** Begin\\n"}'), finish="tool_calls")
    (wire,) = RESPONSES.reply(call, [reply])["output"]
    assert (wire["type"], wire["input"]) == ("custom_tool_call", "*** Begin\n")
    output = item("custom_tool_call_output", call_id="c", output="ok")
    echo = responses([USER, wire, output], tools=tools)
    assert echo.messages[1].calls[0].value == {"input": "*** Begin\n"}
    assert echo.messages[2] == Message("tool", "ok", answers="c")
    writer = RESPONSES.events(call)
    text = writer.start("abc", 5)
    text += writer.delta(Delta(call_index=0, call_id="c", call_name="apply_patch", arguments='{"input": '))
    text += writer.delta(Delta(call_index=0, arguments='"*** Begin\\n"}')) + writer.finish([reply])
    inputs = [d["delta"] for e, d in sse(text.decode()) if e == "response.custom_tool_call_input.delta"]
    assert inputs == ["*** Begin\n"]


def test_reasoning_survives_in_encrypted_content_alone():
    call = responses([USER], include=["reasoning.encrypted_content"])
    (thought, _) = RESPONSES.reply(call, [reply_of("x", "hm é")])["output"]
    stripped = {**thought, "content": None, "summary": []}
    assert responses([USER, stripped, item("message", role="assistant", content="x")]).messages[1].reasoning == "hm é"
    foreign = {**stripped, "encrypted_content": base64.b64encode(b"\xff\xfe").decode() + "!"}
    assert responses([USER, foreign, item("message", role="assistant", content="x")]).messages[1].reasoning == ""


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_x"}, "not among"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_responses_cannot_honour_is_refused_by_name(more, word):
    with pytest.raises(Problem, match=word):
        responses([USER], **more)


def test_a_response_can_be_gone_on_from():
    memo = RESPONSES.memo()
    first = RESPONSES.parse({"input": "hi", "instructions": "one"}, memo)
    reply = reply_of("", "hm", Call("c1", "run", "{}"), finish="tool_calls")
    RESPONSES.sent(first, [reply], memo)
    follow = {"input": [item("function_call_output", call_id="c1", output="r")], "previous_response_id": "resp_abc"}
    second = RESPONSES.parse({**follow, "instructions": "two"}, memo)
    assert second.messages == (
        Message("system", "two"),
        Message("user", "hi"),
        reply.message(),
        Message("tool", "r", answers="c1"),
    )
    referred = RESPONSES.parse({"input": [USER, {"type": "item_reference", "id": "fc_abc_0"}]}, memo)
    assert referred.messages[1].calls == (Call("c1", "run", "{}"),)
    with pytest.raises(Problem, match="not stored"):
        RESPONSES.parse({"input": [USER, {"type": "item_reference", "id": "fc_zzz_0"}]}, memo)


def test_responses_that_are_not_stored_are_not_kept():
    memo = RESPONSES.memo()
    RESPONSES.sent(RESPONSES.parse({"input": "hi", "store": False}, memo), [reply_of("x")], memo)
    with pytest.raises(Problem):
        RESPONSES.parse({"input": "hi", "previous_response_id": "resp_abc"}, memo)


# ---------------------------------------------------------------- all of them

texts = st.text(st.characters(codec="utf-8"), max_size=12)
calls = st.builds(
    lambda n, a: (f"run{n}", a), st.integers(0, 3), st.dictionaries(texts, texts, max_size=2).map(json.dumps) | texts
)


def pieces(draw: Any, text: str) -> list[str]:
    """The text in random pieces."""
    out = []
    while text:
        n = draw(st.integers(1, len(text)))
        out.append(text[:n])
        text = text[n:]
    return out


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), text=texts, reasoning=texts, listed=st.lists(calls, max_size=3), cut=st.booleans())
def test_streamed_answers_add_up_whatever_the_pieces(name, data, text, reasoning, listed, cut):
    finish = "length" if cut else "tool_calls" if listed else "stop"
    reply = reply_of(text, reasoning, *(Call(f"c{i}", n, a) for i, (n, a) in enumerate(listed)), finish=finish)
    body = {"messages": [USER], "input": [USER], "max_tokens": 9, "stream": True, "thinking": {"type": "enabled"}}
    dialect = DIALECTS[name]
    call = dialect.parse({**body, "stream_options": {"include_usage": True}})
    writer = dialect.events(call)
    out = writer.start(reply.id, reply.usage.prompt_tokens)
    for piece in pieces(data.draw, reasoning):
        out += writer.delta(Delta(reasoning=piece))
    for piece in pieces(data.draw, text):
        out += writer.delta(Delta(text=piece)) + writer.ping()
    for i, (tool, arguments) in enumerate(listed):
        whole = pieces(data.draw, arguments)
        first = whole.pop(0) if whole and data.draw(st.booleans()) else ""
        out += writer.delta(Delta(call_index=i, call_id=f"c{i}", call_name=tool, arguments=first))
        for piece in whole:
            out += writer.delta(Delta(call_index=i, arguments=piece))
    out += writer.finish([reply])
    wire = WIRES[name]
    streamed = wire.read_stream(out.decode())
    whole = wire.read(json.loads(json.dumps(dialect.reply(call, [reply]))))
    assert (streamed.text, streamed.reasoning) == (whole.text, whole.reasoning) == (text, reasoning)
    assert [(c.id, c.name, c.arguments) for c in streamed.calls] == [(c.id, c.name, c.arguments) for c in reply.calls]
    assert (streamed.id, streamed.finish, streamed.usage) == (whole.id, whole.finish, whole.usage)


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_memo_changes_nothing(name, data):
    """A growing, branching conversation parsed with a memo gives what parsing without one gives."""
    dialect = DIALECTS[name]
    memo = dialect.memo()
    history: list[Any] = [USER]
    kinds = {
        "chat": [
            lambda i: {"role": "user", "content": f"u{i}"},
            lambda i: {
                "role": "assistant",
                "content": f"a{i}",
                "tool_calls": [
                    {"id": f"c{i}", "function": {"name": "f", "arguments": "{}"}},
                    {"id": f"d{i}", "function": {"name": "f", "arguments": "{}"}},
                ],
            },
            lambda i: {"role": "tool", "tool_call_id": f"{'cd'[i % 2]}{i - 1 - i % 2}", "content": f"t{i}"},
        ],
        "anthropic": [
            lambda i: {"role": "user", "content": f"u{i}"},
            lambda i: {"role": "assistant", "content": [{"type": "tool_use", "id": f"c{i}", "name": "f", "input": {}}]},
            lambda i: {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": f"c{i - 1}"}, {"type": "text", "text": "x"}],
            },
        ],
        "responses": [
            lambda i: item("message", role="user", content=f"u{i}"),
            lambda i: item("reasoning", content=[item("reasoning_text", text=f"r{i}")]),
            lambda i: item("message", role="assistant", content=f"a{i}"),
            lambda i: item("function_call", call_id=f"c{i}", name="f", arguments="{}"),
            lambda i: item("function_call_output", call_id=f"c{i - 1}", output="o"),
        ],
    }[name]
    for step in range(data.draw(st.integers(1, 8))):
        if data.draw(st.integers(0, 3)) == 0:
            history = history[: data.draw(st.integers(1, len(history)))]
        for _ in range(data.draw(st.integers(0, 3))):
            history = [*history, data.draw(st.sampled_from(kinds))(len(history) + 100 * step)]
        body = {dialect.items: history, "max_tokens": 9}
        assert dialect.parse(body, memo).messages == dialect.parse(body).messages


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_parsing_anything_gives_a_call_or_a_problem(name, data):
    junk = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-2, 2)
        | st.text(max_size=3)
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "role",
                        "content",
                        "type",
                        "text",
                        "tool_calls",
                        "function",
                        "name",
                        "arguments",
                        "id",
                        "input",
                        "custom",
                        "source",
                        "data",
                        "tool_use_id",
                        "call_id",
                        "output",
                        "summary",
                        "thinking",
                        "tools",
                        "parameters",
                        "input_schema",
                        "encrypted_content",
                    ]
                ),
                inner
                | st.sampled_from(
                    [
                        "user",
                        "assistant",
                        "tool",
                        "system",
                        "function",
                        "tool_use",
                        "tool_result",
                        "thinking",
                        "text",
                        "message",
                        "function_call",
                        "reasoning",
                        "custom",
                        "namespace",
                        "custom_tool_call",
                        "document",
                    ]
                ),
                max_size=5,
            )
        ),
        max_leaves=12,
    )
    keys = [
        "messages",
        "input",
        "tools",
        "tool_choice",
        "stream",
        "n",
        "max_tokens",
        "stop",
        "system",
        "thinking",
        "stop_sequences",
        "instructions",
        "previous_response_id",
        "functions",
        "max_output_tokens",
    ]
    body = data.draw(st.dictionaries(st.sampled_from(keys), junk, max_size=6))
    body.setdefault(DIALECTS[name].items, [data.draw(junk)])
    dialect = DIALECTS[name]
    try:
        call = dialect.parse(body)
    except Problem as refusal:
        problem = refusal
    else:
        problem = Problem(400, "none", "none")
        reply = reply_of("x", "y", Call("c", "f", "{}"), finish="tool_calls")
        dialect.sent(call, [reply], dialect.memo())
        json.dumps(dialect.reply(call, [reply] * call.n))
        writer = dialect.events(call)
        writer.start("x", 1)
        writer.finish([reply] * call.n)
    assert 400 <= problem.status < 500
    assert problem.message
