"""The families: for each one table row of markers and grammars, and how to recognise its chat template.

A row is a parser factory: called with the generation prompt and the tools it gives the parser of one generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from uniagent.adapters.parsers.grammars import json_calls
from uniagent.adapters.parsers.machine import Format, MarkerParser, Region
from uniagent.engine.ports import Json, Parser


@frozen
class Family:
    """A parser factory for models that write in ``format``; ``signs`` are texts that all stand in its templates."""

    name: str
    format: Format
    signs: tuple[str, ...] = ()

    @property
    def markers(self) -> Sequence[str]:
        return self.format.markers

    def __call__(self, prefix: str = "", tools: Sequence[Mapping[str, Json]] = ()) -> Parser:
        return MarkerParser(self.format, prefix, tools)


THINK = ("<think>", "</think>")

qwen = Family(
    "qwen",
    Format((Region("<tool_call>", "</tool_call>", json_calls),), THINK),
    ("<tool_call>",),
)
plain = Family("plain", Format((), THINK))

ALL = (qwen,)


def choose(template: str) -> Family:
    """The family whose signs stand in the template source; ``plain`` (no calls) when none does."""
    return next((f for f in ALL if f.signs and all(s in template for s in f.signs)), plain)
