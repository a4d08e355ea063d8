"""Render a model's chat template as its own library would, with a frozen date and without loading torch.

The environment is the one model authors test against (sandboxed jinja, trimmed blocks, loop controls, ``tojson`` that
keeps non-ASCII text, ``raise_exception``, ``strftime_now``, ``{% generation %}`` ignored). Knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from uniagent.engine.ports import Json


class RenderError(ValueError):
    """The template refuses these messages, or cannot digest them; the text is the template's own complaint."""


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for other trainers; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. ``specials`` are the variables bos_token, eos_token, …; ``options`` further ones, such as
    enable_thinking; ``now`` is what ``strftime_now`` sees, for good. Rendering is thread-safe."""

    def __init__(
        self,
        source: str,
        *,
        specials: Mapping[str, str] | None = None,
        options: Mapping[str, Json] | None = None,
        now: datetime,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = now.strftime
        self.source = source
        self.now = now
        self._variables: dict[str, Any] = {**(specials or {}), **(options or {})}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as problem:
            raise RenderError(
                f"the chat template does not compile: line {problem.lineno}: {problem.message}"
            ) from problem

    def render(
        self, messages: Sequence[Mapping[str, Json]], tools: Sequence[Mapping[str, Json]] = (), generate: bool = True
    ) -> str:
        """The prompt text; with ``generate`` up to the first token to be sampled. Raises RenderError."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generate,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as problem:
            raise RenderError(str(problem) or type(problem).__name__) from problem
