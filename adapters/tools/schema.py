"""Tool arguments against a JSON schema: the part of JSON Schema that tool schemas use.

Own and small rather than the ``jsonschema`` package: errors here are read by a model, so they are one short sentence
with the path, and validation is on the hot path. Keywords: type, enum, const, properties, required,
additionalProperties, items, minItems, maxItems, minimum, maximum, minLength, maxLength, pattern, anyOf, oneOf, allOf.
Others (description, default, title, format, ...) are notes and are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from uniagent.engine.ports import Json

TYPES: dict[str, tuple[type, ...]] = {
    "object": (Mapping,),
    "array": (list, tuple),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def problems(value: Json, schema: Mapping[str, Json], where: str = "") -> Iterator[str]:
    """What is wrong with ``value``, one sentence each; nothing when it fits."""
    name = where or "arguments"
    if "type" in schema:
        wanted = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
        if not any(_is(value, kind) for kind in wanted):
            yield f"{name} must be {' or '.join(wanted)}, not {kind_of(value)}"
            return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{name} must be one of {', '.join(map(repr, schema['enum']))}, not {value!r}"
    if "const" in schema and value != schema["const"]:
        yield f"{name} must be {schema['const']!r}, not {value!r}"
    if isinstance(value, Mapping):
        yield from _object(value, schema, where)
    elif isinstance(value, list | tuple):
        yield from _size(len(value), schema, name, "minItems", "maxItems", "items")
        for index, item in enumerate(value):
            yield from problems(item, schema.get("items", {}), f"{where}[{index}]")
    elif isinstance(value, str):
        yield from _size(len(value), schema, name, "minLength", "maxLength", "characters")
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{name} must match {schema['pattern']!r}"
    elif _is(value, "number"):
        if "minimum" in schema and value < schema["minimum"]:
            yield f"{name} must be at least {schema['minimum']}, not {value}"
        if "maximum" in schema and value > schema["maximum"]:
            yield f"{name} must be at most {schema['maximum']}, not {value}"
    yield from _combined(value, schema, where)


def _object(value: Mapping[str, Json], schema: Mapping[str, Json], where: str) -> Iterator[str]:
    known: Mapping[str, Json] = schema.get("properties", {})
    prefix = f"{where}." if where else ""
    for key in schema.get("required", ()):
        if key not in value:
            yield f"{prefix}{key} is missing"
    for key, item in value.items():
        if key in known:
            yield from problems(item, known[key], f"{prefix}{key}")
        elif schema.get("additionalProperties") is False:
            yield f"{prefix}{key} is not an argument; the arguments are: {', '.join(known) or 'none'}"
        elif isinstance(schema.get("additionalProperties"), Mapping):
            yield from problems(item, schema["additionalProperties"], f"{prefix}{key}")


def _size(size: int, schema: Mapping[str, Json], name: str, least: str, most: str, unit: str) -> Iterator[str]:
    if least in schema and size < schema[least]:
        yield f"{name} must have at least {schema[least]} {unit}, not {size}"
    if most in schema and size > schema[most]:
        yield f"{name} must have at most {schema[most]} {unit}, not {size}"


def _combined(value: Json, schema: Mapping[str, Json], where: str) -> Iterator[str]:
    for part in schema.get("allOf", ()):
        yield from problems(value, part, where)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            found = [list(problems(value, option, where)) for option in schema[keyword]]
            fitting = sum(not f for f in found)
            if not fitting:
                yield min(found, key=len)[0]
            elif keyword == "oneOf" and fitting > 1:
                yield f"{where or 'arguments'} fits {fitting} of the alternatives and must fit one"


def _is(value: Json, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES.get(kind, (object,)))


def kind_of(value: Json) -> str:
    """The JSON name of a value's type."""
    return next(kind for kind in TYPES if _is(value, kind))
