"""Plain data to attrs classes by cattrs, strictly: no text becomes a number, no unknown key passes, and every error
names the key where it stands, the value and what is allowed.

A class that keeps what it does not know (a sandbox section has keys of its provider's own) names the attribute
that takes the rest in ``__rest__``. An attribute with ``metadata={"key": False}`` is no key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import cattrs
from attrs import fields, has
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, override

from uniagent.engine.errors import UserError, nearest

T = TypeVar("T")


def structure(cls: type[T], value: object, where: str) -> T:
    """``value`` as a ``cls``; raises UserError that begins with ``where`` and names every bad key."""
    try:
        return _converter.structure(value, cls)
    except (cattrs.BaseValidationError, TypeError, ValueError) as problem:
        found = cattrs.transform_error(problem, path="", format_exception=_explain)
        raise UserError("\n".join(f"{where}: {_readable(line)}" for line in found)) from None


def _readable(line: str) -> str:
    """cattrs writes ``what @ .agent.model.top_p``; we write the key first."""
    what, _, path = line.rpartition(" @ ")
    key = path.lstrip(".").replace("['", ".").replace("']", "").lstrip(".")
    return f"{key}: {what}" if key else what


def _explain(problem: BaseException, type_: type | None) -> str:
    if isinstance(problem, ForbiddenExtraKeysError):
        known = _keys(problem.cl)
        return "; ".join(f"unknown key {key!r}: {nearest(key, known)}" for key in sorted(problem.extra_fields))
    if isinstance(problem, KeyError):
        return "is missing"
    return str(problem.args[0] if problem.args else problem)  # validators of attrs add what they checked


def _keys(cls: Any) -> list[str]:
    return [f.name for f in fields(cls) if f.metadata.get("key", True)]


def _exactly(*allowed: type, called: str) -> Callable[[Any, Any], Any]:
    def check(value: Any, _: Any) -> Any:
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise TypeError(f"{value!r} is {_kind(value)}, expected {called}")
        return value

    return check


def _kind(value: object) -> str:
    names = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", list: "a list"}
    names |= {dict: "a table", type(None): "nothing"}
    return names.get(type(value), f"a {type(value).__name__}")


def _tuple(value: Any, type_: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{value!r} is {_kind(value)}, expected a list")
    as_list: Any = list[get_args(type_)[0]]  # type: ignore[misc]
    return tuple(_converter.structure(list(value), as_list))


def _attrs_class(cls: type) -> Callable[[Any, Any], Any]:
    """Structure a table; keys that the class does not know go to its ``__rest__`` attribute or are refused."""
    rest = getattr(cls, "__rest__", None)
    known = set(_keys(cls)) - {rest}
    omitted: dict[str, Any] = {f.name: override(omit=True) for f in fields(cls) if f.name not in _keys(cls)}
    plain: Any = make_dict_structure_fn(cls, _converter, _cattrs_forbid_extra_keys=True, **omitted)

    def build(value: Any, type_: Any) -> Any:
        if not isinstance(value, Mapping):
            raise TypeError(f"{value!r} is {_kind(value)}, expected a table")
        if odd := [k for k in value if not isinstance(k, str)]:
            raise TypeError(f"the key {odd[0]!r} is {_kind(odd[0])}, expected a text")
        if rest is not None:
            value = {k: v for k, v in value.items() if k in known} | {
                rest: {k: v for k, v in value.items() if k not in known}
            }
        return plain(value, type_)

    return build


_converter = cattrs.Converter(forbid_extra_keys=True)
_converter.register_structure_hook(str, _exactly(str, called="a text"))
_converter.register_structure_hook(bool, _exactly(bool, called="true or false"))
_converter.register_structure_hook(int, _exactly(int, called="a whole number"))
_converter.register_structure_hook(float, lambda v, t: float(_exactly(int, float, called="a number")(v, t)))
_converter.register_structure_hook_func(
    lambda t: getattr(t, "__origin__", None) is Mapping,
    _exactly(Mapping, called="a table"),
)
_converter.register_structure_hook_func(lambda t: getattr(t, "__origin__", None) is tuple, _tuple)
_converter.register_structure_hook_factory(has, _attrs_class)
