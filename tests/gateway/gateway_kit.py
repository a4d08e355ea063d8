"""A gateway for tests: the tiny tokenizer, a template with tools and reasoning, a scripted model, real sockets."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import trio
from attrs import define, evolve, field, frozen

from uniagent.adapters.engines.scripted import Answer, ScriptedEngine
from uniagent.engine import config
from uniagent.engine.gateway.chat_template import ChatTemplate
from uniagent.engine.gateway.codec import Codec
from uniagent.engine.gateway.model_folder import build
from uniagent.engine.gateway.server import GatewayServer, listen, server_of
from uniagent.engine.gateway.session import GatewaySession, SessionParts, inline
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.messages import Problem
from uniagent.engine.ports import Capacity, Finish, Ids, Sampling, SessionSampling
from uniagent.engine.trajectory.nodes import TreePolicy

ADMIN = "admin-token"
END = "<|im_end|>"
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content or '' }}
{%- for tool_call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments if tool_call.function.arguments is string
    else tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@functools.cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer_json())


@functools.cache
def tokenizer_json() -> str:
    import uniagent.tasks.shell_quest as quest

    return (Path(quest.__file__).parent / "tiny_shell" / "tokenizer.json").read_text()


@functools.cache
def codec() -> Codec:
    return build(tokenizer_json(), ChatTemplate(TEMPLATE, now=datetime(2026, 1, 1)))


def encode(text: str) -> Ids:
    """Raw template text, control tokens allowed."""
    return np.array(tokenizer().encode(text, add_special_tokens=False).ids, np.int32)


def decode(ids: Iterable[int]) -> str:
    return str(tokenizer().decode([int(i) for i in ids], skip_special_tokens=False))


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@frozen
class Say:
    """One scripted answer: raw text, closed by the end of turn unless it was cut at the length limit."""

    text: str
    length: bool = False
    delay_s: float = 0.0

    def answer(self) -> Answer:
        ids = encode(self.text if self.length else self.text + END)
        return Answer(ids, finish=Finish.LENGTH if self.length else None, delay_s=self.delay_s)


@define
class Model:
    """Says the given answers in order, whoever asks; keeps the prompts and samplings it was given."""

    script: list[Say | str]
    prompts: list[str] = field(factory=list)
    samplings: list[Sampling] = field(factory=list)

    def __call__(self, prompt: Ids, sampling: Sampling, session: str) -> Answer:
        self.prompts.append(decode(prompt))
        self.samplings.append(sampling)
        if not self.script:
            raise Problem(409, "script_exhausted", "the script has no answer left")
        said = self.script.pop(0)
        return (Say(said) if isinstance(said, str) else said).answer()


class Unscripted(ScriptedEngine):
    """One that passes for a model that samples: it holds no answer to what a client demands of it."""

    def capacity(self) -> Capacity:
        return evolve(super().capacity(), scripted=False)


def gateway_of(
    respond: Callable[..., Any] | Sequence[Say | str],
    *,
    policy: TreePolicy | None = None,
    trust: bool = False,
    context: int = 1 << 20,
    scripted: bool = True,
    **options: Any,
) -> Gateway:
    model = respond if callable(respond) else Model(list(respond))
    parts = SessionParts(
        codec(), (ScriptedEngine if scripted else Unscripted)(model, context=context), inline, trust_client=trust
    )
    return Gateway(parts, policy or TreePolicy(), secret=b"secret", **options)


def session_of(respond: Callable[..., Any] | Sequence[Say | str], **options: Any) -> GatewaySession:
    sampling = options.pop("sampling", SessionSampling())
    training = options.pop("training", True)
    return gateway_of(respond, **options).open("s", sampling, training=training)


@define
class Client:
    """A harness: raw requests to one session's base URL."""

    http: httpx.AsyncClient
    server: GatewayServer
    base_url: str
    api_key: str
    session: GatewaySession

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(self.base_url + path, content=content, **options)

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(self.base_url + path)

    async def admin(self, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {ADMIN}"}
        origin = self.server.gateway.origin
        return await self.http.request(method, origin + path, json=body, headers=headers)

    async def finish(self, reward: float = 1.0) -> dict[str, Any]:
        answer = await self.admin("POST", "/sessions/s/finish", {"reward": reward})
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]


@asynccontextmanager
async def serving(
    gateway: Gateway, *, settings: config.Gateway | None = None, ping_s: float = 15.0
) -> AsyncIterator[GatewayServer]:
    settings = settings or config.Gateway()
    server = server_of(gateway, settings, admin_token=ADMIN)
    server.ping_s = ping_s
    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(listen, gateway, settings, server=server))
        yield server
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def client_of(
    respond: Callable[..., Any] | Sequence[Say | str],
    *,
    sampling: SessionSampling | None = None,
    training: bool = True,
    settings: config.Gateway | None = None,
    ping_s: float = 15.0,
    **options: Any,
) -> AsyncIterator[Client]:
    """A server, one open session named ``s``, and a client of it."""
    gateway = gateway_of(respond, **options)
    async with (
        serving(gateway, settings=settings, ping_s=ping_s) as server,
        httpx.AsyncClient(timeout=60, verify=False) as http,
    ):
        session = gateway.open("s", sampling or SessionSampling(), training=training)
        yield Client(http, server, session.address.base_url, session.address.api_key, session)


def sse(text: str) -> list[tuple[str | None, Any]]:
    """Server-sent events: (event, data), data as JSON where it is."""
    out = []
    for block in text.split("\n\n"):
        fields = [line.partition(": ") for line in block.split("\n") if line and not line.startswith(":")]
        data = "".join(value for name, _, value in fields if name == "data")
        event = next((value for name, _, value in fields if name == "event"), None)
        if data:
            out.append((event, data if data == "[DONE]" else json.loads(data)))
    return out
