"""Values that a format writes without quotes, and the types a tool's JSON schema gives them."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from uniagent.engine.ports import Json


def typed(text: str, schema: Json) -> Json:
    """The value a text means under a JSON schema: a string where strings are allowed and nothing else fits better."""
    kinds = _kinds(schema)
    bare = text.strip()
    if not kinds or kinds == {"string"}:
        return text if kinds else json_or_text(text)
    if bare.lower() in ("null", "none") and "null" in kinds | (set() if "string" in kinds else {"null"}):
        return None
    if "boolean" in kinds and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    try:
        value = json.loads(bare)
    except ValueError:
        value = _literal(bare) if kinds & {"object", "array"} else text
    return value if _kind(value) & kinds else text


def _kinds(schema: Json) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    found = schema.get("type")
    kinds = {found} if isinstance(found, str) else set(found) if isinstance(found, list) else set()
    for key in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(key) or ():
            kinds |= _kinds(option)
    if not kinds and "enum" in schema:
        kinds = {"string"} if all(isinstance(v, str) for v in schema["enum"]) else set()
    return kinds


def _kind(value: Json) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    names: dict[type, str] = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def json_or_text(text: str) -> Json:
    try:
        return json.loads(text)
    except ValueError:
        return text
