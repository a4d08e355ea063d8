"""Strict values: what a type takes from TOML, and types and values in words.

cattrs with hooks that convert nothing behind the user's back: true is no whole number, a text is no list; only a whole
number may stand for a number. Knows no key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

import cattrs
from cattrs.strategies import configure_union_passthrough


def structure(value: Any, kind: Any) -> Any:
    """A TOML value as a field of this type takes it; raises ValueError that says what was expected."""
    try:
        return _CONVERTER.structure(value, kind)
    except (TypeError, ValueError, OverflowError):
        got = "" if isinstance(value, list) and _is_tuple(kind) else f", got {_kind(value)}"
        raise ValueError(f"expected {expected(kind)}{got}") from None


def expected(kind: Any) -> str:
    """A type in words: ``a whole number``, ``a list of text``."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if kind in words:
        return words[kind]
    arguments = [a for a in get_args(kind) if a is not type(None)]
    if get_origin(kind) is tuple and arguments[-1:] == [...]:
        return f"a list of {_plural(arguments[0])}"
    if get_origin(kind) is tuple:
        return f"a list of {len(arguments)} {_plural(arguments[0])}"
    if _is_mapping(kind):
        return "a table"
    return " or ".join(expected(a) for a in arguments)


def show(value: Any) -> str:
    """A value as TOML would show it, cut to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(value: Any) -> str:
    words = {
        bool: "a boolean",
        int: "a whole number",
        float: "a decimal number",
        str: "text",
        list: "a list",
        dict: "a table",
    }
    return words.get(type(value), "a date or time")


def _plural(kind: Any) -> str:
    return {int: "whole numbers", float: "numbers", str: "text", bool: "true or false"}.get(kind, expected(kind))


def _strict(kind: type, *accepted: type) -> Any:
    def hook(value: Any, _: Any) -> Any:
        if type(value) not in accepted:  # bool is an int to Python, not to a reader
            raise TypeError(value)
        return kind(value)

    return hook


def _table(value: Any, _: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(value)
    return value


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=False)
    for kind in (str, bool, int):
        converter.register_structure_hook(kind, _strict(kind, kind))
    converter.register_structure_hook(float, _strict(float, float, int))
    converter.register_structure_hook_func(_is_mapping, _table)
    configure_union_passthrough(Union[str, bool, int, float, None], converter)  # noqa: UP007 - an argument, not a hint

    def listed(kind: Any) -> Any:
        any_length = ... in get_args(kind)
        kinds = get_args(kind)[:1] if any_length else get_args(kind)

        def hook(value: Any, _: Any) -> tuple[Any, ...]:
            if not isinstance(value, list):
                raise TypeError(value)
            pairs = zip(value, kinds * len(value) if any_length else kinds, strict=True)
            return tuple(converter.structure(v, k) for v, k in pairs)

        return hook

    converter.register_structure_hook_factory(_is_tuple, listed)
    return converter


_CONVERTER = _make_converter()
