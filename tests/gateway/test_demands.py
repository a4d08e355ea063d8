"""What a client demands of an answer: a call, one call, JSON. It is honoured exactly, or refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_kit import END, Model, call_text, client_of, codec, decode, session_of
from harness_wire import WIRES, Answered, Harness, Result, Said
from test_behaviours import DONE, MORE, TASK, balanced, trained

from uniagent.engine.messages import Call, Message, ModelCall

OPEN = "<tool_call>"
REST = '\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>'
ONE, TWO = call_text("run", '{"cmd": "a"}'), call_text("run", '{"cmd": "b"}')
FORCED: dict[str, dict[str, Any]] = {
    "chat": {"tool_choice": "required"},
    "responses": {"tool_choice": "required"},
    "anthropic": {"tool_choice": {"type": "any"}},
}
NAMED: dict[str, dict[str, Any]] = {
    "chat": {"tool_choice": {"type": "function", "function": {"name": "run"}}},
    "responses": {"tool_choice": {"type": "function", "name": "run"}},
    "anthropic": {"tool_choice": {"type": "tool", "name": "run"}},
}
ALONE: dict[str, dict[str, Any]] = {
    "chat": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "anthropic": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
JSON: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "response_format", {"response_format": {"type": "json_object"}}),
    ("chat", "response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("responses", "text.format", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    ("anthropic", "output_config.format", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("anthropic", "output_format", {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
]
each = pytest.mark.parametrize("dialect", WIRES)
streamed = pytest.mark.parametrize("stream", [False, True])


@each
@streamed
async def test_a_demanded_call_is_begun_for_the_model_and_what_it_sampled_is_trained(
    dialect: str, stream: bool
) -> None:
    model = Model([REST, REST.replace("ls", "pwd"), DONE])
    async with client_of(model, scripted=False) as client:
        h = Harness(client, WIRES[dialect], stream)
        first = await h.ask([TASK], **FORCED[dialect])
        assert [(c.name, c.arguments) for c in first.calls] == [("run", '{"cmd": "ls"}')]
        items = [TASK, first, Result(first.calls[0].id, "a.txt")]
        second = await h.ask(items, **FORCED[dialect])
        await h.ask([*items, second, Result(second.calls[0].id, "/")])
        done = await client.finish()
    assert [p.endswith(OPEN) for p in model.prompts] == [True, True, False]
    assert f"{OPEN}{REST}{END}" in model.prompts[2]
    balanced(done)
    (chain,) = done["trajectories"]
    assert trained(done) == [f"{REST}{END}{REST.replace('ls', 'pwd')}{END}{DONE}{END}"]
    start = chain["actions"][0]["start"]
    assert chain["provenance"][start - 1] == "template"
    assert decode(chain["token_ids"][:start]).endswith(OPEN)


@each
async def test_a_demanded_tool_is_called(dialect: str) -> None:
    model = Model([' {"cmd": "ls"}}\n</tool_call>'])
    async with client_of(model, scripted=False) as client:
        answer = await Harness(client, WIRES[dialect], tools=("walk", "run")).ask([TASK], **NAMED[dialect])
    assert [c.name for c in answer.calls] == ["run"]
    assert model.prompts[0].endswith('<tool_call>\n{"name": "run", "arguments":')


@each
async def test_the_same_request_without_the_demand_is_not_begun(dialect: str) -> None:
    model = Model([REST, "as I like", REST])
    async with client_of(model, scripted=False) as client:
        h = Harness(client, WIRES[dialect])
        await h.ask([TASK], **FORCED[dialect])
        assert (await h.ask([TASK])).text == "as I like"
        assert (await h.ask([TASK], **FORCED[dialect])).calls
    assert [p.endswith(OPEN) for p in model.prompts] == [True, False, True]


async def test_an_answer_that_moved_keeps_its_opening() -> None:
    model = Model([REST, DONE, "bye"])
    async with client_of(model, scripted=False) as client:
        h = Harness(client, WIRES["chat"])
        first = await h.ask([TASK], **FORCED["chat"])
        await h.ask([TASK, first, Result(first.calls[0].id, "a.txt")])
        await h.ask([Said("Summary: nothing was done"), first, Result(first.calls[0].id, "a.txt"), MORE])
        done = await client.finish()
    balanced(done)
    assert f"{OPEN}{REST}{END}" in model.prompts[2]
    assert done["trajectories"][1]["kind"] == "branch"
    assert done["ledger"]["trainable"] == done["ledger"]["sampled"]


@each
@streamed
async def test_one_call_where_the_client_takes_only_one(dialect: str, stream: bool) -> None:
    async with client_of(Model([f"{ONE}\n{TWO}", DONE])) as client:
        h = Harness(client, WIRES[dialect], stream)
        answer = await h.ask([TASK], **ALONE[dialect])
        assert [c.arguments for c in answer.calls] == ['{"cmd": "a"}']
        await h.ask([TASK, answer, Result(answer.calls[0].id, "ok")])
        done = await client.finish()
    balanced(done)
    assert trained(done) == [f"{ONE}{DONE}{END}"]
    assert set(done["ledger"]["discarded"]) == {"stop_overrun"}
    assert "repair" in done["trajectories"][0]["provenance"]


@pytest.mark.parametrize(("dialect", "key", "asked"), JSON)
async def test_json_is_refused_by_name_where_nothing_can_hold_a_model_to_it(
    dialect: str, key: str, asked: dict[str, Any]
) -> None:
    async with client_of(Model([]), scripted=False) as client:
        wire = WIRES[dialect]
        answer = await client.post(wire.path, {**wire.body([TASK], (), Harness(client, wire).style), **asked})
        done = await client.finish()
    assert answer.status_code == 400
    assert f"leave {key} out" in answer.json()["error"]["message"]
    assert done["trajectories"] == []


@pytest.mark.parametrize(("dialect", "key", "asked"), JSON)
async def test_a_script_answers_what_it_will(dialect: str, key: str, asked: dict[str, Any]) -> None:
    async with client_of(Model(["{}"])) as client:
        assert (await Harness(client, WIRES[dialect]).ask([TASK], **asked)).text == "{}"
        assert key


async def test_no_tool_is_shown_where_none_may_be_called() -> None:
    model = Model(["just words"])
    async with client_of(model, scripted=False) as client:
        answer: Answered = await Harness(client, WIRES["chat"]).ask([TASK], tool_choice="none")
    assert not answer.calls
    assert '"run"' not in model.prompts[0]


async def test_n_answers_are_begun_alike() -> None:
    session = session_of(Model([REST, REST]), scripted=False)
    tools = ({"type": "function", "function": {"name": "run", "parameters": {}}},)
    call = ModelCall((Message("user", "hi"),), tools, n=2, tool_choice="required")
    replies = await session.complete(call)
    assert [[type(c) for c in r.calls] for r in replies] == [[Call], [Call]]
    assert replies[0].usage.prompt_tokens == len(codec().opening(call)) + await session.count(call)
