"""Arguments against JSON schemas: accepted when they fit, else one sentence a model can act on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.adapters.tools.schema import problems

EDITOR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "enum": ["view", "create"]},
        "path": {"type": "string", "minLength": 1, "pattern": "^/"},
        "lines": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 2, "maxItems": 2},
        "mode": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "extra": {"type": "object", "additionalProperties": {"type": "number", "maximum": 1}},
    },
    "required": ["command", "path"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": "view", "path": "/a"},
        {"command": "create", "path": "/a", "lines": [1, 2], "mode": None, "extra": {"x": 0.5}},
        {"command": "view", "path": "/a", "lines": [1.0, 2]},  # whole numbers are integers in JSON Schema
    ],
)
def test_what_fits_has_no_problem(arguments: dict[str, Any]) -> None:
    assert list(problems(arguments, EDITOR)) == []


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        ([], ["arguments must be object, not array"]),
        (None, ["arguments must be object, not null"]),
        ({"path": "/a"}, ["command is missing"]),
        ({"command": "look", "path": "/a"}, ["command must be one of 'view', 'create', not 'look'"]),
        ({"command": "view", "path": "a"}, ["path must match '^/'"]),
        ({"command": "view", "path": 5}, ["path must be string, not integer"]),
        ({"command": "view", "path": "/a", "lines": [1]}, ["lines must have at least 2 items, not 1"]),
        ({"command": "view", "path": "/a", "lines": [0, True]}, ["lines[0] must be at least 1, not 0",
                                                                 "lines[1] must be integer, not boolean"]),
        ({"command": "view", "path": "/a", "mode": "x"}, ["mode must be integer, not string"]),
        ({"command": "view", "path": "/a", "extra": {"k": 2}}, ["extra.k must be at most 1, not 2"]),
        ({"command": "view", "path": "/a", "cmd": 1},
         ["cmd is not an argument; the arguments are: command, path, lines, mode, extra"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(arguments: Any, sentences: list[str]) -> None:
    assert list(problems(arguments, EDITOR)) == sentences


def test_exactly_one_alternative() -> None:
    schema = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
    assert list(problems("abc", schema)) == ["arguments fits 2 of the alternatives and must fit one"]
    assert list(problems("abcd", schema)) == []


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(_json)
def test_never_raises_and_never_passes_what_lacks_the_required(value: Any) -> None:
    found = list(problems(value, EDITOR))
    assert found or (isinstance(value, dict) and value["command"] in ("view", "create") and value["path"][0] == "/")
