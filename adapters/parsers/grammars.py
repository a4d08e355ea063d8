"""How families write one call: pure functions from the text between two markers to calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from uniagent.adapters.parsers.machine import Malformed, Tools
from uniagent.engine.ports import ParsedCall

_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')


def json_calls(text: str, tools: Tools) -> Sequence[ParsedCall]:
    """``{"name": …, "arguments": {…}}``, one or a list; the arguments are kept as they were written."""
    try:
        value = json.loads(text)
    except ValueError as problem:
        name, arguments = _NAME.search(text), _ARGUMENTS.search(text)
        raw = text[arguments.end() :].strip() if arguments else ""
        raise Malformed(
            f"not JSON: {problem}", _unquoted(name[1]) if name else None, raw.removesuffix("}").rstrip() if raw else ""
        ) from problem
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(i, dict) and isinstance(i.get("name"), str) for i in items):
        raise Malformed("no call: an object with a name is wanted")
    calls = []
    for item in items:
        arguments = item.get("arguments", item.get("parameters"))
        if isinstance(arguments, str):  # JSON in a string
            written = arguments
        elif len(items) == 1:
            written = _as_written(text, arguments)
        else:
            written = json.dumps(arguments or {}, ensure_ascii=False)
        calls.append(ParsedCall(item["name"], written, None if _is_object(written) else "the arguments are no object"))
    return calls


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text


def _as_written(text: str, arguments: object) -> str:
    """The slice of the text that is the arguments; written anew only where it cannot be found."""
    decoder = json.JSONDecoder()
    for match in _ARGUMENTS.finditer(text):
        try:
            value, end = decoder.raw_decode(text, match.end())
        except ValueError:
            continue
        if value == arguments:
            return text[match.end() : end]
    return json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
