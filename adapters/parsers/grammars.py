"""How families write one call: pure functions from the text between two markers to calls.

They raise Malformed for what is no call (yet). Values that a format writes without quotes get the type the tool's
schema names.
"""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence

from uniagent.adapters.parsers.machine import Body, Malformed
from uniagent.adapters.parsers.values import json_or_text, typed
from uniagent.engine.ports import CONTROL_MARK, Json, ParsedCall

_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')


# ---------------------------------------------------------------- JSON


def json_calls(body: Body) -> Sequence[ParsedCall]:
    """``{"name": …, "arguments": {…}}``, one or a list; the arguments are kept as they were written."""
    text = body.text.replace(CONTROL_MARK, "")
    try:
        value = json.loads(text)
    except ValueError as problem:
        name, arguments = _NAME.search(text), _ARGUMENTS.search(text)
        raw = text[arguments.end() :].strip().removesuffix("}").rstrip() if arguments else ""
        raise Malformed(f"the call is not JSON: {problem}", _unquoted(name[1]) if name else None, raw) from problem
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(i, dict) and isinstance(i.get("name"), str) for i in items):
        raise Malformed("no call: an object with a name is wanted")
    return [_json_call(item, text, alone=len(items) == 1) for item in items]


def strict_json_calls(body: Body) -> Sequence[ParsedCall]:
    """As json_calls, where the JSON may as well be an answer: it must have arguments."""
    calls = json_calls(body)
    if not _ARGUMENTS.search(body.text):
        raise Malformed("no call: it has no arguments")
    return calls


def _json_call(item: Mapping[str, Json], text: str, *, alone: bool) -> ParsedCall:
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):  # JSON in a string
        return _raw_call(item["name"], arguments)
    written = _as_written(text, arguments) if alone else None
    return _raw_call(item["name"], written or json.dumps(arguments or {}, ensure_ascii=False))


def _as_written(text: str, arguments: Json) -> str | None:
    """The slice of the text that is the arguments."""
    for match in _ARGUMENTS.finditer(text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, match.end())
        except ValueError:
            continue
        if value == arguments:
            return text[match.end() : end]
    return None


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text


def _raw_call(name: str, arguments: str, id: str | None = None) -> ParsedCall:
    arguments = arguments.replace(CONTROL_MARK, "")
    try:
        problem = None if isinstance(json.loads(arguments), dict) else "the arguments are no object"
    except ValueError as why:
        problem = f"the arguments are not JSON: {why}"
    return ParsedCall(name, arguments, problem, id)


def _checked(name: str, arguments: str, id: str | None = None) -> list[ParsedCall]:
    """One call; Malformed while its arguments are not JSON."""
    call = _raw_call(name, arguments, id)
    if call.problem:
        raise Malformed(call.problem, call.name, call.arguments)
    return [call]


def deepseek_call(body: Body) -> Sequence[ParsedCall]:
    """``function<sep>NAME\\n```json\\n{…}\\n``` `` (V3) or ``NAME<sep>{…}`` (V3.1)."""
    before, sep, after = body.text.partition(body.marked("<｜tool▁sep｜>"))
    if not sep:
        raise Malformed("no call: its separator is missing")
    name, fence, raw = after.partition("\n```json\n")
    if fence:
        return _checked(name.strip(), raw.strip().removesuffix("```").strip())
    return _checked(before.strip(), after.strip())


def kimi_call(body: Body) -> Sequence[ParsedCall]:
    """``functions.NAME:0<argument_begin>{…}``; the first part is the call's id."""
    id, sep, raw = body.text.partition(body.marked("<|tool_call_argument_begin|>"))
    if not sep:
        raise Malformed("no call: its arguments are missing")
    id = id.strip()
    return _checked(re.sub(r":\d+$", "", id).removeprefix("functions."), raw.strip(), id)


def mistral_calls(body: Body) -> Sequence[ParsedCall]:
    """``[{"name": …, "arguments": {…}}, …]`` (v3) or ``NAME[CALL_ID]id[ARGS]{…}`` (v11 and later)."""
    if body.text.lstrip().startswith("["):
        return json_calls(body)
    head, sep, raw = body.text.partition(body.marked("[ARGS]"))
    if not sep:
        raise Malformed("no call: its arguments are missing")
    name, _, id = head.partition(body.marked("[CALL_ID]"))
    return _checked(name.strip(), raw.strip(), id.strip() or None)


# ---------------------------------------------------------------- tags


def qwen_xml_call(body: Body) -> Sequence[ParsedCall]:
    """``<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>``."""
    outer = re.fullmatch(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?", body.text, re.DOTALL)
    if outer is None or not (body.text.rstrip().endswith("</function>") or body.lenient):
        raise Malformed("no call: a function tag that closes is wanted")
    return _qwen_parameters(body, outer[1].strip(), outer[2])


def qwen_bare_call(body: Body) -> Sequence[ParsedCall]:
    """As qwen_xml_call, the opening ``<function=`` and the end taken away."""
    name, sep, rest = body.text.partition(">")
    if not sep or "\n" in name:
        raise Malformed("no call: a function name is wanted")
    return _qwen_parameters(body, name.strip(), rest)


def _qwen_parameters(body: Body, name: str, text: str) -> Sequence[ParsedCall]:
    known = _properties(body, name)
    text = text.strip("\n ")
    values: dict[str, str] = {}
    # a value ends at its closing tag, where another tag or the end follows, or where a known parameter opens a line
    keys = "|".join(re.escape(k) for k in sorted(known, key=len, reverse=True)) or r"(?!)"
    pattern = re.compile(
        rf"<parameter=([^>\n]+)>\n?(.*?)(?:\n?</parameter>(?=\s*(?:<parameter=|$))|\n(?=<parameter=(?:{keys})>)|\n?$)\s*",
        re.DOTALL,
    )
    at = 0
    while at < len(text):
        found = pattern.match(text, at)
        if found is None:
            raise Malformed("no call: a parameter tag is wanted", name, text)
        values[found[1].strip()] = found[2]
        at = found.end()
    return [_typed_call(body, name, values)]


def glm_call(body: Body) -> Sequence[ParsedCall]:
    """``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…``, white space between tags."""
    marked = body.marked
    key, end_key, value, end_value = (
        re.escape(marked(t)) for t in ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    )
    first = re.search(rf"\s*({key}|$)", body.text)
    name, rest = (body.text[: first.start()].strip(), body.text[first.start(1) :]) if first else ("", "")
    if not name or len(name.split()) > 1 or CONTROL_MARK in name:
        raise Malformed("no call: a function name is wanted")
    last = "$" if body.lenient else "(?!)"
    pattern = re.compile(rf"{key}(.*?){end_key}\s*{value}(.*?)(?:{end_value}(?=\s*(?:{key}|$))|{last})\s*", re.DOTALL)
    values, at = {}, 0
    while at < len(rest):
        found = pattern.match(rest, at)
        if found is None:
            raise Malformed("no call: an argument tag is wanted", name, rest)
        values[found[1].strip()] = found[2]
        at = found.end()
    return [_typed_call(body, name, values)]


def invoke_call(tag: str = "", *, quoted: bool = False) -> Callable[[Body], Sequence[ParsedCall]]:
    """``NAME"> <parameter name="KEY">VALUE</parameter>…``: what stands in an ``<invoke name="`` element. ``tag``
    precedes element names; ``quoted``: an attribute says whether a value is a string."""

    def read(body: Body) -> Sequence[ParsedCall]:
        element = re.escape(body.marked(tag))
        name, sep, rest = body.text.partition('"')
        rest = rest.removeprefix("/").removeprefix(">").strip()
        if not sep or "\n" in name:
            raise Malformed("no call: a function name is wanted")
        pattern = re.compile(
            rf'<{element}parameter name="([^"\n]*)"(?: string="(true|false)")?>(.*?)</{element}parameter>'
            rf"(?=\s*(?:<{element}parameter |$))\s*",
            re.DOTALL,
        )
        values: dict[str, str] = {}
        types: dict[str, str] = {}
        at = 0
        while at < len(rest):
            found = pattern.match(rest, at)
            if found is None:
                raise Malformed("no call: a parameter element is wanted", name, rest)
            values[found[1]], types[found[1]] = found[3], found[2] or ""
            at = found.end()
        if not quoted:
            values = {k: v.removeprefix("\n").removesuffix("\n") for k, v in values.items()}
        return [_typed_call(body, name, values, types)]

    return read


def _properties(body: Body, name: str) -> Mapping[str, Json]:
    properties = body.tools.get(name, {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _typed_call(body: Body, name: str, values: Mapping[str, str], types: Mapping[str, str] | None = None) -> ParsedCall:
    properties = _properties(body, name)
    arguments = {}
    for key, written in values.items():
        text, quoted = written.replace(CONTROL_MARK, ""), (types or {}).get(key)
        if quoted:
            arguments[key] = text if quoted == "true" else json_or_text(text)
        else:
            arguments[key] = typed(text, properties.get(key))
    return ParsedCall(name.replace(CONTROL_MARK, ""), json.dumps(arguments, ensure_ascii=False))


def kimi_element_call(body: Body) -> Sequence[ParsedCall]:
    """``NAME" index="1"<sep>``, then ``<open>argument key="KEY" type="TYPE"<sep>VALUE<close>argument<sep>``… (K3)."""
    opens, sep = re.escape(body.marked("<|open|>")), re.escape(body.marked("<|sep|>"))
    close = re.escape(body.marked("<|close|>")) + "argument" + sep
    head = re.match(rf'([^"\n]*)"[^<\n]*?{sep}', body.text)
    if head is None:
        raise Malformed("no call: a tool name is wanted")
    name, rest = html.unescape(head[1]), body.text[head.end() :].strip()
    pattern = re.compile(
        rf'{opens}argument key="([^"\n]*)" type="(\w+)"{sep}(.*?){close}(?=\s*(?:{opens}argument |$))\s*', re.DOTALL
    )
    values: dict[str, str] = {}
    quoted: dict[str, str] = {}
    at = 0
    while at < len(rest):
        found = pattern.match(rest, at)
        if found is None:
            raise Malformed("no call: an argument element is wanted", name, rest)
        key = html.unescape(found[1])
        values[key], quoted[key] = found[3], str(found[2] == "string").lower()
        at = found.end()
    return [_typed_call(body, name, values, quoted)]


# ---------------------------------------------------------------- Gemma


def gemma_call(body: Body) -> Sequence[ParsedCall]:
    """``call:NAME{key:<|"|>text<|"|>,other:[1,true]}``: JSON with bare keys and its own quotes."""
    head = re.match(r"\s*call:([^{\s]+)\{", body.text)
    if head is None:
        raise Malformed("no call: a name and an object are wanted")
    quote = body.marked('<|"|>')
    try:
        value, end = _gemma_value(body.text, head.end() - 1, quote)
    except (ValueError, IndexError) as problem:
        raise Malformed(f"the arguments cannot be read: {problem}", head[1], body.text[head.end() - 1 :]) from problem
    if body.text[end:].strip():
        raise Malformed("text after the arguments", head[1], body.text[head.end() - 1 :])
    return [_raw_call(head[1], json.dumps(value, ensure_ascii=False))]


def _gemma_value(text: str, at: int, quote: str) -> tuple[Json, int]:
    """The value that begins at ``at``, and where it ends. Raises ValueError or IndexError."""
    at += len(text[at:]) - len(text[at:].lstrip())
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    if text[at] in "{[":
        return _gemma_items(text, at, quote)
    found = re.compile(r"[^,\]}]*").match(text, at)
    assert found is not None
    return json_or_text(found[0].strip()), found.end()


def _gemma_items(text: str, at: int, quote: str) -> tuple[Json, int]:
    closing = "}" if text[at] == "{" else "]"
    named: dict[str, Json] = {}
    listed: list[Json] = []
    at += 1
    while True:
        at += len(text[at:]) - len(text[at:].lstrip(" \n,"))
        if text[at] == closing:
            return (named if closing == "}" else listed), at + 1
        if closing == "}":
            colon = text.index(":", at)
            key = text[at:colon].strip().removeprefix(quote).removesuffix(quote)
            named[key], at = _gemma_value(text, colon + 1, quote)
        else:
            item, at = _gemma_value(text, at, quote)
            listed.append(item)


# ---------------------------------------------------------------- Python


def pythonic_calls(body: Body) -> Sequence[ParsedCall]:
    """``[name(key=value, …), …]`` in Python's syntax."""
    try:
        tree = ast.parse(body.text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as problem:
        raise Malformed(f"no Python list of calls: {problem}") from problem
    if not isinstance(tree, ast.List) or not tree.elts or not all(isinstance(e, ast.Call) for e in tree.elts):
        raise Malformed("no Python list of calls")
    return [_python_call(e) for e in tree.elts if isinstance(e, ast.Call)]


def _python_call(call: ast.Call) -> ParsedCall:
    try:
        arguments = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
        text = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, TypeError) as problem:
        raise Malformed(f"arguments that are no literals: {problem}") from problem
    if call.args:
        raise Malformed("arguments without names")
    return ParsedCall(ast.unparse(call.func), text)
