"""The record: what is read back is what was written, bit by bit, whatever an episode holds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from uniagent.engine import journal, storage
from uniagent.engine.episode import Episode
from uniagent.engine.errors import UserError
from uniagent.engine.journal import Journal, Record, Use, decode, encode
from uniagent.engine.ports import Failure, Sampling, TaskResult, VersionSpan
from uniagent.engine.trajectory.types import ActionSpan, Export, Ledger, Provenance, Trajectory

_TEXT = st.text(max_size=6)  # lone surrogates included
_FLOATS = st.floats(allow_infinity=False)
_IDS = hnp.arrays(np.int32, st.integers(0, 4), elements=st.integers(0, 300_000))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=5,
)
_SPANS = st.lists(st.builds(VersionSpan, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=2).map(
    tuple
)
_SAMPLING = st.builds(
    Sampling,
    max_tokens=st.integers(1, 9999),
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 50),
    stop_ids=st.lists(st.integers(0, 99), max_size=2).map(tuple),
)
_ACTION = st.builds(
    ActionSpan,
    order=st.integers(0, 9),
    start=st.integers(0, 9),
    end=st.integers(0, 9),
    sampling=_SAMPLING,
    tier=st.sampled_from([None, "verbatim", "normalised", "edited"]),
    home=st.booleans(),
    fate=st.sampled_from(["live", "retried", "side_call"]),
    kept=st.none() | st.lists(st.none() | _IDS, max_size=3).map(tuple),
    kv_versions=_SPANS,
)


@st.composite
def _trajectories(draw: st.DrawFn) -> Trajectory:
    kinds = draw(hnp.arrays(np.uint8, st.integers(0, 12), elements=st.integers(0, 3)))
    n, sampled = len(kinds), kinds == Provenance.SAMPLED
    logprobs = draw(hnp.arrays(np.float32, n, elements=st.floats(-(2.0**20), 0, width=32)))
    versions = draw(hnp.arrays(np.int32, n, elements=st.integers(0, 3)))
    return Trajectory(
        token_ids=draw(hnp.arrays(np.int32, n, elements=st.integers(0, 300_000))),
        provenance=kinds,
        loss_mask=draw(hnp.arrays(np.bool_, n)) & sampled,
        logprobs=np.where(sampled, logprobs, np.float32(np.nan)),
        versions=np.where(sampled, versions, -1).astype(np.int32),
        actions=tuple(draw(st.lists(_ACTION, max_size=3))),
        kind=draw(st.sampled_from(["main", "subagent", "side", "branch"])),
        weight=draw(st.floats(0, 1)),
        parent=draw(st.none() | st.integers(0, 3)),
    )


@st.composite
def _ledgers(draw: st.DrawFn) -> Ledger:
    trainable, context = draw(st.integers(0, 99)), draw(st.integers(0, 99))
    discarded = draw(st.dictionaries(st.sampled_from(["retried", "replaced"]), st.integers(0, 9)))
    return Ledger(trainable + context + sum(discarded.values()), trainable, context, discarded)


_NUMBERS = st.dictionaries(_TEXT, _FLOATS, max_size=2)
_RESULTS = st.builds(
    TaskResult,
    reward=_FLOATS,
    components=_NUMBERS,
    step_rewards=st.lists(_FLOATS, max_size=2).map(tuple),
    outcome=st.none() | st.booleans(),
    flags=st.lists(_TEXT, max_size=2).map(tuple),
    metrics=_NUMBERS,
    details=st.dictionaries(_TEXT, _JSON, max_size=2),
    failure=st.none() | st.sampled_from(Failure),
)
_EXPORTS = st.builds(
    Export,
    trajectories=st.lists(_trajectories(), max_size=2).map(tuple),
    fates=st.lists(st.sampled_from(["live", "retried"]), max_size=3).map(tuple),
    ledger=_ledgers(),
)
_TABLES = st.dictionaries(_TEXT, _JSON, max_size=2)
_EPISODES = st.builds(
    Episode,
    session=_TEXT,
    task=_TEXT,
    sample=st.integers(0),
    replica=st.integers(0, 99),
    result=_RESULTS,
    export=_EXPORTS,
    row=_TABLES,
    turns=st.lists(_TABLES, max_size=2).map(tuple),
    timings=_NUMBERS,
    error=st.none() | _TEXT,
)
_RECORDS = st.builds(
    Record,
    episode=_EPISODES,
    use=st.builds(Use, st.integers(0), st.none() | _TEXT, st.dictionaries(_TEXT, st.integers(0), max_size=2)),
)


# ---------------------------------------------------------------- tests


def same(a: Any, b: Any) -> bool:
    """Equal in value and type; arrays bit by bit; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if attrs.has(type(a)):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in attrs.fields(type(a)))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(_RECORDS)
def test_a_line_gives_back_the_record_it_was_made_of(record: Record) -> None:
    line = encode(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    parsed = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert same(decode(parsed), record)


def test_long_arrays_come_back_too(make_episode: Callable[..., Episode]) -> None:
    n = 20_000
    rng = np.random.default_rng(0)
    chain = Trajectory(
        token_ids=rng.integers(0, 150_000, n, dtype=np.int32),
        provenance=np.full(n, Provenance.SAMPLED, np.uint8),
        loss_mask=rng.random(n) < 0.5,
        logprobs=-rng.random(n, dtype=np.float32),
        versions=np.sort(rng.integers(0, 9, n, dtype=np.int32)),
        actions=(),
    )
    record = Record(make_episode(export=Export((chain,), (), Ledger())), Use(1))
    assert same(decode(json.loads(encode(record))), record)


def test_a_line_says_what_it_is_first(make_episode: Callable[..., Episode]) -> None:
    line = encode(Record(make_episode(), Use(3)))
    assert line.startswith(journal.EPISODE_START)
    value = json.loads(line)
    assert value["v"] == journal.VERSION
    [chain] = value["trajectories"]
    assert chain["provenance"] == [
        ["template", 1],
        ["content", 2],
        ["template", 1],
        ["sampled", 2],
        ["repair", 1],
        ["sampled", 1],
    ]
    assert chain["logprobs"] == [-0.25, -0.25, -0.25]
    assert chain["versions"] == [[3, 4, 6], [3, 7, 8]]
    assert chain["trained"] == [[4, 6]]


def test_a_field_of_a_later_program_is_passed_over(make_episode: Callable[..., Episode]) -> None:
    value = json.loads(encode(Record(make_episode(), Use(3))))
    value["ledger"]["new"] = value["use"]["new"] = value["trajectories"][0]["actions"][0]["sampling"]["new"] = 1
    assert decode(value).use == Use(3)


async def test_what_is_appended_is_read_in_order(tmp_path: Path, make_episode: Callable[..., Episode]) -> None:
    path = tmp_path / "episodes.jsonl"
    record = Journal(path)
    await record.header({"config": "abc"}, {"uniagent": "0"})
    async with trio.open_nursery() as nursery:
        for step in range(3):
            nursery.start_soon(record.append, [Record(make_episode(f"s{step}-{i}"), Use(step)) for i in range(4)])
    record.close()
    assert next(journal.lines(path))["hashes"] == {"config": "abc"}
    steps = [r.use.step for r in journal.read(path)]
    assert sorted(steps) == [0] * 4 + [1] * 4 + [2] * 4
    assert all(len(set(steps[i : i + 4])) == 1 for i in (0, 4, 8))  # batches do not mix


async def test_encoding_does_not_hold_the_loop(tmp_path: Path, make_episode: Callable[..., Episode]) -> None:
    """The work goes where the caller says, and nowhere else."""
    inside = []

    async def offload(function: Callable[..., Any], *arguments: Any) -> Any:
        inside.append(function)
        return function(*arguments)

    record = Journal(tmp_path / "episodes.jsonl", offload=offload)
    await record.append([Record(make_episode(), Use(0))])
    record.close()
    assert len(inside) == 1


async def test_a_full_disk_ends_with_a_sentence_and_whole_lines(
    tmp_path: Path, make_episode: Callable[..., Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "episodes.jsonl"
    record = Journal(path)
    await record.append([Record(make_episode("kept"), Use(0))])
    real = storage.os.write

    def full(fd: int, data: memoryview) -> int:
        if len(data) < 200:
            raise OSError(28, "No space left on device")
        return real(fd, data[: len(data) - 100])

    monkeypatch.setattr(storage.os, "write", full)
    with pytest.raises(UserError, match=r"episodes\.jsonl: the disk is full"):
        await record.append([Record(make_episode("lost"), Use(0))])
    monkeypatch.undo()
    record.close()
    assert [r.episode.session for r in journal.read(path)] == ["kept"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"v":1,"kind":"header"}\nnot json\n', r"episodes\.jsonl:2: not a JSON line"),
        ('{"v":99,"kind":"episode"}\n', r"episodes\.jsonl:1: not a line of record version 1"),
        ("[1]\n", r"episodes\.jsonl:1: not a line of record version 1"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_by_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        list(journal.read(path))


def test_the_page_describes_every_field(make_episode: Callable[..., Episode]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "record.md").read_text()
    value = json.loads(encode(Record(make_episode(), Use(3))))
    objects = [value, value["use"], value["result"], value["ledger"], value["trajectories"][0]]
    objects += [value["trajectories"][0]["actions"][0], value["trajectories"][0]["actions"][0]["sampling"]]
    fields = {name for item in objects for name in item}
    assert sorted(name for name in fields if f"`{name}`" not in page) == []


async def test_what_a_resumed_run_takes_again_counts_once(tmp_path: Path, make_episode: Callable[..., Episode]) -> None:
    path = tmp_path / "episodes.jsonl"
    record = Journal(path)

    def used(sample: int, step: int, evaluation: str | None = None) -> Record:
        return Record(attrs.evolve(make_episode("s"), sample=sample), Use(step, evaluation=evaluation))

    await record.header({}, {})
    await record.append([used(0, 0, "before/sampled"), used(0, 1), used(1, 1), used(2, 2), used(3, 2)])
    await record.append([used(9, 2, "step-2/sampled"), used(4, 3)])
    at = {"step": 2, "next": 4, "again": [1], "evals": {"before": {}}}
    await record.header({}, {}, resumed=at)
    await record.append([used(1, 3), used(4, 3)])
    record.close()
    found = [(r.episode.sample, r.use.step, r.use.evaluation) for r in journal.read(path)]
    assert found == [(0, 0, "before/sampled"), (0, 1, None), (2, 2, None), (3, 2, None), (1, 3, None), (4, 3, None)]
