"""Parsers of model text: every family's own format, the same answer for every chunking, malformed calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.talk import examples
from uniagent.adapters.parsers import families
from uniagent.adapters.parsers.values import typed
from uniagent.engine.ports import Parsed
from uniagent.engine.registry import load

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": ["object", "null"]}}
            },
        },
    }
]
ARGUMENTS = {"a": 'x </tool_call> "y"\n z', "n": 3, "o": {"k": [1, None]}}
JSON = json.dumps(ARGUMENTS)
# how each family writes the call f(ARGUMENTS), after some text
CALLS = {
    "qwen": f'Well.\n<tool_call>\n{{"name": "f", "arguments": {JSON}}}\n</tool_call>',
    "qwen_xml": "Well.\n<tool_call>\n<function=f>\n"
    + "".join(f"<parameter={k}>\n{v if k == 'a' else json.dumps(v)}\n</parameter>\n" for k, v in ARGUMENTS.items())
    + "</function>\n</tool_call>",
    "glm": "Well.\n<tool_call>f\n"
    + "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v if k == 'a' else json.dumps(v)}</arg_value>\n"
        for k, v in ARGUMENTS.items()
    )
    + "</tool_call>",
    "deepseek": "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    + f"f<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_dsml": 'Well.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    + "".join(
        f'<｜DSML｜parameter name="{k}" string="{str(k == "a").lower()}">'
        f"{v if k == 'a' else json.dumps(v)}</｜DSML｜parameter>\n"
        for k, v in ARGUMENTS.items()
    )
    + "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi": "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    + f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": "<|open|>response<|sep|>Well.<|close|>response<|sep|><|open|>tools<|sep|>"
    + '<|open|>call tool="f" index="1"<|sep|>'
    + "".join(
        f'<|open|>argument key="{k}" type="{"string" if k == "a" else "number"}"<|sep|>'
        f"{v if k == 'a' else json.dumps(v)}<|close|>argument<|sep|>"
        for k, v in ARGUMENTS.items()
    )
    + "<|close|>call<|sep|><|close|>tools<|sep|>",
    "gemma4": f'Well.<|tool_call>call:f{{a:<|"|>{ARGUMENTS["a"]}<|"|>,n:3,o:{{k:[1, null]}}}}<tool_call|>',
    "minimax": 'Well.\n<minimax:tool_call>\n<invoke name="f">\n'
    + "".join(f'<parameter name="{k}">{v if k == "a" else json.dumps(v)}</parameter>\n' for k, v in ARGUMENTS.items())
    + "</invoke>\n</minimax:tool_call>",
    "mistral": f"Well.[TOOL_CALLS]f[ARGS]{JSON}",
    "llama": f'<|python_tag|>{{"name": "f", "parameters": {JSON}}}',
    "pythonic": "[f(a=" + repr(ARGUMENTS["a"]) + ", n=3, o={'k': [1, None]})]",
    "gpt_oss": "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant to=functions.f<|channel|>commentary "
    + f"<|constrain|>json<|message|>{JSON}",
}


def parse(family: str, chunks: list[str], prefix: str = "", tools: Any = TOOLS) -> Parsed:
    parser = load("parsers", family)(prefix, tools)
    deltas = [d for chunk in chunks for d in parser.feed(chunk)]
    last, parsed = parser.finish()
    deltas += last
    assert "".join(d.text for d in deltas) == parsed.text
    assert "".join(d.reasoning for d in deltas) == parsed.reasoning
    said = [(d.call_name, d.arguments) for d in deltas if d.call_index is not None]
    assert said == [(c.name, c.arguments) for c in parsed.calls]
    return parsed


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_a_call_in_the_format_of_the_family(family: str, size: int) -> None:
    text = CALLS[family]
    parsed = parse(family, [text[n : n + size] for n in range(0, len(text), size)])
    assert [(c.name, json.loads(c.arguments), c.problem) for c in parsed.calls] == [("f", ARGUMENTS, None)]
    assert parsed.text == ("" if family in ("llama", "pythonic") else "Well.")
    assert parsed.problem is None


@pytest.mark.parametrize("family", [f for f in CALLS if f not in ("pythonic", "llama")])
def test_a_call_that_was_cut_off_is_not_delivered(family: str) -> None:
    text = CALLS[family].replace(" </tool_call>", "")
    parsed = parse(family, [text[: text.index("[1, ") + 2]])
    assert parsed.calls == ()
    assert parsed.problem == "the answer ended inside a tool call"
    assert parsed.text == "Well."


PIECES = [
    *("<think>", "</think>", "\n", " ", "text", "<", '{"a": 1}', "}", "]", "[TOOL_CALLS]"),
    *("<|channel|>analysis<|message|>", "<|end|>", "<|start|>"),
]


@pytest.mark.parametrize("family", CALLS)
@examples
@given(data=st.data())
def test_every_chunking_gives_the_same_answer(family: str, data: st.DataObject) -> None:
    markers = list(load("parsers", family).markers)
    parts = data.draw(st.lists(st.sampled_from([*PIECES, *markers, CALLS[family]]), max_size=7))
    text = "".join(parts)
    prefix = data.draw(st.sampled_from(["", "<|im_start|>assistant\n<think>\n", "<think></think>"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(family, chunks, prefix) == parse(family, [text], prefix) == parse(family, list(text), prefix)


def test_arguments_stay_as_they_were_sampled() -> None:
    raw = '{"name": "f", "arguments": {"a":   "\\u00e9",\n "n": 1.0}}'
    assert parse("qwen", [f"<tool_call>{raw}</tool_call>"]).calls[0].arguments == '{"a":   "\\u00e9",\n "n": 1.0}'


@pytest.mark.parametrize(
    ("family", "text", "name", "arguments"),
    [
        ("qwen", '<tool_call>\n{"name": "f", "arguments": {"a": 1,}}\n</tool_call>', "f", '{"a": 1,}'),
        ("qwen", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f", "[1]"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{oops<｜tool▁call▁end｜>", "f", "{oops"),
        ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{oops<|tool_call_end|>", "f", "{oops"),
        ("glm", "<tool_call>f<arg_key>a</arg_value></tool_call>", "f", "<arg_key>a</arg_value>"),
    ],
)
def test_a_malformed_call_with_a_name_is_delivered_with_its_raw_arguments(
    family: str, text: str, name: str, arguments: str
) -> None:
    parsed = parse(family, [text])
    assert [(c.name, c.arguments) for c in parsed.calls] == [(name, arguments)]
    assert parsed.problem
    assert parsed.calls[0].problem == parsed.problem


def test_a_malformed_call_without_a_name_is_text() -> None:
    parsed = parse("qwen", ["a <tool_call>not json</tool_call> b"])
    assert (parsed.text, parsed.calls) == ("a <tool_call>not json</tool_call> b", ())
    assert parsed.problem


def test_a_good_call_after_a_bad_one() -> None:
    parsed = parse("qwen", ['<tool_call>bad</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'])
    assert [c.name for c in parsed.calls] == ["f"]
    assert parsed.text == "<tool_call>bad</tool_call>"


def test_reasoning_that_the_prompt_opened() -> None:
    parsed = parse("qwen", ["hm\n</think>\n\nYes."], prefix="<|im_start|>assistant\n<think>\n")
    assert (parsed.reasoning, parsed.text) == ("hm", "Yes.")
    closed = parse("qwen", ["\nYes."], prefix="<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert (closed.reasoning, closed.text) == ("", "Yes.")


def test_a_call_that_reasoning_only_mentions() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = parse("qwen", [f"<think>maybe {call} then</think>{call}"])
    assert len(parsed.calls) == 1
    assert call in parsed.reasoning


def test_json_that_is_an_answer_and_not_a_call() -> None:
    for text in ('{"capital": "Paris"}', "{}", '{"a": 1} is a dict', '{"name": "Bob", "age": 3}'):
        assert parse("llama", list(text)).text == text
    call = '{"name": "f", "parameters": {}}'
    assert parse("llama", [call], tools=()).text == call  # nobody offered a tool


def test_ids_that_the_model_writes() -> None:
    assert parse("kimi", [CALLS["kimi"]]).calls[0].id == "functions.f:0"
    assert parse("mistral", ["[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{}"]).calls[0].id == "abcdefgh1"


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3.0", {"type": "integer"}, 3.0),
        ("0042", {"type": "integer"}, "0042"),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("None", {"type": "integer"}, None),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("['a', None]", {"type": "array"}, ["a", None]),
        ("[1", {"type": "array"}, "[1"),
        ('{"a": 1}', {"anyOf": [{"type": "object"}, {"type": "string"}]}, {"a": 1}),
        ("5", None, 5),
        (" five ", None, " five "),
    ],
)
def test_unquoted_values_take_the_type_of_the_schema(text: str, schema: Any, value: Any) -> None:
    assert typed(text, schema) == value
    assert type(typed(text, schema)) is type(value)


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ('<tool_call>\n{"name"', "qwen"),
        ("<tool_call> <function=f>", "qwen_xml"),
        ("<tool_call> <arg_key>", "glm"),
        ("<|channel|>final<|message|>", "gpt_oss"),
        ("<｜tool▁call▁begin｜>", "deepseek"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>ipython", "llama"),
        ("<minimax:tool_call>", "minimax"),
        ("<|tool_call>call: <|channel>", "gemma4"),
        ("<|open|>think<|sep|>", "kimi_k3"),
        ("{{ m.content }}", "plain"),
    ],
)
def test_the_template_tells_the_family(source: str, family: str) -> None:
    assert families.choose(source).name == family
