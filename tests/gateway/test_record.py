"""Raw requests as differences: any series of requests comes back as it was, and a growing one is stored once."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.engine.gateway.record import Requests, apply, changes, common, replay

values = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, 1, 1.0, 2]) | st.text(max_size=1),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)
requests = st.dictionaries(st.sampled_from(["messages", "tools", "n", "x"]), values, max_size=4)


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_common_is_the_longest_prefix(a, b):
    n = common(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@settings(max_examples=300)
@given(requests, requests)
def test_changes_and_apply_are_inverse(base, now):
    change = json.loads(json.dumps(changes(base, now)))
    assert json.dumps(apply(base, change), sort_keys=True) == json.dumps(now, sort_keys=True)


@settings(max_examples=200)
@given(st.lists(requests, max_size=8))
def test_any_series_of_requests_is_replayed(series):
    kept = Requests()
    turns = [{"turn": i, "request": kept.record(i, r)} for i, r in enumerate(series)]
    assert replay(json.loads(json.dumps(turns))) == json.loads(json.dumps(series))


def test_two_conversations_side_by_side_are_each_stored_once():
    kept = Requests()
    a, b = [{"a": 0}], [{"b": 0}]
    turns = []
    for i in range(20):
        for talk in (a, b):
            turns.append({"turn": len(turns), "request": kept.record(len(turns), {"messages": list(talk)})})
            talk.append({"i": i})
    stored = sum(len(new) for t in turns for _, new in t["request"].get("extend", {}).values())
    assert stored == 2 * 19
    assert replay(turns)[-1] == {"messages": b[:-1]}
