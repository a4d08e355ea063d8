"""The record of a run: ``episodes.jsonl``, one JSON line an episode. This module alone owns its schema.

docs/record.md describes every field. Invariants: the file is append-only and every line says its schema version; what
``read`` gives equals what was appended, array by array and bit by bit; a line is written whole or not at all. Knows
nothing of training: whoever used an episode says so in its ``Use``.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import trio
from attrs import field, frozen

from uniagent.engine.episode import Episode
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Failure, Floats, Json, Sampling, TaskResult, VersionSpan
from uniagent.engine.storage import LineFile, parse_line, plain, whole_lines
from uniagent.engine.trajectory.types import ActionSpan, Export, Ledger, Provenance, Trajectory

VERSION: Final = 1
EPISODE_START: Final = f'{{"v":{VERSION},"kind":"episode",'.encode()
_CHUNK = 4096  # numbers encoded in one call, which holds the interpreter for well under a millisecond

Offload = Callable[..., Awaitable[Any]]  # (function, *arguments) -> its result, computed off the loop


@frozen
class Use:
    """What an episode was for: the training batch of a step, or an evaluation by name (at the step it was made).
    ``tokens`` says where the batch put its trainable tokens: trained, stale, infra, no_signal, filtered or
    skipped_step."""

    step: int
    evaluation: str | None = None
    tokens: Mapping[str, int] = field(factory=dict)


@frozen
class Record:
    """One line of the record."""

    episode: Episode
    use: Use


class Journal:
    """Appends to the record of a run. Encoding and writing happen off the loop, one batch at a time, in order."""

    def __init__(self, path: Path, *, offload: Offload = trio.to_thread.run_sync) -> None:
        """Open or create the file, cutting off a torn last line; raises UserError where it cannot be written."""
        self._file = LineFile(path)
        self._offload = offload
        self._turn = trio.Lock()

    async def header(
        self, hashes: Mapping[str, str], software: Mapping[str, str], *, resumed: Mapping[str, Json] | None = None
    ) -> None:
        """The line that opens a run or its continuation: sha256 of data set, template, tokenizer, model and config, the
        versions of the software and, where a run goes on, the position it goes on from."""
        line = {"v": VERSION, "kind": "header", "schema": "uniagent.episodes", "hashes": hashes, "software": software}
        if resumed is not None:
            line["resumed"] = resumed
        await self._write([json.dumps(plain(line), separators=(",", ":")).encode() + b"\n"])

    async def append(self, records: Sequence[Record]) -> None:
        """Write one line an episode. Raises UserError when the disk is full; earlier lines stay whole."""
        await self._write(map(encode, records))

    async def _write(self, lines: Iterable[bytes]) -> None:
        async with self._turn:
            await self._offload(self._file.append, lines)

    def close(self) -> None:
        self._file.close()


def encode(record: Record) -> bytes:
    """One episode as a line of JSON, newline included. Pure; takes about 25 ms per 10,000 tokens."""
    episode, use = record.episode, record.use
    value = {
        "v": VERSION,
        "kind": "episode",
        "session": episode.session,
        "task": episode.task,
        "sample": episode.sample,
        "replica": episode.replica,
        "use": plain(attrs.asdict(use)),
        "result": plain(attrs.asdict(episode.result)),
        "error": episode.error,
        "timings": plain(episode.timings),
        "ledger": plain(attrs.asdict(episode.export.ledger)),
        "fates": list(episode.export.fates),
        "trajectories": [_trajectory(t) for t in episode.export.trajectories],
        "row": plain(episode.row),
        "turns": plain(episode.turns),
    }
    return "".join(_pieces(value)).encode() + b"\n"


def decode(line: Mapping[str, Json]) -> Record:
    """The inverse of ``encode``, from a parsed line."""
    result = line["result"]
    episode = Episode(
        session=line["session"],
        task=line["task"],
        sample=line["sample"],
        replica=line["replica"],
        result=TaskResult(
            reward=_number(result["reward"]),
            components={k: _number(v) for k, v in result["components"].items()},
            step_rewards=tuple(map(_number, result["step_rewards"])),
            outcome=result["outcome"],
            flags=tuple(result["flags"]),
            metrics={k: _number(v) for k, v in result["metrics"].items()},
            details=result["details"],
            failure=Failure(result["failure"]) if result["failure"] else None,
            shaping={k: _number(v) for k, v in result.get("shaping", {}).items()},
        ),
        export=Export(
            trajectories=tuple(map(_read_trajectory, line["trajectories"])),
            fates=tuple(line["fates"]),
            ledger=Ledger(**_known(Ledger, line["ledger"])),
        ),
        row=line["row"],
        turns=tuple(line["turns"]),
        timings={k: _number(v) for k, v in line["timings"].items()},
        error=line["error"],
    )
    return Record(episode, Use(**_known(Use, line["use"])))


def read(path: Path) -> Iterator[Record]:
    """Every episode of a record that counts, in the order of writing: those that a resumed run took again are passed
    over, and so is a torn last line. Raises UserError for a file that cannot be read or is of a newer schema."""
    resumed = [(n, at) for n, line in _headers(path) if (at := line.get("resumed")) is not None]
    for number, line in enumerate(lines(path), 1):
        if line["kind"] == "episode" and not any(number < n and _void(line, at) for n, at in resumed):
            yield decode(line)


def lines(path: Path) -> Iterator[dict[str, Json]]:
    """Every line of a record as JSON, headers included."""
    for number, raw in enumerate(whole_lines(path), 1):
        yield _line(path, number, raw)


def _headers(path: Path) -> Iterator[tuple[int, dict[str, Json]]]:
    """Every line that is no episode, with its number from 1."""
    for number, raw in enumerate(whole_lines(path), 1):
        if not raw.startswith(EPISODE_START):
            yield number, _line(path, number, raw)


def _line(path: Path, number: int, raw: bytes) -> dict[str, Json]:
    line = parse_line(path, number, raw)
    if not isinstance(line, dict) or line.get("v") != VERSION:
        raise UserError(f"{path}:{number}: not a line of record version {VERSION}; use the uniagent that wrote it")
    return line


def _void(line: Mapping[str, Json], at: Mapping[str, Json]) -> bool:
    """Whether an episode, written before a run went on from the position ``at``, was taken again after it."""
    evaluation = line["use"].get("evaluation")
    if evaluation is not None:
        return evaluation.split("/")[0] not in at["evals"]
    return line["sample"] >= at["next"] or line["sample"] in at["again"]


# ---------------------------------------------------------------- trajectories


def _trajectory(t: Trajectory) -> dict[str, Json]:
    """Arrays as lists, what comes in runs as runs; logprobs of sampled tokens alone, because others have none."""
    sampled = t.provenance == Provenance.SAMPLED
    return {
        "kind": t.kind,
        "weight": t.weight,
        "parent": t.parent,
        "token_ids": t.token_ids.tolist(),
        "provenance": [[Provenance(kind).name.lower(), end - start] for kind, start, end in _runs(t.provenance)],
        "logprobs": _short(t.logprobs[sampled]),
        "versions": [[version, start, end] for version, start, end in _runs(t.versions) if version != -1],
        "trained": [[start, end] for on, start, end in _runs(t.loss_mask) if on],
        "actions": [_action(a) for a in t.actions],
    }


def _read_trajectory(t: Mapping[str, Json]) -> Trajectory:
    length = len(t["token_ids"])
    kinds = [Provenance[name.upper()] for name, _ in t["provenance"]]
    provenance = np.repeat(np.array(kinds, dtype=np.uint8), [n for _, n in t["provenance"]])
    loss_mask = np.zeros(length, dtype=np.bool_)
    for start, end in t["trained"]:
        loss_mask[start:end] = True
    versions = np.full(length, -1, dtype=np.int32)
    for version, start, end in t["versions"]:
        versions[start:end] = version
    logprobs = np.full(length, np.nan, dtype=np.float32)
    logprobs[provenance == Provenance.SAMPLED] = np.array(list(map(_number, t["logprobs"])), dtype=np.float32)
    return Trajectory(
        token_ids=np.array(t["token_ids"], dtype=np.int32),
        provenance=provenance,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        actions=tuple(map(_read_action, t["actions"])),
        kind=t["kind"],
        weight=t["weight"],
        parent=t["parent"],
    )


def _action(a: ActionSpan) -> dict[str, Json]:
    kept = None if a.kept is None else [None if ids is None else ids.tolist() for ids in a.kept]
    return {
        "order": a.order,
        "start": a.start,
        "end": a.end,
        "tier": a.tier,
        "home": a.home,
        "fate": a.fate,
        "sampling": attrs.asdict(a.sampling),
        "kv_versions": [[s.version, s.start, s.end] for s in a.kv_versions],
        "kept": kept,
    }


def _read_action(a: Mapping[str, Json]) -> ActionSpan:
    sampling = {**a["sampling"], "stop_ids": tuple(a["sampling"]["stop_ids"])}
    kept = a["kept"]
    if kept is not None:
        kept = tuple(None if ids is None else np.array(ids, dtype=np.int32) for ids in kept)
    return ActionSpan(
        order=a["order"],
        start=a["start"],
        end=a["end"],
        sampling=Sampling(**_known(Sampling, sampling)),
        tier=a["tier"],
        home=a["home"],
        fate=a["fate"],
        kept=kept,
        kv_versions=tuple(VersionSpan(*span) for span in a["kv_versions"]),
    )


def _runs(array: np.ndarray[Any, np.dtype[Any]]) -> list[tuple[int, int, int]]:
    """(value, start, end) of every run of equal values."""
    if not len(array):
        return []
    cuts = [0, *(np.flatnonzero(array[1:] != array[:-1]) + 1).tolist(), len(array)]
    return [(int(array[a]), a, b) for a, b in itertools.pairwise(cuts)]


def _short(values: Floats) -> list[float | None]:
    """The shortest decimals that give these float32 back: half the length of the same numbers as float64."""
    numbers = map(float, values.astype(np.float32).astype("U16").tolist())
    return [n if math.isfinite(n) else None for n in numbers]


def _known(kind: type[attrs.AttrsInstance], values: Mapping[str, Json]) -> dict[str, Json]:
    """What this version knows of an object: fields may be added without a new schema version."""
    return {f.name: values[f.name] for f in attrs.fields(kind) if f.name in values}


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _pieces(value: Json) -> Iterator[str]:
    """``json.dumps`` in pieces, so that no single call holds the interpreter for long."""
    if isinstance(value, dict) and value:
        opening = "{"
        for key, item in value.items():
            yield f"{opening}{json.dumps(key)}:"
            yield from _pieces(item)
            opening = ","
        yield "}"
    elif isinstance(value, list) and len(value) > _CHUNK and not isinstance(value[0], dict | list):
        chunks = (value[i : i + _CHUNK] for i in range(0, len(value), _CHUNK))
        yield "[" + ",".join(json.dumps(chunk, separators=(",", ":"))[1:-1] for chunk in chunks) + "]"
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        opening = "["
        for item in value:
            yield opening
            yield from _pieces(item)
            opening = ","
        yield "]"
    else:
        yield json.dumps(value, separators=(",", ":"))
