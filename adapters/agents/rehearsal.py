"""A rehearsal of an agent without a model: a real gateway on loopback, whose answers are a function of the request.

What the function gives is raw template text in the manner of Qwen's models (``<think>``, JSON in ``<tool_call>``). It
is encoded with control tokens allowed and goes through the gateway as any model's answer does. Every request is kept
as it was heard. For checking harnesses and for tests; no torch.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import partial

import numpy as np
import trio
from attrs import define, field, frozen

from uniagent.adapters.engines.scripted import Answer, ScriptedEngine
from uniagent.engine import config, model_files
from uniagent.engine.gateway.chat_template import ChatTemplate
from uniagent.engine.gateway.codec import Codec
from uniagent.engine.gateway.decoder import Decoder
from uniagent.engine.gateway.model_folder import build, tokenizer_json
from uniagent.engine.gateway.server import GatewayServer, listen, server_of
from uniagent.engine.gateway.session import SessionParts, inline
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.messages import ModelCall
from uniagent.engine.ports import Finish, Ids, Json, Sampling

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
    """``calls`` are the requests that were answered, in order."""

    gateway: Gateway
    server: GatewayServer
    calls: list[ModelCall] = field(factory=list)


@asynccontextmanager
async def stage(play: Play, *, settings: config.Gateway | None = None) -> AsyncIterator[Stage]:
    """A gateway that listens on loopback until the block ends. ``play`` may raise Problem, which the harness gets."""
    source = tokenizer_json(model_files.folder("builtin:tiny-shell"))
    current: ContextVar[ModelCall] = ContextVar("current")
    encode = _encoder(source)

    def respond(prompt: Ids, sampling: Sampling, session: str) -> Answer:
        answer = play(current.get())
        said = answer if isinstance(answer, Say) else Say(answer)
        ids = encode(said.text if said.cut else said.text + END)
        return Answer(ids, finish=Finish.LENGTH if said.cut else None, delay_s=said.delay_s)

    calls: list[ModelCall] = []

    def hear(call: ModelCall) -> None:
        current.set(call)  # what decodes an answer runs in the task that asks the engine for it
        calls.append(call)

    settings = settings or config.Gateway()
    codec = _Overheard(build(source, ChatTemplate(TEMPLATE, now=datetime.now())), hear)
    gateway = Gateway(SessionParts(codec, ScriptedEngine(respond, context=CONTEXT), inline), model_name="rehearsed")
    server = server_of(gateway, settings)
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


class _Overheard(Codec):
    """A codec that tells whoever listens which request the next generation answers, asked over HTTP or in-process."""

    def __init__(self, codec: Codec, hear: Callable[[ModelCall], None]) -> None:
        parts = codec.encoder, codec.token_bytes, codec.template, codec.strategy, codec.parser_factory
        super().__init__(*parts, codec.stop_ids)
        self.hear = hear

    def decoder(self, call: ModelCall, call_ids: Callable[[int, str], str]) -> Decoder:
        self.hear(call)
        return super().decoder(call, call_ids)
