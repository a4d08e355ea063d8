"""The families: for each one a table row of markers and grammars, and how to recognise its chat template.

A row is a parser factory: called with the generation prompt, the tools and the control tokens that are marked in the
text, it gives the parser of one generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from uniagent.adapters.parsers import harmony
from uniagent.adapters.parsers.grammars import (
    deepseek_call,
    gemma_call,
    glm_call,
    invoke_call,
    json_calls,
    kimi_call,
    kimi_element_call,
    mistral_calls,
    pythonic_calls,
    qwen_bare_call,
    qwen_xml_call,
    strict_json_calls,
)
from uniagent.adapters.parsers.machine import Format, MarkerParser, Region
from uniagent.engine.ports import Json, Parser


@frozen
class Family:
    """A parser factory for models that write in ``format``; its templates have all texts of one of the ``signs``."""

    name: str
    format: Format
    signs: tuple[tuple[str, ...], ...] = ()

    @property
    def markers(self) -> Sequence[str]:
        return self.format.markers

    def __call__(
        self, prefix: str = "", tools: Sequence[Mapping[str, Json]] = (), control: Sequence[str] = ()
    ) -> Parser:
        return MarkerParser(self.format, prefix, tools, control)


@frozen
class Harmony:
    """The family that is no Format: see harmony.py."""

    name: str = "gpt_oss"
    signs: tuple[tuple[str, ...], ...] = (("<|channel|>", "<|message|>"),)
    markers: tuple[str, ...] = harmony.MARKERS

    def __call__(
        self, prefix: str = "", tools: Sequence[Mapping[str, Json]] = (), control: Sequence[str] = ()
    ) -> Parser:
        return harmony.HarmonyParser(prefix, tools, control)


THINK = (("<think>", "</think>"),)
DSML = "｜DSML｜"

qwen = Family("qwen", Format((Region("<tool_call>", ("</tool_call>",), json_calls),), THINK), (("<tool_call>",),))
qwen_xml = Family(
    "qwen_xml",
    Format(
        (
            Region("<tool_call>", ("</tool_call>",), qwen_xml_call),
            Region("<function=", ("</function>",), qwen_bare_call),
        ),
        THINK,
        noise=("</tool_call>",),
    ),
    (("<tool_call>", "<function="),),
)
glm = Family(
    "glm",
    Format(
        (Region("<tool_call>", ("</tool_call>",), glm_call),),
        THINK,
        noise=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    (("<tool_call>", "<arg_key>"),),
)
deepseek = Family(
    "deepseek",
    Format(
        (Region("<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>",), deepseek_call),),
        THINK,
        sections=(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
        noise=("<｜tool▁sep｜>",),
    ),
    (("<｜tool▁call▁begin｜>",),),
)
deepseek_dsml = Family(
    "deepseek_dsml",
    Format(
        (
            Region(f'<{DSML}invoke name="', (f"</{DSML}invoke>", "/>"), invoke_call(DSML, quoted=True)),
            Region(f'<{DSML} invoke name="', (f"</{DSML} invoke>", "/>"), invoke_call(DSML + " ", quoted=True)),
        ),
        THINK,
        sections=tuple((f"<{DSML}{s}>", f"</{DSML}{s}>") for s in ("function_calls", "tool_calls", " calls")),
        noise=(DSML,),
    ),
    (("DSML",),),
)
kimi = Family(
    "kimi",
    Format(
        (Region("<|tool_call_begin|>", ("<|tool_call_end|>",), kimi_call),),
        THINK,
        sections=(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        noise=("<|tool_call_argument_begin|>",),
    ),
    (("<|tool_call_begin|>", "<|tool_calls_section_begin|>"),),
)
kimi_k3 = Family(
    "kimi_k3",
    Format(
        (Region('<|open|>call tool="', ("<|close|>call<|sep|>",), kimi_element_call),),
        (("<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
        sections=(("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
        noise=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        speaks=("<|open|>response<|sep|>",),
    ),
    (("<|open|>", "<|sep|>"),),
)
gemma4 = Family(
    "gemma4",
    Format(
        (Region("<|tool_call>", ("<tool_call|>",), gemma_call),),
        (("<|channel>thought", "<channel|>"),),
        noise=("<|tool_response>", '<|"|>'),
    ),
    (("<|tool_call>", "<|channel>"),),
)
minimax = Family(
    "minimax",
    Format(
        (Region('<invoke name="', ("</invoke>",), invoke_call()),),
        THINK,
        sections=(("<minimax:tool_call>", "</minimax:tool_call>"),),
    ),
    (("minimax:tool_call",),),
)
mistral = Family(
    "mistral",
    Format(
        (Region("[TOOL_CALLS]", ("}", "]"), mistral_calls, keeps=True),),
        (("[THINK]", "[/THINK]"), ("<think>", "</think>")),
        noise=("[ARGS]", "[CALL_ID]"),
    ),
    (("[TOOL_CALLS]",),),
)
llama = Family(
    "llama",
    Format(
        (
            Region("<|python_tag|>", ("}",), json_calls, keeps=True),
            Region("{", ("}",), strict_json_calls, keeps=True, starts=True),
        )
    ),
    (("<|start_header_id|>", "ipython"), ("<|python_tag|>",)),
)
pythonic = Family(
    "pythonic",
    Format(
        (Region("[", ("]",), pythonic_calls, keeps=True, starts=True),), noise=("<|python_start|>", "<|python_end|>")
    ),
    (("<|header_start|>",),),
)
gpt_oss = Harmony()
plain = Family("plain", Format((), THINK))

# in the order they are asked: the more particular first
ALL = (gpt_oss, qwen_xml, glm, kimi, kimi_k3, gemma4, deepseek_dsml, deepseek, minimax, mistral, pythonic, llama, qwen)


def choose(template: str) -> Family | Harmony:
    """The family whose signs stand in the template source; ``plain`` (reasoning, no calls) when none does."""
    return next((f for f in ALL if any(all(s in template for s in signs) for signs in f.signs)), plain)
