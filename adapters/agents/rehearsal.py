"""A rehearsal of an agent without a model: a real gateway on loopback, whose answers are a function of the request.

What the function gives is raw template text in the manner of Qwen's models (``<think>``, JSON in ``<tool_call>``). It
is encoded with control tokens allowed and goes through the gateway as any model's answer does. Every request is kept
as it was heard. For checking harnesses and for tests; no torch.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import trio
from attrs import define, field, frozen

from uniagent.adapters.engines.scripted import Answer, ScriptedEngine
from uniagent.engine import config, model_files
from uniagent.engine.gateway.chat_template import ChatTemplate
from uniagent.engine.gateway.codec import Codec
from uniagent.engine.gateway.model_folder import build, tokenizer_json
from uniagent.engine.gateway.server import ROUTES, GatewayServer, limits_of, listen
from uniagent.engine.gateway.session import SessionParts, inline
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.messages import ModelCall, Problem, Reply
from uniagent.engine.ports import Dialect, EventWriter, Finish, Ids, Json, Sampling
from uniagent.engine.registry import load

END = "<|im_end|>"
CONTEXT = 1 << 20
# like the tiny model's, but with tools and reasoning
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content or '' }}
{%- for tool_call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments if tool_call.function.arguments is string
    else tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@frozen
class Say:
    """An answer: raw text, closed by the end of the turn unless it is ``cut`` at the length limit."""

    text: str
    delay_s: float = 0.0
    cut: bool = False


Play = Callable[[ModelCall], "str | Say"]


@define(eq=False)
class Stage:
    """``calls`` are the requests in the order they came."""

    gateway: Gateway
    server: GatewayServer
    calls: list[ModelCall] = field(factory=list)


@asynccontextmanager
async def stage(play: Play, *, settings: config.Gateway | None = None) -> AsyncIterator[Stage]:
    """A gateway that listens on loopback until the block ends. ``play`` may raise Problem, which the harness gets."""
    source = tokenizer_json(model_files.folder("builtin:tiny-shell"))
    codec: Codec = build(source, ChatTemplate(TEMPLATE, now=datetime.now()))
    current: ContextVar[ModelCall] = ContextVar("current")
    encode = _encoder(source)

    def respond(prompt: Ids, sampling: Sampling, session: str) -> Answer:
        answer = play(current.get())
        said = answer if isinstance(answer, Say) else Say(answer)
        ids = encode(said.text if said.cut else said.text + END)
        return Answer(ids, finish=Finish.LENGTH if said.cut else None, delay_s=said.delay_s)

    calls: list[ModelCall] = []

    def hear(call: ModelCall) -> None:
        current.set(call)  # the request's own task asks the engine, so this is the call the engine answers
        calls.append(call)

    settings = settings or config.Gateway()
    gateway = Gateway(SessionParts(codec, ScriptedEngine(respond, context=CONTEXT), inline), model_name="rehearsed")
    dialects = {name: _Overheard(load("dialects", name)(), hear) for name in ROUTES.values()}
    server = GatewayServer(gateway, dialects, limits=limits_of(settings))
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(listen, gateway, settings, server=server))
        yield Stage(gateway, server, calls)
        nursery.cancel_scope.cancel()


def call_text(name: str, arguments: Mapping[str, Json] | str) -> str:
    """A tool call as the model writes it; arguments as they shall be sampled, or an object."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def _encoder(source: str) -> Callable[[str], Ids]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(source)
    return lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


@define(eq=False)
class _Overheard:
    """A dialect whose requests somebody listens to."""

    dialect: Dialect
    hear: Callable[[ModelCall], None]
    name: str = field(init=False)
    items: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.name, self.items = self.dialect.name, self.dialect.items

    def memo(self) -> Any:
        return self.dialect.memo()

    def parse(self, body: Json, memo: Any = None) -> ModelCall:
        call = self.dialect.parse(body, memo)
        self.hear(call)
        return call

    def reply(self, call: ModelCall, replies: Sequence[Reply]) -> Json:
        return self.dialect.reply(call, replies)

    def events(self, call: ModelCall) -> EventWriter:
        return self.dialect.events(call)

    def sent(self, call: ModelCall, replies: Sequence[Reply], memo: Any) -> None:
        self.dialect.sent(call, replies, memo)

    def error(self, problem: Problem) -> tuple[int, Json]:
        return self.dialect.error(problem)
