"""A Hugging Face folder to a Codec: which files hold the tokenizer, the template and the stop ids.

Reads ``tokenizer.json`` with the ``tokenizers`` library alone; a folder without one is converted by transformers, which
is slow to import. Never runs code from the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uniagent.engine.errors import UserError
from uniagent.engine.gateway.chat_template import ChatTemplate, RenderError
from uniagent.engine.gateway.decoder import TokenBytes
from uniagent.engine.gateway.encoder import Encoder
from uniagent.engine.gateway.template import probe
from uniagent.engine.ports import Json
from uniagent.engine.registry import load as registered

if TYPE_CHECKING:
    from uniagent.engine.gateway.codec import Codec, ParserFactory


def load(folder: Path, *, parser: str, now: datetime | None, options: Mapping[str, Json] | None) -> Codec:
    """The codec of a folder; raises UserError when there is no template, no tokenizer, or no sound strategy."""
    source, variables = template_source(folder)
    stops = stop_tokens(folder, variables)
    try:
        template = ChatTemplate(source, specials=variables, options=options, now=now or datetime.now())
    except RenderError as problem:
        raise UserError(f"{folder}: {problem}") from problem
    return build(tokenizer_json(folder), template, parser=parser, stops=stops, where=str(folder))


def build(
    tokenizer: str,
    template: ChatTemplate,
    *,
    parser: str = "auto",
    stops: Sequence[str | int] = (),
    where: str = "model",
) -> Codec:
    """The codec of a tokenizer (as JSON) and a template; ``stops`` are further tokens or ids that end a generation."""
    from uniagent.engine.gateway.codec import Codec

    factory = choose_parser(parser, template.source)
    encoder = Encoder(tokenizer, template.source + "\n".join(factory.markers))
    strategy = probe(template, encoder.pattern)
    if strategy.kind == "refuse":
        raise UserError(f"{where}: the chat template cannot be used: {strategy.why}")
    ids = [s if isinstance(s, int) else encoder.token_id(s) for s in stops]
    return Codec(
        encoder,
        token_bytes_of(tokenizer, encoder, factory),
        template,
        strategy,
        factory,
        [i for i in ids if i is not None],
    )


def choose_parser(name: str, template: str) -> ParserFactory:
    """The parser factory of a registered name; ``auto`` asks the template."""
    found = registered("parsers", name)
    factory: ParserFactory = found(template) if name == "auto" else found
    return factory


def token_bytes_of(tokenizer: str, encoder: Encoder, factory: ParserFactory) -> TokenBytes:
    spec = json.loads(tokenizer)
    kinds = [d.get("type") for d in _steps(spec.get("decoder"), "decoders")]
    byte_level = "ByteLevel" in kinds
    if not byte_level and not {"ByteFallback", "Metaspace", "Replace"} & set(kinds):
        raise UserError(f"the tokenizer's decoder ({', '.join(map(str, kinds)) or 'none'}) does not give bytes to ids")
    added = spec.get("added_tokens") or []
    written = "\n".join(factory.markers)
    marked = {t["id"] for t in added if t["content"] in written and encoder.control >= {t["content"]}}
    return TokenBytes(
        encoder.token,
        byte_level=byte_level,
        added={t["id"]: t["content"] for t in added},
        silent=frozenset(t["id"] for t in added if t.get("special")) - marked,
        marked=frozenset(marked),
    )


def _steps(step: Any, key: str) -> list[dict[str, Any]]:
    return [part for inner in step[key] for part in _steps(inner, key)] if step and key in step else [step or {}]


def tokenizer_json(folder: Path) -> str:
    file = folder / "tokenizer.json"
    if file.exists():
        return file.read_text(encoding="utf-8")
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    try:
        from transformers import AutoTokenizer

        return str(AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer.to_str())
    except (OSError, ValueError, AttributeError, ImportError) as problem:
        raise UserError(f"{folder}: no tokenizer.json, and no fast tokenizer can be made of it: {problem}") from problem


def template_source(folder: Path) -> tuple[str, dict[str, str]]:
    """The chat template's source, and the variables (bos_token, …) it may print."""
    config = _json(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else None
    source = source or _json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(source, list):  # several, by name
        by_name = {t["name"]: t["template"] for t in source}
        source = by_name.get("tool_use") or by_name.get("default")
    if not source:
        raise UserError(f"{folder}: no chat template: put one into chat_template.jinja")
    return str(source), special_tokens(folder)


def _text(token: Any) -> str:
    return token if isinstance(token, str) else str(token.get("content", ""))


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError as problem:
        raise UserError(f"{file}: not JSON: {problem}") from problem
    return value if isinstance(value, dict) else {}


def special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token, …: the variables that the template may print."""
    config = _json(folder / "tokenizer_config.json")
    return {k: _text(v) for k, v in config.items() if k.endswith("_token") and isinstance(v, (str, dict))}


def stop_tokens(folder: Path, variables: Mapping[str, str]) -> list[str | int]:
    """Ids and tokens at which the folder's generation config says a generation ends."""
    eos = _json(folder / "generation_config.json").get("eos_token_id")
    listed = [eos] if isinstance(eos, int) else list(eos or [])
    return [*listed, *([variables["eos_token"]] if "eos_token" in variables else [])]
