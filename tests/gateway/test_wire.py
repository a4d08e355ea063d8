"""Reading bodies: always what json.loads gives, and the same objects for what was seen before."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.engine.gateway import record
from uniagent.engine.gateway.wire import Bodies, common_bytes, load
from uniagent.engine.messages import Problem

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=4), values, max_size=3)
bodies = st.tuples(objects, st.lists(objects, max_size=5), objects)


def dumped(parts: tuple[dict, list, dict], *, ascii: bool, indent: int | None) -> bytes:
    head, items, tail = parts
    return json.dumps({**head, "messages": items, **tail}, ensure_ascii=ascii, indent=indent).encode("utf-8", "replace")


@settings(max_examples=300, deadline=None)
@given(st.lists(bodies, min_size=1, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_any_series_of_bodies_reads_as_json(series, ascii, indent):
    reader = Bodies()
    for parts in series:
        body = dumped(parts, ascii=ascii, indent=indent)
        assert reader.read(body, "messages") == load(body)


@settings(max_examples=200, deadline=None)
@given(st.lists(objects, min_size=1, max_size=8), st.data(), st.booleans())
def test_a_growing_conversation_reads_as_json_and_keeps_its_objects(messages, data, ascii):
    reader = Bodies()
    tools = [{"name": "é"}]
    previous: list = []
    for end in range(len(messages) + 1):
        now = messages[:end]
        if now and data.draw(st.booleans()):
            now = [*now[:-1], {**now[-1], "cache_control": 1}]
        body = json.dumps({"model": "m", "messages": now, "tools": tools}, ensure_ascii=ascii).encode()
        read = reader.read(body, "messages")
        assert read == json.loads(body)
        same = 0
        while same < min(len(previous), len(now)) and previous[same] == read["messages"][same]:
            same += 1
        assert all(a is b for a, b in zip(previous[:same], read["messages"][:same], strict=True))
        assert record.common(previous, read["messages"]) == record.common(list(previous), list(read["messages"]))
        previous = read["messages"]


def test_what_a_conversation_shares_with_its_last_request_is_known_without_looking(monkeypatch):
    looked = []
    monkeypatch.setattr(record.operator, "is_", lambda a, b: looked.append(a) or a is b)
    reader, kept = Bodies(), record.Requests()
    for end in (600, 602):
        body = json.dumps({"model": "m", "messages": [{"n": n} for n in range(end)]}).encode()
        request = kept.record(end, reader.read(body, "messages"))
    assert request["extend"] == {"messages": [600, [{"n": 600}, {"n": 601}]]}
    assert not looked


@settings(max_examples=200, deadline=None)
@given(bodies, st.integers(0, 10_000), st.binary(max_size=3))
def test_a_damaged_body_reads_as_json_or_is_refused(parts, at, damage):
    body = dumped(parts, ascii=False, indent=None)
    reader = Bodies()
    reader.read(body, "messages")
    at %= len(body) + 1
    broken = body[:at] + damage + body[at + len(damage) :]
    try:
        expected = load(broken)
    except Problem:
        with pytest.raises(Problem) as refused:
            reader.read(broken, "messages")
        assert refused.value.status == 400
    else:
        assert reader.read(broken, "messages") == expected


def test_trailing_comma_after_known_messages_is_refused():
    reader = Bodies()
    reader.read(b'{"messages":[{"a":1}]}', "messages")
    with pytest.raises(Problem):
        reader.read(b'{"messages":[{"a":1},]}', "messages")


def test_lone_surrogates_are_replaced_and_pairs_kept():
    body = b'{"messages":[{"content":"\\ud83d \\ud83d\\ude00"}],"x":"\\udc00"}'
    read = Bodies().read(body, "messages")
    assert read == {"messages": [{"content": "\ufffd \U0001f600"}], "x": "\ufffd"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"nul",
        b'{"messages":[{}]',
        b'{"messages":[{}]} x',
        b'{"a":NaN}',
        b'{"a":"\xff"}',
        b'{"messages":[{"a":Infinity}]}',
        b'{"a":' + b"[" * 100_000,
        b'{"messages":[{"a":' + b"[" * 100_000,
        b'{"a":' + b"9" * 5000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_no_json_object_is_refused_with_a_sentence(body):
    with pytest.raises(Problem) as refused:
        Bodies().read(body, "messages")
    assert refused.value.status == 400
    assert "body" in refused.value.message


def test_the_last_of_duplicate_keys_counts_as_in_json():
    body = b'{"messages":[{"a":1}],"messages":[{"a":2}],"b":1,"b":2}'
    assert Bodies().read(body, "messages") == {"messages": [{"a": 2}], "b": 2}


def test_common_bytes_across_blocks():
    rng = random.Random(0)
    a = bytes(rng.randrange(256) for _ in range(200_000))
    for at in (0, 1, 65_535, 65_536, 65_537, 131_072, 199_999):
        b = a[:at] + bytes([a[at] ^ 1]) + a[at + 1 :]
        assert common_bytes(a, b) == at
    assert common_bytes(a, a) == len(a)
    assert common_bytes(a, a[:150_000]) == 150_000
