"""The probe's verdicts on small templates, and its command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.codec.talk import CHATML, CHATML_TOKENS, NOW, TINY
from uniagent.engine.errors import UserError
from uniagent.engine.gateway import template_cli
from uniagent.engine.gateway.chat_template import ChatTemplate, RenderError
from uniagent.engine.gateway.template import TemplateStrategy, probe

# reasoning of answers before the last user message is dropped, as Qwen3 does
SETS_LAST = """
{%- set ns = namespace(last=0) %}
{%- for m in messages if m.role == 'user' %}{%- set ns.last = messages.index(m) %}{%- endfor %}"""
REASONING = "'<think>' + m.reasoning_content + '</think>' if m.reasoning_content and loop.index0 > ns.last else ''"
THINKS = SETS_LAST + CHATML.replace("(m.content or '')", f"({REASONING}) + m.content")


def verdict(source: str, controls: tuple[str, ...] = CHATML_TOKENS) -> TemplateStrategy:
    return probe(ChatTemplate(source, now=NOW), re.compile("|".join(map(re.escape, controls))))


def test_stable_glue_appends() -> None:
    found = verdict(CHATML)
    assert found.kind == "append"
    assert found.stops == found.ends.closers == ("<|im_end|>",)
    assert found.prompts == {"user": "<|im_start|>assistant\n", "tool": "<|im_start|>assistant\n"}


def test_reasoning_that_the_template_drops_later_does_not_move_glue() -> None:
    found = verdict(THINKS)
    assert found.answers["keeps reasoning of the same task"] == "yes"
    assert found.answers["keeps reasoning of earlier answers"] == "no"
    assert found.kind == "append"
    assert found.shape.reasoning == "reasoning_content"


def test_a_reasoning_message_does_not_end_the_turn() -> None:
    """Reasoning as a message of its own, closed by the token that closes messages."""
    thought = "('<|im_start|>think\\n' + m.thinking + '<|im_end|>' if m.thinking else '') + '<|im_start|>' + m.role"
    end = "{{- ('<|endoftext|>' if m.role == 'assistant' and loop.last else '<|im_end|>') + '\\n' }}"
    source = CHATML.replace("'<|im_start|>' + m.role", thought).replace("{{- '<|im_end|>\\n' }}", end)
    assert "<|im_end|>" not in verdict(source).stops


def test_what_a_template_accepts() -> None:
    refuses = """
{%- for m in messages %}
    {%- if loop.index0 > 0 and m.role == 'system' %}{{ raise_exception('late') }}{%- endif %}
    {%- if m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'user' %}
        {{ raise_exception('two') }}
    {%- endif %}
{%- endfor %}"""
    shape = verdict(refuses + CHATML).shape
    assert (shape.system, shape.late_system, shape.alternate) == (True, False, True)
    text = CHATML.replace("(c.function | tojson)", "'{' + c.function.arguments + '}'")
    assert verdict(text).shape.arguments == "text"
    nine = """
{%- for m in messages %}{%- for c in m.tool_calls or [] if c.id | length != 9 %}
    {{ raise_exception('id') }}
{%- endfor %}{%- endfor %}"""
    assert verdict(nine + CHATML).shape.call_ids == "nine"
    kimi = CHATML.replace("(c.function | tojson)", "c.id + (c.function.arguments | tojson)")
    assert verdict(kimi).shape.call_ids == "functions"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('never') }}", "does not render one user message: never"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "no control token between"),
    ],
)
def test_refusals_say_why(source: str, why: str) -> None:
    found = verdict(source)
    assert found.kind == "refuse"
    assert why in found.why


def test_glue_that_depends_on_history_is_not_appended() -> None:
    counts = CHATML.replace("'<|im_start|>' + m.role", "'<|im_start|>' + m.role + (messages | length | string)")
    found = verdict(counts)
    assert found.kind != "append"
    assert "changes when" in found.why


def test_renders_as_the_library_does() -> None:
    source = (
        "{%- generation %}{{ messages[0].content | tojson }}{% endgeneration %}"
        "{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ strftime_now('%d') }}"
    )
    template = ChatTemplate(source, now=NOW)
    assert template.render([{"content": "<é>"}]) == '"<é>"104'
    with pytest.raises(RenderError, match="does not compile: line 1"):
        ChatTemplate("{% if %}", now=NOW)
    with pytest.raises(RenderError):
        ChatTemplate("{{ messages.append(1) }}", now=NOW).render([])  # the sandbox


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert template_cli.main([str(TINY)]) == 0
    table = capsys.readouterr().out
    assert re.search(r"strategy +append", table)
    assert re.search(r"generation stops at +<\|im_end\|>$", table, re.MULTILINE)
    assert re.search(r"parser of answers +qwen", table)


def test_the_command_in_json_and_for_a_template_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.jinja"
    file.write_text(CHATML)
    for arguments in ([str(file)], [str(file), "--tokenizer", str(TINY)], ["builtin:tiny-shell"]):
        assert template_cli.main([*arguments, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["strategy"] == "append"
        assert report["turn_ends"] == ["<|im_end|>"]
        assert report["answers"]["prints tool results"] == "yes"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert template_cli.main([str(file)]) == 2


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        template_cli.main([str(tmp_path / "none.jinja")])
    with pytest.raises(UserError, match="no chat template"):
        template_cli.main([str(tmp_path)])
