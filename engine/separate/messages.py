"""What head and nodes say to each other, as JSON: leases, samplings, generations, episodes.

What is read equals what was written, bit by bit: a session's tokens train the same wherever it ran. Pure; the episode
has the form of the record (``engine.journal``), which owns it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from uniagent.engine import journal
from uniagent.engine.episode import Episode
from uniagent.engine.ports import Finish, Generation, Ids, Json, Sampling, SessionId, VersionSpan
from uniagent.engine.separate.leases import Kind, Lease


def lease(value: Lease) -> dict[str, Json]:
    return {**attrs.asdict(value), "kind": value.kind.value, "parts": list(value.parts)}


def read_lease(value: Mapping[str, Json]) -> Lease:
    return Lease(value["id"], Kind(value["kind"]), value["attempt"], tuple(value["parts"]), value["payload"])


def episode(value: Episode) -> str:
    """A line without its end. Takes about 25 ms per 10,000 tokens: off the loop."""
    return journal.encode(journal.Record(value, journal.Use(0))).decode().rstrip("\n")


def read_episode(line: str) -> Episode:
    return journal.decode(json.loads(line)).episode


def ask(prompt: Ids, sampling: Sampling, session: SessionId) -> dict[str, Json]:
    return {"prompt": prompt.tolist(), "sampling": attrs.asdict(sampling), "session": session}


def read_ask(value: Mapping[str, Json]) -> tuple[Ids, Sampling, SessionId]:
    sampling = {**value["sampling"], "stop_ids": tuple(value["sampling"]["stop_ids"])}
    return np.array(value["prompt"], np.int32), Sampling(**sampling), value["session"]


def generation(value: Generation) -> dict[str, Json]:
    kept = None if value.kept is None else [None if ids is None else ids.tolist() for ids in value.kept]
    return {
        "token_ids": value.token_ids.tolist(),
        "logprobs": value.logprobs.tolist(),  # float64 hold every float32
        "versions": _spans(value.versions),
        "kv_versions": _spans(value.kv_versions),
        "finish": value.finish.value,
        "cached_tokens": value.cached_tokens,
        "kept": kept,
    }


def read_generation(value: Mapping[str, Json]) -> Generation:
    kept = value["kept"]
    if kept is not None:
        kept = tuple(None if ids is None else np.array(ids, np.int32) for ids in kept)
    return Generation(
        np.array(value["token_ids"], np.int32),
        np.array(value["logprobs"], np.float32),
        _read_spans(value["versions"]),
        _read_spans(value["kv_versions"]),
        Finish(value["finish"]),
        value["cached_tokens"],
        kept,
    )


def _spans(spans: Sequence[VersionSpan]) -> list[list[int]]:
    return [[s.version, s.start, s.end] for s in spans]


def _read_spans(spans: Sequence[Sequence[Any]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(*span) for span in spans)
