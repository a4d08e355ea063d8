"""``uniagent show RUN [N]``: one recorded episode, its tokens coloured by who wrote them.

On a terminal colours say it, elsewhere plain marks do: ``«sampled»``, ``‹sampled, not trainable›``, ``[repair]`` and
content and template as they are. Reads the record and the model's tokenizer.json only; loads neither torch nor
transformers. Where the tokenizer is gone, token ids are shown.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tomli
from rich.console import Console
from rich.table import Table
from rich.text import Text

from uniagent.engine import journal, model_files
from uniagent.engine.errors import UserError
from uniagent.engine.journal import Record
from uniagent.engine.run_folder import RunFolder, existing
from uniagent.engine.storage import parse_line, whole_lines
from uniagent.engine.trajectory.types import Provenance, Trajectory

_LOOK = {  # (provenance, trained) -> name, style, plain marks
    (Provenance.SAMPLED, True): ("sampled, trainable", "bold green", "«", "»"),
    (Provenance.SAMPLED, False): ("sampled, not trainable", "yellow", "‹", "›"),
    (Provenance.CONTENT, False): ("content", "default", "", ""),
    (Provenance.TEMPLATE, False): ("template", "bright_black", "", ""),
    (Provenance.REPAIR, False): ("repair", "magenta", "[", "]"),
}

_VISIBLE = {c: 0x2400 + c for c in range(32) if chr(c) not in "\t\n"}  # a tool's escape codes must not run here

Decode = Callable[[list[int]], str]


def show(run: Path, which: str, console: Console) -> None:
    """Print one episode: ``which`` is its number in the record from 1, a negative one from the end, or a session."""
    folder = existing(run)
    number, total, record = find(folder.episodes, which)
    decode = _decoder(folder, console)
    for part in render(record, decode, plain=not console.is_terminal):
        console.print(part, soft_wrap=True)
    console.print(f"episode {number} of {total} in {folder.episodes}", soft_wrap=True)


def find(path: Path, which: str) -> tuple[int, int, Record]:
    """(number, how many there are, the episode). Only the line wanted is parsed; raises UserError without one."""
    position = int(which) if which.removeprefix("-").isdigit() else None
    session = f'"session":{json.dumps(which)},'.encode()
    latest: deque[tuple[int, int, bytes]] = deque(maxlen=max(1, -(position or 0)))  # (episode, line, its text)
    chosen: tuple[int, int, bytes] | None = None
    count = 0
    for line, text in enumerate(whole_lines(path), 1):
        if not text.startswith(journal.EPISODE_START):
            continue
        count += 1
        latest.append((count, line, text))
        if position == count or (position is None and chosen is None and session in text[:4096]):
            chosen = latest[-1]
    if position is not None and position < 0 and count >= -position:
        chosen = latest[0]
    if chosen is None:
        have = f"it has episodes 1 to {count}" if count else "it has none yet"
        raise UserError(f"there is no episode {which} in {path}: {have}")
    return chosen[0], count, journal.decode(parse_line(path, chosen[1], chosen[2]))


def render(record: Record, decode: Decode, *, plain: bool) -> Iterator[Text | Table]:
    """The episode as printable parts: head, legend, each trajectory with its actions, reward and ledger."""
    episode, use = record.episode, record.use
    purpose = f"evaluation {use.evaluation!r}" if use.evaluation is not None else "training batch"
    yield Text(
        f"session {episode.session}  task {episode.task}  sample {episode.sample}  replica {episode.replica}  "
        f"{purpose} of step {use.step}",
        "bold",
    )
    yield _legend(plain)
    for index, trajectory in enumerate(episode.export.trajectories):
        parent = "" if trajectory.parent is None else f", branched from {trajectory.parent}"
        yield Text(
            f"\n── trajectory {index}: {trajectory.kind}, {len(trajectory.token_ids)} tokens, "
            f"weight {trajectory.weight:g}{parent}",
            "bold",
        )
        yield _tokens(trajectory, decode, plain)
        if trajectory.actions:
            yield _actions(trajectory)
    yield from _result(record)


def _tokens(trajectory: Trajectory, decode: Decode, plain: bool) -> Text:
    text = Text()
    change = (np.diff(trajectory.provenance) != 0) | (np.diff(trajectory.loss_mask.astype(np.int8)) != 0)
    starts = [0, *(np.flatnonzero(change) + 1).tolist(), len(trajectory.token_ids)]
    for start, end in itertools.pairwise(starts):
        if start == end:
            continue
        kind, trained = Provenance(trajectory.provenance[start]), bool(trajectory.loss_mask[start])
        _, style, before, after = _LOOK[kind, trained]
        piece = decode(trajectory.token_ids[start:end].tolist()).translate(_VISIBLE)
        text.append(f"{before}{piece}{after}" if plain else piece, style)
    return text


def _actions(trajectory: Trajectory) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    for name in ("action", "tokens", "fate", "echo", "home", "mean logprob", "versions"):
        table.add_column(name, justify="right" if name in ("action", "tokens", "mean logprob") else "left")
    for a in trajectory.actions:
        versions = sorted(set(trajectory.versions[a.start : a.end].tolist()))
        mean = float(np.mean(trajectory.logprobs[a.start : a.end])) if a.end > a.start else float("nan")
        table.add_row(
            str(a.order),
            str(a.end - a.start),
            a.fate,
            a.tier or "-",
            "yes" if a.home else "no",
            f"{mean:.3f}",
            ", ".join(map(str, versions)),
        )
    return table


def _result(record: Record) -> Iterator[Text]:
    episode, ledger = record.episode, record.episode.export.ledger
    result = episode.result
    solved = {True: "solved", False: "not solved"}[result.solved]
    parts = [f"{k} {v:g}" for k, v in result.components.items()]
    line = f"\nreward {result.reward:g} ({solved})" + (f": {', '.join(parts)}" if parts else "")
    yield Text(line, "bold green" if result.solved else "bold red")
    if result.failure or episode.error:
        yield Text(f"failure {result.failure or '-'}: {episode.error or 'no message'}", "red")
    if result.flags:
        yield Text(f"flags {', '.join(result.flags)}", "red")
    lost = [f"{n} {cause}" for cause, n in ledger.discarded.items()] or ["none"]
    yield Text(
        f"tokens sampled {ledger.sampled} = trainable {ledger.trainable} + context {ledger.context} "
        f"+ discarded ({', '.join(lost)})"
    )
    if record.use.tokens:
        yield Text("in the batch " + ", ".join(f"{n} {cause}" for cause, n in record.use.tokens.items()))
    yield Text("fates of all actions " + (", ".join(f"{i} {f}" for i, f in enumerate(episode.export.fates)) or "none"))
    if episode.timings:
        yield Text("seconds " + ", ".join(f"{part} {s:.2f}" for part, s in episode.timings.items()))


def _legend(plain: bool) -> Text:
    text = Text("tokens: ")
    for name, style, before, after in _LOOK.values():
        text.append(f"{before}{name}{after}" if plain else name, style)
        text.append("  ")
    return text


def _decoder(folder: RunFolder, console: Console) -> Decode:
    """Ids to text by the model's tokenizer.json; where there is none, the ids themselves."""
    try:
        path = model_files.folder(tomli.loads(folder.config.read_text())["model"]["path"]) / "tokenizer.json"
    except UserError as problem:
        console.print(f"(token ids instead of text: {problem})", soft_wrap=True)
        return _as_ids
    if not path.is_file():
        console.print(f"(token ids instead of text: {path} does not exist)", soft_wrap=True)
        return _as_ids
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _as_ids(ids: list[int]) -> str:
    return " ".join(map(str, ids)) + " "
