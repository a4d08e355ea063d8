"""The gateway over real sockets: routes, keys, the sessions API, limits, malformed requests, clients that leave."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest
import trio
from attrs import evolve
from gateway_kit import ADMIN, END, Client, Model, Say, call_text, client_of, decode, gateway_of, serving, sse

from uniagent.engine import config
from uniagent.engine.messages import Message, ModelCall, Problem
from uniagent.engine.ports import SessionSampling

USER = {"role": "user", "content": "hi there"}
CHAT = {"model": "m", "messages": [USER]}
ANTHROPIC = {"model": "m", "max_tokens": 100, "messages": [USER]}
RESPONSES = {"model": "m", "input": [USER]}
DIALECTS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/messages", ANTHROPIC),
    ("/v1/responses", RESPONSES),
]


def text_of(answer: httpx.Response) -> str:
    body = answer.json()
    if "choices" in body:
        return str(body["choices"][0]["message"]["content"])
    return str((body.get("output") or [body])[0]["content"][0]["text"])


async def raw(client: Client, data: bytes, *, until: bytes = b"", close: bool = False) -> bytes:
    """Bytes as they are; what comes back until the server closes, or until a mark."""
    port = int(client.server.gateway.origin.rpartition(":")[2])
    got = b""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(data)
        if close:
            return b""
        with trio.fail_after(20):
            async for part in stream:
                got += part
                if until and until in got:
                    break
    return got


def head(client: Client, path: str, body: bytes, *extra: str) -> bytes:
    route = client.base_url.removeprefix(client.server.gateway.origin) + path
    lines = [f"POST {route} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *extra]
    return "\r\n".join([*lines, "", ""]).encode() + body


# ---------------------------------------------------------------- routes and keys


@pytest.mark.parametrize(("path", "body"), DIALECTS)
async def test_each_dialect_answers(path, body):
    async with client_of(["hello"]) as client:
        answer = await client.post(path, body)
        assert answer.status_code == 200, answer.text
        assert text_of(answer) == "hello"
        ledger = (await client.finish())["ledger"]
        assert ledger["trainable"] == ledger["sampled"] > 0


@pytest.mark.parametrize("prefix", ["", "/v1", "/v1/v1"])
async def test_the_v1_may_be_missing_or_doubled(prefix):
    async with client_of(["hello"]) as client:
        assert (await client.post(prefix + "/chat/completions?beta=true", CHAT)).status_code == 200


async def test_a_session_is_found_by_key_alone():
    async with client_of(["a", "b"]) as client:
        origin = client.server.gateway.origin
        for headers in ({"authorization": f"Bearer {client.api_key}"}, {"x-api-key": client.api_key}):
            answer = await client.http.post(origin + "/v1/messages?beta=true", json=ANTHROPIC, headers=headers)
            assert answer.status_code == 200


async def test_a_session_id_in_the_path_needs_its_key():
    async with client_of(["a"]) as client:
        url = client.server.gateway.origin + "/sessions/s/v1/chat/completions"
        refused = await client.http.post(url, json=CHAT)
        assert refused.status_code == 401
        answer = await client.http.post(url, json=CHAT, headers={"x-api-key": client.api_key})
        assert answer.status_code == 200


@pytest.mark.parametrize(("path", "body"), DIALECTS)
async def test_an_unknown_key_is_401_in_the_dialects_shape(path, body):
    async with client_of([]) as client:
        answer = await client.http.post(client.server.gateway.origin + path, json=body, headers={"x-api-key": "dummy"})
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert error["type"] == "authentication_error"
        assert "base_url" in error["message"]


async def test_probes_and_models():
    async with client_of([]) as client:
        origin = client.server.gateway.origin
        assert (await client.http.head(origin)).status_code == 200
        assert (await client.http.head(client.base_url)).status_code == 200
        assert (await client.http.get(origin + "/healthz")).json()["status"] == "ok"
        models = (await client.get("/v1/models")).json()
        assert models["data"][0]["id"] == "policy"
        assert (await client.get("/v1/models/x")).json()["id"] == "x"
        assert (await client.get("/v1/nothing")).status_code == 404
        assert (await client.get("/v1/messages")).status_code == 405


async def test_counting_tokens_is_true_and_changes_nothing():
    async with client_of(["hello"]) as client:
        counted = (await client.post("/v1/messages/count_tokens", ANTHROPIC)).json()["input_tokens"]
        used = (await client.post("/v1/messages", ANTHROPIC)).json()["usage"]["input_tokens"]
        assert counted == used


# ---------------------------------------------------------------- the sessions API


async def test_a_session_from_opening_to_deleting():
    gateway = gateway_of(["one", "two"])
    async with serving(gateway) as server, httpx.AsyncClient(verify=False) as http:
        headers = {"authorization": f"Bearer {ADMIN}"}
        origin = gateway.origin
        opened = await http.post(origin + "/sessions", json={"session_id": "a/b"}, headers=headers)
        address = opened.json()
        assert set(address) >= {"session_id", "base_url", "api_key"}
        answer = await http.post(address["base_url"] + "/v1/chat/completions", json=CHAT)
        assert text_of(answer) == "one"
        path = origin + "/sessions/a%2Fb"
        assert (await http.get(path, headers=headers)).json()["generations"] == 1
        assert (await http.post(path + "/reward", json={"reward": 0.5}, headers=headers)).status_code == 200
        done = (await http.post(path + "/finish", headers=headers)).json()
        assert done["reward"] == 0.5
        (chain,) = done["trajectories"]
        lengths = {len(chain[k]) for k in ("token_ids", "loss_mask", "provenance", "logprobs", "versions")}
        assert len(lengths) == 1
        for sampled, logprob, version in zip(chain["provenance"], chain["logprobs"], chain["versions"], strict=True):
            assert (sampled == "sampled") == (logprob is not None) == (version == 0)
        assert (chain["kind"], chain["weight"], chain["parent"], chain["echo_tiers"]) == ("main", 1.0, None, [None])
        assert done["ledger"]["sampled"] == done["ledger"]["trainable"] == sum(chain["loss_mask"])
        assert (await http.post(path + "/finish", json={"reward": 9}, headers=headers)).json() == done
        late = await http.post(address["base_url"] + "/v1/chat/completions", json=CHAT)
        assert late.status_code == 410
        assert (await http.post(path + "/reward", json={"reward": 1}, headers=headers)).status_code == 409
        assert (await http.delete(path, headers=headers)).status_code == 200
        assert (await http.get(path, headers=headers)).status_code == 404
        assert len(server.gateway) == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/sessions"),
        ("GET", "/sessions/s"),
        ("POST", "/sessions/s/reward"),
        ("POST", "/sessions/s/finish"),
        ("DELETE", "/sessions/s"),
    ],
)
async def test_the_sessions_api_needs_the_admin_token(method, path):
    async with client_of([]) as client:
        for headers in ({}, {"authorization": "Bearer no"}, {"x-api-key": client.api_key}):
            answer = await client.http.request(method, client.server.gateway.origin + path, headers=headers)
            assert answer.status_code == 401
        assert client.session.export is None


@pytest.mark.parametrize(
    "body",
    [
        {"session_id": ""},
        {"session_id": "a\nb"},
        {"session_id": 3},
        {"sampling": []},
        {"sampling": {"temprature": 1}},
        {"sampling": {"temperature": "1"}},
        {"sampling": {"temperature": 0}, "training": True},
        {"sampling": {"top_p": 2}},
        {"sampling": {"max_tokens": 0}},
        {"sampling": {"max_tokens": 1.5}},
        {"training": 1},
        {"extra": 1},
        {"session_id": "s"},
    ],
)
async def test_a_session_that_cannot_be_opened_says_why(body):
    async with client_of([]) as client:
        answer = await client.admin("POST", "/sessions", body)
        assert answer.status_code in (400, 409)
        assert len(answer.json()["error"]["message"]) > 10
        assert len(client.server.gateway) == 1


@pytest.mark.parametrize("reward", ["x", None, True, [1]])
async def test_a_reward_must_be_a_number(reward):
    async with client_of([]) as client:
        assert (await client.admin("POST", "/sessions/s/reward", {"reward": reward})).status_code == 400


async def test_sampling_of_a_session_is_what_was_asked_for():
    model = Model(["a"])
    gateway = gateway_of(model)
    async with serving(gateway), httpx.AsyncClient(verify=False) as http:
        wanted = {"sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 33}}
        headers = {"x-api-key": ADMIN}
        address = (await http.post(gateway.origin + "/sessions", json=wanted, headers=headers)).json()
        await http.post(address["base_url"] + "/v1/chat/completions", json={**CHAT, "temperature": 0, "max_tokens": 99})
        used = model.samplings[0]
        assert (used.temperature, used.top_p, used.top_k, used.max_tokens) == (0.5, 0.9, 7, 33)


async def test_a_client_is_told_what_was_ignored():
    async with client_of(["a", "b"]) as client:
        answer = await client.post("/v1/chat/completions", {**CHAT, "temperature": 0.0, "seed": 1})
        assert answer.headers["x-uniagent-ignored"] == "seed, temperature"
        assert "x-uniagent-ignored" not in (await client.post("/v1/chat/completions", CHAT)).headers


async def test_metrics_are_prometheus_text():
    async with client_of(["hello", call_text("run", "{")]) as client:
        await client.post("/v1/chat/completions", CHAT)
        await client.post("/v1/messages", {**ANTHROPIC, "stream": True})
        await client.get("/nothing")
        await client.finish()
        text = (await client.http.get(client.server.gateway.origin + "/metrics")).text
        assert 'uniagent_requests_total{route="/chat/completions",status="200"} 1' in text
        assert 'uniagent_replies_total{dialect="anthropic",finish=' in text
        assert 'uniagent_ledger_tokens_total{place="trainable"}' in text
        assert "\nuniagent_sessions 1\n" in text
        for line in text.splitlines():
            assert line.startswith("# ") or not math.isnan(float(line.rpartition(" ")[2]))


# ---------------------------------------------------------------- malformed requests


BROKEN: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"{}",
    b"\xff\xfe",
    b'{"messages":NaN}',
    b'{"messages":5,"input":5}',
    b'{"messages":[],"input":[]}',
    b'{"messages":[5],"input":[5]}',
    b'{"messages":[{"role":"king"}],"input":[{"role":"king"}]}',
    b'{"messages":[{"role":"user","content":5}],"input":[{"role":"user","content":5}]}',
    b'{"messages":[{"role":"user","content":[5]}],"input":[{"role":"user","content":[5]}]}',
    b'{"messages":[{"role":"user","content":[{"type":"image"}]}],"input":[{"role":"user","content":[{"type":"input_image"}]}]}',
    b'{"messages":[{"role":"assistant","content":[{"type":"tool_use"}],"tool_calls":[{}]}],"input":[{"type":"function_call"}]}',
    b'{"messages":[{"role":"user","content":"x"}],"input":"x","tools":5}',
    b'{"messages":[{"role":"user","content":"x"}],"input":"x","tools":[5]}',
    b'{"messages":[{"role":"user","content":"x"}],"input":"x","tools":[{"type":"function"}]}',
    b'{"messages":[{"role":"user","content":"x"}],"input":"x","tool_choice":{"type":"tool","name":"no"}}',
    b'{"messages":[{"role":"user","content":"x"}],"input":"x","temperature":"hot"}',
    b'{"messages":[{"role":"user","content":"x"}],"input":"x","temperature":-1}',
    b'{"messages":[{"role":"user","content":"x"}],"input":"x","stream":"yes"}',
    b'{"messages":[{"role":"user","content":"x"}],"input":"x","max_tokens":0,"max_output_tokens":0}',
    b'{"messages":[{"role":"user","content":"x"}],"input":"x","model":5}',
    b'{"messages":[{"role":"user","content":' + b"[" * 50_000 + b'}],"input":1}',
    b'{"messages":[{"role":"user","content":"x"}],"input":"x","x":' + b"[" * 50_000 + b"}",
]


@pytest.mark.parametrize("path", [path for path, _ in DIALECTS])
async def test_malformed_requests_are_refused_in_shape_and_change_nothing(path):
    async with client_of(["hello"]) as client:
        for body in BROKEN:
            answer = await client.post(path, body)
            assert 400 <= answer.status_code < 500, (body[:80], answer.status_code)
            error = answer.json()
            assert error["error"]["type"] == "invalid_request_error"
            assert len(error["error"]["message"]) > 8
            if path == "/v1/messages":
                assert error["type"] == "error"
        assert client.session.turns == ()
        assert client.session.generations == 0
        assert (await client.post(path, dict(DIALECTS)[path])).status_code == 200


@pytest.mark.parametrize(("path", "body"), DIALECTS)
async def test_deeply_nested_arguments_are_no_500(path, body):
    async with client_of(["hello"]) as client:
        deep: Any = 1
        for _ in range(300):
            deep = {"a": deep}
        deep = {"a": deep}
        echo = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": deep}]}
        if "chat" in path:
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps(deep)}}
            echo = {"role": "assistant", "content": None, "tool_calls": [call]}
        if "responses" in path:
            echo = {"type": "function_call", "call_id": "1", "name": "f", "arguments": json.dumps(deep)}
        key = "input" if "responses" in path else "messages"
        answer = await client.post(path, {**body, key: [USER, echo, USER]})
        assert answer.status_code in (200, 400), answer.text


async def test_lone_surrogates_are_taken_and_replaced():
    model = Model(["hello"])
    async with client_of(model) as client:
        body = b'{"messages":[{"role":"user","content":"a \\ud83d b"}],"user":"\\udfff"}'
        assert (await client.post("/v1/chat/completions", body)).status_code == 200
        assert "a \ufffd b" in model.prompts[0]


async def test_a_20_mb_body_is_served():
    async with client_of(["hello"]) as client:
        body = {**CHAT, "metadata": "lorem ipsum " * (20 * 1024 * 1024 // 12)}
        assert (await client.post("/v1/chat/completions", body)).status_code == 200


async def test_a_prompt_longer_than_the_context_is_refused_before_anything_else():
    async with client_of(["hello"], context=1000) as client:
        for path, body in DIALECTS:
            key = "input" if "responses" in path else "messages"
            answer = await client.post(path, {**body, key: [{"role": "user", "content": "a b " * 10_000}]})
            assert answer.status_code == 400
            assert "prompt is too long" in answer.json()["error"]["message"]
        assert client.session.turns == ()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_larger_body_than_allowed_is_refused(chunked):
    async with client_of([], settings=config.Gateway(max_body_mib=1)) as client:
        body = b"{" + b" " * (3 << 20)

        async def pieces():
            for i in range(0, len(body), 65536):
                yield body[i : i + 65536]

        answer = await client.http.post(client.base_url + "/v1/messages", content=pieces() if chunked else body)
        assert answer.status_code == 413
        assert "max_body_mib" in answer.text
        assert (await client.get("/v1/models")).status_code == 200


async def test_10_000_messages():
    async with client_of(["hello", "again"]) as client:
        messages = [{"role": ("user", "assistant")[i % 2], "content": f"m{i}"} for i in range(9_999)]
        assert (await client.post("/v1/chat/completions", {"messages": messages})).status_code == 200
        messages += [{"role": "assistant", "content": "hello"}, USER]
        assert (await client.post("/v1/chat/completions", {"messages": messages})).status_code == 200
        assert (await client.finish())["fates"] == ["live", "live"]


@pytest.mark.parametrize(("path", "body"), DIALECTS)
async def test_duplicate_ids_are_taken(path, body):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "r"}
    histories = {
        "/v1/chat/completions": [
            {"role": "assistant", "tool_calls": [call, call]},
            *[{"role": "tool", "tool_call_id": "c", "content": "r"}] * 2,
        ],
        "/v1/messages": [{"role": "assistant", "content": [use, use]}, {"role": "user", "content": [result, result]}],
        "/v1/responses": [item, item, output, output],
    }
    async with client_of(["hello"]) as client:
        key = "input" if "responses" in path else "messages"
        answer = await client.post(path, {**body, key: [USER, *histories[path]]})
        assert answer.status_code == 200, answer.text


# ---------------------------------------------------------------- HTTP itself


async def test_bad_http_is_told_so():
    async with client_of([]) as client:
        assert b"HTTP/1.1 400" in await raw(client, b"NONSENSE\r\n\r\n")
        assert b"HTTP/1.1 431" in await raw(client, b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"a" * 70_000)
        assert b"HTTP/1.1 400" in await raw(client, b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP/1.1 413" in await raw(
            client, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
        )


async def test_keep_alive_and_pipelining():
    async with client_of(["one", "two"]) as client:
        body = json.dumps(CHAT).encode()
        got = await raw(
            client,
            head(client, "/v1/chat/completions", body)
            + head(client, "/v1/chat/completions", body, "Connection: close"),
        )
        assert got.count(b"HTTP/1.1 200") == 2
        assert got.index(b'"one"') < got.index(b'"two"')


async def test_100_continue_is_given_before_the_body():
    async with client_of(["hello"]) as client:
        body = json.dumps(CHAT).encode()
        request = head(client, "/v1/chat/completions", body, "Expect: 100-continue", "Connection: close")
        port = int(client.server.gateway.origin.rpartition(":")[2])
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request[: -len(body)])
            with trio.fail_after(5):
                assert b"100 Continue" in await stream.receive_some(1000)
                await stream.send_all(body)
                assert b"HTTP/1.1 200" in await stream.receive_some(10_000)


async def test_slow_heads_and_bodies_time_out():
    settings = config.Gateway(header_timeout_s=0.1)
    async with client_of([], settings=settings) as client:
        assert b"HTTP/1.1 408" in await raw(client, b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n")
        assert b"HTTP/1.1 408" in await raw(
            client, b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        )


async def test_idle_connections_are_closed():
    settings = config.Gateway(idle_timeout_s=0.05)
    async with client_of([], settings=settings) as client:
        assert await raw(client, b"") == b""


async def test_http_1_0_and_head_requests():
    async with client_of(["hello"]) as client:
        got = await raw(client, b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b'"status":"ok"' in got
        got = await raw(client, b"HEAD /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert got.endswith(b"\r\n\r\n")


async def test_draining_finishes_answers_and_closes_the_rest():
    gateway = gateway_of([Say("slow", delay_s=0.2)])
    async with serving(gateway) as server, httpx.AsyncClient(verify=False) as http:
        session = gateway.open("s", SessionSampling())
        await http.get(gateway.origin + "/healthz")
        answers: list[httpx.Response] = []

        async def ask() -> None:
            url = session.address.base_url + "/v1/chat/completions"
            answers.append(await http.post(url, json=CHAT, headers={"connection": "keep-alive"}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while not session.running:
                await trio.sleep(0.01)
            with trio.fail_after(5):
                await server.http.drain(4)
        assert text_of(answers[0]) == "slow"
        assert answers[0].headers["connection"] == "close"
        with pytest.raises(httpx.ConnectError):
            await http.get(gateway.origin + "/healthz")


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_generation_as_undelivered(stream):
    async with client_of([Say("lost", delay_s=30), "fine"]) as client:
        body = json.dumps({**CHAT, "stream": stream}).encode()
        port = int(client.server.gateway.origin.rpartition(":")[2])
        gone = await trio.open_tcp_stream("127.0.0.1", port)
        await gone.send_all(head(client, "/v1/chat/completions", body))
        while not client.session.running:
            await trio.sleep(0.005)
        await gone.aclose()
        with trio.fail_after(5):
            while client.session.running:
                await trio.sleep(0.005)
        assert text_of(await client.post("/v1/chat/completions", CHAT)) == "fine"
        done = await client.finish()
        assert done["fates"][-1] == "live"
        assert done["ledger"]["sampled"] - done["ledger"]["trainable"] == sum(done["ledger"]["discarded"].values())


async def test_a_client_that_leaves_before_the_model_is_asked_costs_no_generation():
    waiting, go = trio.Event(), trio.Event()

    async def offload(fn, *args):
        waiting.set()
        await go.wait()
        return fn(*args)

    model = Model(["never"])
    async with client_of(model) as client:
        client.session.parts = evolve(client.session.parts, offload=offload)
        body = json.dumps({"messages": [{"role": "user", "content": "long " * 1000}]}).encode()
        port = int(client.server.gateway.origin.rpartition(":")[2])
        gone = await trio.open_tcp_stream("127.0.0.1", port)
        await gone.send_all(head(client, "/v1/chat/completions", body))
        await waiting.wait()
        await gone.aclose()
        with trio.fail_after(5):
            while not all(c.ended for c in client.server.http.connections):
                await trio.sleep(0.005)
            go.set()
            while client.server.http.connections:
                await trio.sleep(0.005)
        assert model.prompts == []
        assert client.session.turns == ()


async def test_a_cut_stream_leaves_an_undelivered_answer_and_a_retry_is_live():
    async with client_of(["x" * 2000, "fine"]) as client:
        body = json.dumps({**CHAT, "stream": True}).encode()
        await raw(client, head(client, "/v1/chat/completions", body), until=b'{"content":"x"}')
        with trio.fail_after(10):
            while client.session.running:
                await trio.sleep(0.005)
        assert text_of(await client.post("/v1/chat/completions", CHAT)) == "fine"
        done = await client.finish()
        assert done["fates"] == ["undelivered", "live"]
        assert set(done["ledger"]["discarded"]) == {"undelivered"}


async def test_an_answer_that_was_sent_whole_is_delivered():
    async with client_of(["one", "two"]) as client:
        await client.post("/v1/chat/completions", {**CHAT, "stream": True})
        await client.post("/v1/messages", ANTHROPIC)
        assert all(a.acted.delivered for a in client.session.tree.history.actions)


async def test_pings_keep_a_quiet_stream_alive():
    for path, body in DIALECTS:
        async with client_of([Say("hello", delay_s=0.2)], ping_s=0.05) as client:
            answer = await client.post(path, {**body, "stream": True})
            assert answer.status_code == 200
            assert ("event: ping" if path == "/v1/messages" else ": keep-alive") in answer.text
            assert "hello" in "".join(json.dumps(d) for _, d in sse(answer.text)) or "o" in answer.text


# ---------------------------------------------------------------- errors of the model


@pytest.mark.parametrize(("path", "body"), DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_past_the_end_of_the_script_is_409_in_shape(path, body, stream):
    async with client_of([]) as client:
        answer = await client.post(path, {**body, "stream": stream})
        assert answer.status_code == 409
        assert "script" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), DIALECTS)
async def test_an_engine_that_fails_in_mid_stream_ends_it_with_an_error_event(path, body):
    async with client_of([]) as client:

        async def fails(prompt, sampling, *, session, on_tokens=None, on_abort=None):
            on_tokens(Model(["ab"])(prompt, sampling, session).token_ids[:1])
            await trio.sleep(0.05)
            raise Problem(503, "engine_gone", "the engine went away: try again")

        client.session.parts.engine.generate = fails
        answer = await client.post(path, {**body, "stream": True})
        assert answer.status_code == 200
        assert "the engine went away" in answer.text
        assert client.session.turns == ()


async def test_a_crash_is_a_500_that_is_logged_and_leaves_the_server_up(caplog):
    def crash(prompt, sampling, session):
        raise KeyError("bug")

    async with client_of(crash) as client:
        assert (await client.post("/v1/chat/completions", CHAT)).status_code == 500
        assert "KeyError" in caplog.text
        assert (await client.get("/v1/models")).status_code == 200


async def test_in_process_and_http_share_a_session():
    async with client_of(["one", "two"]) as client:
        reply = await client.session.ask(ModelCall((Message("user", "hi there"),)))
        messages = [USER, {"role": "assistant", "content": reply.text}, USER]
        await client.post("/v1/chat/completions", {"messages": messages})
        done = await client.finish()
        assert done["fates"] == ["live", "live"]
        (chain,) = done["trajectories"]
        mask = [t for t, m in zip(chain["token_ids"], chain["loss_mask"], strict=True) if m]
        assert decode(mask) == f"one{END}two{END}"
