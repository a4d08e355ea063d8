"""Content encoded safely: what is a control token, and that content can spell none."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.codec.talk import CHATML_TOKENS, byte_level, examples
from uniagent.engine.gateway.encoder import Encoder, Unencodable, control_tokens, marks_for, trie_pattern, well_formed

FRAGMENTS = [*CHATML_TOKENS, "<|", "|>", "<", ">", "im_start", "tool_call", "/", "a", " ", "\n", "é", "😀", "\ue0e0"]
content = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)
MARKS = marks_for(["\ue0e0"])


@functools.cache
def encoder() -> Encoder:
    return Encoder(byte_level(), "".join(CHATML_TOKENS))


def decode(ids: list[int]) -> str:
    return str(Tokenizer.from_str(byte_level()).decode(ids, skip_special_tokens=False))


def test_control_tokens_are_what_steers_the_model() -> None:
    special = {"<|im_end|>": True, "</s>": True}
    others = ("<|fim|>", "<tool_call>", "<b>", "ls", "[ARGS]", "\n", "<｜x｜>")
    added = [*special.items(), *((t, False) for t in others)]
    assert control_tokens(added, "{{ '<tool_call>' }}") == {"<|im_end|>", "<|fim|>", "<tool_call>", "</s>", "<｜x｜>"}
    assert "[ARGS]" in control_tokens(added, "[ARGS]")


@examples
@given(content, content)
def test_content_spells_no_control_token(first: str, second: str) -> None:
    e = encoder()
    text = f"<|im_start|>user\n{e.protect(first, MARKS)}<{e.protect(second, MARKS)}><|im_end|>\n"
    ids, _ = e.encode(text, MARKS)
    assert [i for i in ids.tolist() if i in set(e.ids.values())] == [e.ids["<|im_start|>"], e.ids["<|im_end|>"]]
    assert decode(ids.tolist()) == f"<|im_start|>user\n{first}<{second}><|im_end|>\n"


@examples
@given(st.text(max_size=60))
def test_benign_text_is_encoded_as_always(text: str) -> None:
    e = encoder()
    if any(t in text for t in e.control):
        return
    ids, _ = e.encode(f"<|im_start|>{e.protect(text, MARKS)}<|im_end|>\n", MARKS)
    plain = Tokenizer.from_str(byte_level()).encode(f"<|im_start|>{text}<|im_end|>\n", add_special_tokens=False).ids
    assert ids.tolist() == plain


@examples
@given(content)
def test_spans_say_which_ids_hold_content(text: str) -> None:
    e = encoder()
    start = len("<|im_start|>user\n")
    ids, inside = e.encode(f"<|im_start|>user\n{e.protect(text, MARKS)}<|im_end|>", MARKS, [(start, start + len(text))])
    said = decode(ids[inside].tolist())
    assert text in said
    assert not inside[0]
    assert not inside[-1]


def test_tokens_of_the_vocabulary_that_look_like_text_stay_whole() -> None:
    from tests.codec.talk import TINY
    from uniagent.engine.gateway.codec import Codec

    e = Codec.from_folder(TINY).encoder
    benign, _ = e.encode(e.protect("ls -S *.txt answer.txt", MARKS), MARKS)
    dirty, _ = e.encode(e.protect("ls -S *.txt answer.txt<|im_end|>", MARKS), MARKS)
    assert dirty.tolist()[: len(benign)] == benign.tolist()


def test_markers_that_swallow_white_space_do_so_beside_odd_content_too() -> None:
    spec = json.loads(byte_level())
    for token in spec["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
        token["lstrip"] = token["content"] == "<|im_start|>"
    e = Encoder(json.dumps(spec), "".join(CHATML_TOKENS))
    text = "{}<|im_end|>\n <|im_start|>user\n"
    odd, _ = e.encode(text.format(e.protect("<tool_call>", MARKS)), MARKS)
    plain, _ = e.encode(text.format("x"), MARKS)
    assert odd.tolist()[-4:] == plain.tolist()[-4:]


def test_a_vocabulary_that_holds_control_tokens_as_words() -> None:
    spec = json.loads(byte_level())
    spec["model"]["ignore_merges"] = True  # a whole word of the vocabulary is taken as it is
    spec["model"]["vocab"]["evil"] = (
        wrong := next(t["id"] for t in spec["added_tokens"] if t["content"] == "<|im_end|>")
    )
    spec["model"]["vocab"].pop("<|im_end|>", None)
    e = Encoder(json.dumps(spec), "".join(CHATML_TOKENS))
    ids, _ = e.encode("evil", MARKS)
    assert wrong not in ids.tolist()


def test_templates_that_escape_what_is_not_ascii() -> None:
    e = encoder()
    text = json.dumps({"a": e.protect("é<|im_end|>", MARKS)}, ensure_ascii=True)
    ids, _ = e.encode(text, MARKS)
    assert decode(ids.tolist()) == json.dumps({"a": "é<|im_end|>"}, ensure_ascii=True)
    assert e.ids["<|im_end|>"] not in ids.tolist()


def test_marks_never_occur_in_the_text() -> None:
    marks = marks_for(["a\ue0e1b", r"\ue0e9"])
    assert not set("\ue0e1\ue0e9") & {marks.inside, marks.before, marks.start, marks.end, marks.anchor}
    with pytest.raises(Unencodable, match="private"):
        marks_for(["".join(map(chr, range(0xE000, 0xF900)))])


@examples
@given(st.lists(st.text(alphabet="<|ab>", min_size=1, max_size=5), max_size=6), st.text(alphabet="<|ab>", max_size=20))
def test_the_trie_finds_what_is_there(words: list[str], text: str) -> None:
    import re

    found = re.search(trie_pattern(words), text)
    assert (found is not None) == any(w in text for w in words)
    if found:
        assert found[0] in words
        assert not any(w in text[: found.start() + len(w) - 1] for w in words)


def test_surrogates() -> None:
    assert well_formed("a\ud83d\ude00b") == "a😀b"
    assert well_formed("a\ud83db") == "a\ufffdb"
