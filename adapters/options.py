"""Options of tools, agents and sandbox backends: a table from a config file as an attrs class, every mistake named.

The classes' fields may carry the metadata of ``engine.config.key`` (choices, at_least); a key that is a word of Python
is the field with an underscore after it (``as_``). Knows no particular option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

from attrs import NOTHING, Attribute, fields_dict

from uniagent.engine.config_values import expected, show, structure
from uniagent.engine.errors import UserError, nearest
from uniagent.engine.ports import Json

T = TypeVar("T")


def options(kind: Callable[..., T], given: Mapping[str, Json], where: str) -> T:
    """``given`` as the attrs class ``kind``. Raises UserError: where, which key, its value, what is allowed."""
    known, types = _shape(kind)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise UserError(f"{where}: there is no key {name!r}; {nearest(name, known)}")
        meta, place = known[name].metadata, f"{where}: {name} = {show(value)}"
        try:
            values[name] = structure(value, types[name])
        except ValueError as problem:
            raise UserError(f"{place}: {problem}") from None
        if (choices := meta.get("choices")) and value not in choices:
            raise UserError(f"{place}: {nearest(str(value), choices)}")
        if (least := meta.get("at_least")) is not None and value is not None and value < least:
            raise UserError(f"{place}: must be at least {least}")
        if isinstance(value, dict) and (inner := _not_text(value, types[name])):
            raise UserError(f"{place}: {inner}")
    missing = [n for n, a in known.items() if n not in values and a.default is NOTHING]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing ({expected(types[missing[0]])})")
    return kind(**{known[name].name: value for name, value in values.items()})


@cache
def _shape(kind: Any) -> tuple[Mapping[str, Attribute[Any]], Mapping[str, Any]]:
    """Fields and types by the name of their key."""
    known = {name.rstrip("_"): field for name, field in fields_dict(kind).items()}
    return known, {name.rstrip("_"): hint for name, hint in get_type_hints(kind).items()}


def _not_text(value: Mapping[Any, Any], kind: Any) -> str | None:
    """What is wrong with a table that must map text to text."""
    if kind != Mapping[str, str]:
        return None
    return next((f"{k} must be text, not {show(v)}" for k, v in value.items() if not isinstance(v, str)), None)
