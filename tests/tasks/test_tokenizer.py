"""The tiny model's tokenizer and chat template: exact, byte-complete, the same in pieces as in one."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.tasks.shell_quest.make_model import example
from uniagent.tasks.shell_quest.model import folder
from uniagent.tasks.shell_quest.tokenizer import CONTROL, MARKS, build
from uniagent.tasks.shell_quest.words import NAMES, WORDS


@cache
def tokenizer() -> Any:
    return build()


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return ids


def call(command: str) -> dict[str, Any]:
    arguments = json.dumps({"command": command})
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "shell", "arguments": arguments}}]}


CONVERSATION = [
    {"role": "user", "content": "Delete the file containing the word wolf."},
    call("grep -l wolf *.txt"),
    {"role": "tool", "content": "alpha.txt"},
    call("rm alpha.txt"),
    {"role": "tool", "content": "(no output)"},
    {"role": "assistant", "content": "Done."},
]
TEXT = """\
<|im_start|>system
You are a shell agent.<|im_end|>
<|im_start|>user
Delete the file containing the word wolf.<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "shell", "arguments": {"command": "grep -l wolf *.txt"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
alpha.txt
</tool_response><|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "shell", "arguments": {"command": "rm alpha.txt"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
(no output)
</tool_response><|im_end|>
<|im_start|>assistant
Done.<|im_end|>
"""


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert tokenizer().decode(encode(text)) == text


@given(st.lists(st.sampled_from([*NAMES, *WORDS, " ", "\n", "rm", "ls -S *.txt", "redwood", "é", *CONTROL, *MARKS])))
def test_text_made_of_its_own_pieces_comes_back(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert tokenizer().decode(encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("word", [*NAMES, *WORDS])
def test_every_name_and_word_is_one_token(word: str) -> None:
    assert len(encode(word)) == 1
    assert len(encode(f"rm {word}\n")) == 4


def test_a_word_inside_another_is_not_that_word() -> None:
    assert encode("red")[0] not in encode("redwood")


def test_the_template_writes_the_conversation_the_model_knows() -> None:
    assert tokenizer().apply_chat_template(CONVERSATION, tokenize=False) == TEXT
    head = tokenizer().apply_chat_template(CONVERSATION[:3], tokenize=False, add_generation_prompt=True)
    assert TEXT.startswith(head)
    assert head.endswith("<|im_start|>assistant\n")


def test_arguments_as_an_object_or_as_text_give_the_same_tokens() -> None:
    as_object = {"role": "assistant", "tool_calls": [{"function": {"name": "shell", "arguments": {"command": "ls"}}}]}
    render = tokenizer().apply_chat_template
    assert render([CONVERSATION[0], as_object], tokenize=False) == render([CONVERSATION[0], call("ls")], tokenize=False)


def test_a_system_message_takes_the_place_of_the_default_and_tools_change_nothing() -> None:
    render = tokenizer().apply_chat_template
    own = render([{"role": "system", "content": "Be brief."}, *CONVERSATION], tokenize=False)
    assert own == TEXT.replace("You are a shell agent.", "Be brief.")
    tool = {"type": "function", "function": {"name": "shell", "description": "", "parameters": {}}}
    assert render(CONVERSATION, tools=[tool], tokenize=False) == TEXT


def test_a_conversation_cut_at_control_tokens_encodes_to_the_same_ids() -> None:
    pieces = TEXT.replace("<|im_start|>", "\0<|im_start|>").split("\0")
    assert [i for piece in pieces for i in encode(piece)] == encode(TEXT)


def test_names_are_vocabulary_and_only_control_tokens_and_marks_are_added() -> None:
    assert sorted(tokenizer().get_added_vocab()) == sorted([*CONTROL, *MARKS])


def test_a_demonstration_teaches_what_the_model_says_and_nothing_else() -> None:
    ids, said = example(tokenizer(), CONVERSATION)
    assert tokenizer().decode(ids) == TEXT.removesuffix("\n")
    spoken = tokenizer().decode(ids[said])
    assert spoken == (
        '<tool_call>\n{"name": "shell", "arguments": {"command": "grep -l wolf *.txt"}}\n</tool_call><|im_end|>'
        '<tool_call>\n{"name": "shell", "arguments": {"command": "rm alpha.txt"}}\n</tool_call><|im_end|>'
        "Done.<|im_end|>"
    )


def test_the_shipped_folder_has_this_tokenizer(tmp_path: Any) -> None:
    build().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder() / name).read_text() == (tmp_path / name).read_text()


def test_the_shipped_model_loads_with_its_tokenizer_and_small() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder())
    assert loaded.encode(TEXT) == encode(TEXT)
    model = AutoModelForCausalLM.from_pretrained(folder())
    assert model.config.vocab_size == len(loaded) < 400
    assert sum(p.numel() for p in model.parameters()) < 450_000
    words = random.Random(0).sample(NAMES, 3)
    assert loaded.decode(loaded.encode(" ".join(words))) == " ".join(words)
