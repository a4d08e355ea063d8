"""The ``openai`` and ``anthropic`` SDKs as clients, streaming and not, through a socket: an agent of three turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from gateway_kit import END, call_text, client_of, decode

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

CALLS = "<think>\nI should look.\n</think>\n\nLet me look.\n" + "\n".join(
    call_text("run", arguments) for arguments in ('{"cmd": "ls"}', '{"cmd": "cat \\u00e9"}')
)
SCRIPT = [CALLS, "All is done.", "You are welcome."]
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}


async def run(agent: Callable[..., None], *args: Any) -> None:
    """The agent in a thread against a session; then every sampled token must be trained, in one chain."""
    async with client_of(SCRIPT) as client:
        with trio.fail_after(30):
            await trio.to_thread.run_sync(agent, client.base_url, client.api_key, *args)
        done = await client.finish()
        (chain,) = done["trajectories"]
        mask = [t for t, m in zip(chain["token_ids"], chain["loss_mask"], strict=True) if m]
        assert decode(mask) == "".join(t + END for t in SCRIPT)
        assert chain["echo_tiers"][:2] == ["verbatim", "verbatim"] or chain["echo_tiers"][:2] == [
            "normalised",
            "verbatim",
        ]


def chat_agent(base_url: str, key: str, stream: bool) -> None:
    client = openai.OpenAI(base_url=base_url + "/v1", api_key=key)
    tools = [{"type": "function", "function": {"name": "run", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": "go"}]

    def ask() -> Any:
        if not stream:
            return client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        with client.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
            seen = "".join(e.delta for e in events if e.type == "content.delta")
            message = events.get_final_completion().choices[0].message
        assert seen == (message.content or "")
        return message

    first = ask()
    assert first.content.startswith("Let me look.")
    assert [c.function.name for c in first.tool_calls] == ["run", "run"]
    messages.append(first)
    messages.extend({"role": "tool", "tool_call_id": c.id, "content": c.function.arguments} for c in first.tool_calls)
    second = ask()
    assert second.content == "All is done."
    messages.extend([second, {"role": "user", "content": "thanks"}])
    assert ask().content == "You are welcome."


def responses_agent(base_url: str, key: str, stream: bool, chained: bool) -> None:
    client = openai.OpenAI(base_url=base_url + "/v1", api_key=key)
    tools = [{"type": "function", "name": "run", "parameters": SCHEMA, "strict": True}]
    history: list[Any] = []
    previous: str | None = None

    def ask(new: list[Any]) -> Any:
        nonlocal previous
        history.extend(new)
        more = {"previous_response_id": previous} if chained and previous else {}
        request = {"model": "m", "input": new if chained else history, "tools": tools, **more}
        if not stream:
            response = client.responses.create(**request)
        else:
            with client.responses.stream(**request) as events:
                text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
                response = events.get_final_response()
            assert text == response.output_text
        previous = response.id
        history.extend(response.output)
        return response

    first = ask([{"role": "user", "content": "go"}])
    calls = [o for o in first.output if o.type == "function_call"]
    assert len(calls) == 2
    outputs = [{"type": "function_call_output", "call_id": c.call_id, "output": c.arguments} for c in calls]
    assert ask(outputs).output_text == "All is done."
    last = ask([{"role": "user", "content": "thanks"}])
    assert last.output_text == "You are welcome."
    assert last.usage.total_tokens == last.usage.input_tokens + last.usage.output_tokens


def messages_agent(base_url: str, key: str, stream: bool) -> None:
    client = anthropic.Anthropic(base_url=base_url, api_key=key)
    tools = [{"name": "run", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": "go"}]

    def ask() -> Any:
        request: Any = {"model": "m", "max_tokens": 2000, "messages": messages, "tools": tools}
        request["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        if not stream:
            return client.messages.create(**request)
        with client.messages.stream(**request) as events:
            text = "".join(events.text_stream)
            message = events.get_final_message()
        assert text == "".join(b.text for b in message.content if b.type == "text")
        return message

    counted = client.messages.count_tokens(model="m", messages=messages, tools=tools).input_tokens
    first = ask()
    assert first.usage.input_tokens == counted
    assert [b.type for b in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use"
    messages.append({"role": "assistant", "content": first.content})
    uses = [b for b in first.content if b.type == "tool_use"]
    assert uses[1].input == {"cmd": "cat é"}
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": b.input["cmd"]} for b in reversed(uses)]
    messages.append({"role": "user", "content": results})
    second = ask()
    assert second.content[0].text == "All is done."
    messages.extend([{"role": "assistant", "content": second.content}, {"role": "user", "content": "thanks"}])
    assert ask().content[0].text == "You are welcome."


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat(stream: bool) -> None:
    await run(chat_agent, stream)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_openai_responses(stream: bool, chained: bool) -> None:
    await run(responses_agent, stream, chained)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_messages(stream: bool) -> None:
    await run(messages_agent, stream)


async def test_errors_are_the_sdks_own_exceptions() -> None:
    async with client_of([]) as client:

        def ask() -> None:
            chat = openai.OpenAI(base_url=client.base_url + "/v1", api_key="k", max_retries=0)
            with pytest.raises(openai.BadRequestError, match="messages is empty"):
                chat.chat.completions.create(model="m", messages=[])
            with pytest.raises(openai.ConflictError, match="no answer left"):
                chat.responses.create(model="m", input="x")
            messages = anthropic.Anthropic(base_url=client.base_url, api_key="k", max_retries=0)
            with pytest.raises(anthropic.BadRequestError, match="text only"):
                image: Any = {"type": "image", "source": {"type": "url", "url": "x"}}
                messages.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": [image]}])
            stranger = anthropic.Anthropic(base_url=client.server.gateway.origin, api_key="dummy", max_retries=0)
            with pytest.raises(anthropic.AuthenticationError, match="POST /sessions"):
                stranger.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}])

        await trio.to_thread.run_sync(ask)
