"""A conversation over a codec, turn by turn, and what must hold after each: helpers for the codec's tests."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
from attrs import frozen
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from uniagent.engine.gateway.chat_template import ChatTemplate
from uniagent.engine.gateway.codec import Codec
from uniagent.engine.gateway.model_folder import build
from uniagent.engine.messages import Call, Message, ModelCall
from uniagent.engine.ports import Ids, Sampling
from uniagent.engine.trajectory.types import Provenance, Sampled, Segment

examples = settings(deadline=None, max_examples=60)
TINY = Path(__file__).parents[2] / "tasks" / "shell_quest" / "tiny_shell"
NOW = datetime(2026, 3, 4)
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
PROSE = """The user asks a question.\n\nSystem: you are helpful. assistant user tool {"name": "shell"} <b>bold</b> a < b
[1, 2] \n\n  indented\n\n\n\tlines, names: look_up, command, arguments; and so on and on, the end of the day."""
CHATML = """
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
        {%- for c in m.tool_calls or [] %}
            {{- '<tool_call>\\n' + (c.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
CHATML_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)


@frozen(eq=False)
class Action:
    """An action of the turn tree, as far as the codec cares."""

    sampled: Sampled
    message: Message
    order: int = 0


@frozen
class Pending:
    message: Message
    moved: tuple[Action, int] | None = None


def pend(*messages: Message) -> list[Pending]:
    return [Pending(m) for m in messages]


@functools.cache
def byte_level(tokens: tuple[str, ...] = CHATML_TOKENS, special: bool = False) -> str:
    """A small byte-level BPE tokenizer with these added tokens, trained on a little prose so that cuts matter; JSON."""
    tk = Tokenizer(models.BPE())
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tk.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tk.train_from_iterator([PROSE] * 4, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, min_frequency=2))
    is_special = {t: special or t.startswith(("<|", "[", "<s", "</s", "]")) for t in tokens}
    tk.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens if is_special[t]])
    tk.add_tokens([AddedToken(t, special=False, normalized=False) for t in tokens if not is_special[t]])
    return str(tk.to_str())


@functools.cache
def codec_of(template: str, tokens: tuple[str, ...] = CHATML_TOKENS, parser: str = "auto") -> Codec:
    variables = {"bos_token": "<s>", "eos_token": "</s>"} if "</s>" in tokens else {}
    return build(byte_level(tokens), ChatTemplate(template, specials=variables, now=NOW), parser=parser)


@functools.cache
def tiny() -> Codec:
    return Codec.from_folder(TINY, now=NOW)


def sampled(ids: Sequence[int] | Ids, **more: object) -> Sampled:
    array = np.asarray(ids, np.int32)
    return Sampled(array, np.zeros(len(array), np.float32), (), (), "stop", Sampling(64), **more)  # type: ignore[arg-type]


def encode(codec: Codec, text: str) -> Ids:
    """Template text to ids, control tokens allowed."""
    return np.array(codec.encoder._plain.encode(text, add_special_tokens=False).ids, np.int32)


def decode(codec: Codec, segments: Sequence[Segment] | Ids) -> str:
    ids = segments if isinstance(segments, np.ndarray) else joined(segments)
    return str(codec.encoder._plain.decode(ids.tolist(), skip_special_tokens=False))


def joined(segments: Sequence[Segment]) -> Ids:
    return np.concatenate([s.ids for s in segments]) if segments else np.zeros(0, np.int32)


def texts(codec: Codec, segments: Sequence[Segment], kind: Provenance) -> list[str]:
    return [decode(codec, s.ids) for s in segments if s.kind is kind]


def controls(codec: Codec, segments: Sequence[Segment]) -> int:
    """Control tokens among the ids."""
    wanted = set(codec.encoder.ids.values())
    return sum(int(i) in wanted for i in joined(segments))


def request(*messages: Message, tools: bool = True) -> ModelCall:
    return ModelCall(messages, (SHELL,) if tools else ())


def shell_call(id: str, command: str = "ls") -> Call:
    return Call(id, "shell", json.dumps({"command": command}))
