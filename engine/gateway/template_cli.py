"""``uniagent template MODEL``: what the probe says of a model's chat template, as a table or one line of JSON.

MODEL is a Hugging Face folder, builtin:NAME, or a ``.jinja`` file. For a file, ``--tokenizer`` names the folder whose
tokenizer says what the control tokens are; without it they are guessed from the file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from uniagent.engine import registry
from uniagent.engine.errors import UserError
from uniagent.engine.gateway.chat_template import ChatTemplate, RenderError
from uniagent.engine.gateway.encoder import Encoder
from uniagent.engine.gateway.model_folder import (
    choose_parser,
    special_tokens,
    stop_tokens,
    template_source,
    tokenizer_json,
)
from uniagent.engine.gateway.template import TemplateStrategy, probe

# what control tokens look like in template sources: <|x|>, <｜x｜>, <x|>, <|x>, </s>, [X], and a few of their own kind
GUESS = re.compile(
    r"<[|｜][^<>\n]*?[|｜]>|<[|][A-Za-z_]+>|<[A-Za-z_]+[|]>|</?s>|<SPECIAL_\d+>|\[/?[A-Z_]+\]|\]~!?b\[?\]?|\[e~\[|<[BE]OS>"
    r"|</?(?:tool_call|tool_response|think|arg_key|arg_value|start_of_turn|end_of_turn|minimax:tool_call)>"
)
PLACEHOLDERS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 for append and re-render, 2 for refuse; UserError for what cannot be read."""
    parser = argparse.ArgumentParser(prog="uniagent template", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, builtin:NAME, or a .jinja file")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="for a .jinja file: the folder of its tokenizer")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    args = parser.parse_args(argv)
    report = examine(args.model, args.tokenizer)
    print(json.dumps(report, ensure_ascii=False) if args.json else table(report))
    return 2 if report["strategy"] == "refuse" else 0


def examine(model: str, tokenizer: str | None = None) -> dict[str, Any]:
    """The verdict as JSON."""
    if model.endswith(".jinja"):
        file, folder = Path(model), Path(tokenizer) if tokenizer else None
        if not file.is_file():
            raise UserError(f"{model}: there is no such file")
        source, variables = file.read_text(encoding="utf-8"), PLACEHOLDERS
        if folder is not None:
            variables = special_tokens(folder)
    else:
        folder = _folder(model)
        source, variables = template_source(folder)
    try:
        template = ChatTemplate(source, specials=variables, now=datetime.now())
    except RenderError as problem:
        raise UserError(f"{model}: {problem}") from problem
    family = choose_parser("auto", source)
    stops: list[str | int] = []
    if folder is None:
        verdict = probe(template, GUESS)
    else:
        encoder = Encoder(tokenizer_json(folder), source + "\n".join(family.markers))
        verdict = probe(template, encoder.pattern)
        stops = [(encoder.token(s) if isinstance(s, int) else s) or s for s in stop_tokens(folder, variables)]
    return _report(model, verdict, getattr(family, "name", "?"), stops)


def _folder(model: str) -> Path:
    kind, _, name = model.partition(":")
    return Path(registry.load("models", name)()) if kind == "builtin" and name else Path(model)


def _report(model: str, verdict: TemplateStrategy, parser: str, stops: list[str | int]) -> dict[str, Any]:
    prompts = dict(verdict.prompts)
    return {
        "model": model,
        "strategy": verdict.kind,
        "why": verdict.why,
        "parser": parser,
        "generation_prompt": prompts.get("user", ""),
        "generation_prompt_after_tool": prompts.get("tool", ""),
        "turn_ends": list(verdict.ends.closers or verdict.ends.openers),
        "turn_end_opens_next": bool(verdict.ends.openers),
        "stops": [*verdict.stops, *dict.fromkeys(s for s in stops if s not in verdict.stops)],
        "answers": dict(verdict.answers),
    }


def table(report: dict[str, Any]) -> str:
    rows: list[tuple[str, str]] = [("model", report["model"]), ("strategy", report["strategy"]), ("why", report["why"])]
    rows += [("parser of answers", report["parser"])]
    rows += [("generation prompt", repr(report["generation_prompt"]))]
    rows += [("… after a tool result", repr(report["generation_prompt_after_tool"]))]
    ends = " ".join(report["turn_ends"]) + (" (it opens the next turn)" if report["turn_end_opens_next"] else "")
    rows += [("a model turn ends with", ends), ("generation stops at", " ".join(map(str, report["stops"])))]
    rows += list(report["answers"].items())
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as problem:
        sys.exit(f"uniagent template: {problem}")
