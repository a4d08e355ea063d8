"""The commands difficulty and history.

``uniagent difficulty CONFIG``: pass rates of samples, offline, and a first training set. ``uniagent history DB``: what
runs showed about samples, and which of them moved with the policy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import trio
from rich.console import Console

from uniagent.engine import config_file, run_folder
from uniagent.engine.commands import Parser, config_parser
from uniagent.engine.config import RunConfig
from uniagent.engine.crash import guard
from uniagent.engine.curriculum.growing import Growth, growths
from uniagent.engine.curriculum.history import Cell, History, Store, by_family
from uniagent.engine.errors import UserError, nearest
from uniagent.engine.observe.progress import Lines, Progress
from uniagent.engine.signals import Stop
from uniagent.engine.storage import plain, write_atomic


def difficulty(argv: Sequence[str]) -> int:
    """``uniagent difficulty CONFIG --n 8 --out train.jsonl``."""
    parser = config_parser("difficulty", "Estimate how hard the samples of tasks.data are for the config's model.")
    parser.add_argument("--n", type=int, default=8, help="trials of each sample")
    parser.add_argument("--samples", type=int, default=256, help="samples tried, the first of the data")
    parser.add_argument("--band", type=float, nargs=2, metavar=("LOW", "HIGH"), help="default: curriculum.band")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the samples in the band there, as JSONL")
    parser.add_argument(
        "--history", type=Path, metavar="DB", help="where trials are kept (default: curriculum.history, or trials.db)"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="in place of the config's model")
    args = parser.parse_args(argv)
    if args.n < 1 or args.samples < 1:
        raise UserError("--n and --samples are at least 1")
    config = config_file.load(args.config, args.set)
    config_file.require(config, args.config, "tasks.file", "tasks.data")
    band = tuple(args.band) if args.band else config.curriculum.band
    if not 0 <= band[0] <= band[1] <= 1:
        raise UserError(f"--band {band[0]:g} {band[1]:g}: pass rates, the lower one first")
    checkpoint = run_folder.find_checkpoint(args.checkpoint) if args.checkpoint else None
    path = args.history or Path(config.curriculum.history or "trials.db")
    with guard(), Lines(0, Console(stderr=args.json)) as progress, Store(path) as store:
        progress.phase("starting")
        result, kept = trio.run(_difficulty, config, checkpoint, store, progress, args.n, args.samples, band)
        from uniagent.engine.curriculum.difficulty import table

        for line in table(result):
            progress.note(line)
        if result["exit_status"]:
            progress.note(f"stopped early: what was tried is in {path}; the same command goes on from there")
        elif args.out:
            write_atomic(args.out, "".join(json.dumps(plain(row)) + "\n" for row in kept))
            progress.note(f"{len(kept)} samples with a pass rate in [{band[0]:g}, {band[1]:g}] are in {args.out}")
    if args.json:
        print(json.dumps(plain({**result, "history": str(path), "out": str(args.out) if args.out else None})))
    return int(result["exit_status"])


async def _difficulty(
    config: RunConfig,
    checkpoint: Path | None,
    store: Store,
    progress: Progress,
    n: int,
    samples: int,
    band: tuple[float, float],
) -> tuple[dict[str, Any], list[Any]]:
    from uniagent.engine.curriculum.difficulty import estimate, summary
    from uniagent.engine.curriculum.feed import identity
    from uniagent.engine.node import open_node

    stop = Stop(config.run.drain_s)
    async with open_node(config, stop=stop, progress=progress, trains=False, checkpoint=checkpoint) as node:
        rows = await trio.to_thread.run_sync(
            lambda: list(islice(node.rows(config.tasks.data, seed=config.run.seed, repeat=False), samples))
        )
        run = await trio.to_thread.run_sync(identity, node, "difficulty", rows)
        history = History(store, run, time.time)
        await history.begin()
        with stop.draining():
            found = await estimate(node, history, rows, n=n)
        if stop.event.is_set():
            found = await estimate(node, history, rows, n=0)
        result = {**summary(found, band), "n": n, "band": list(band), "run": run.run, "exit_status": stop.exit_status}
        return result, [d.row for d in found if d.within(band)]


def history(argv: Sequence[str]) -> int:
    """``uniagent history DB``."""
    parser = Parser("history", "What runs showed about samples: pass rates, and which moved with the policy.")
    parser.add_argument("history", type=Path, metavar="DB", help="a file of trials, or a run folder")
    parser.add_argument("--run", help="the run shown (default: the newest)")
    parser.add_argument("--by", choices=("family", "sample"), default="family")
    parser.add_argument("--purpose", choices=("train", "eval", "difficulty"), help="trials of this kind alone")
    parser.add_argument("--level", type=float, default=0.05, help="false discovery rate of what is said to have moved")
    parser.add_argument("--moved", action="store_true", help="only what moved")
    parser.add_argument("--top", type=int, default=30, help="lines at most; 0: all")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    args = parser.parse_args(argv)
    path = args.history / "trials.db" if args.history.is_dir() else args.history
    with Store(path, read_only=True) as store:
        runs = store.runs()
        names = [run["run"] for run in runs if run["trials"]]
        if args.run is not None and args.run not in names:
            raise UserError(f"{path}: there is no run {args.run!r} with trials: {nearest(args.run, names)}")
        shown = args.run or (names[-1] if names else None)
        where, values = "run = ?", [shown]
        if args.purpose:
            where, values = "run = ? AND purpose = ?", [shown, args.purpose]
        cells = store.cells(where, values)
    found = growths(by_family(cells) if args.by == "family" else _by_sample(cells), level=args.level)
    found = [g for g in found if g.moved or not args.moved]
    shown_rows = found[: args.top or None]
    console = Console(stderr=args.json, soft_wrap=True, highlight=False, markup=False)
    for run in runs:
        rate = f"{run['passes'] / run['trials']:.3f}" if run["trials"] else "-"
        console.print(f"{run['run']}: {run['trials']} trials, pass rate {rate}, {run['tokens']} tokens")
    if shown:
        console.print(f"\n{shown}, by {args.by}, the surest change first:")
        for line in _table(shown_rows):
            console.print(line)
        if len(found) > len(shown_rows):
            console.print(f"… {len(found) - len(shown_rows)} more; --top 0 shows all")
    if args.json:
        print(json.dumps(plain({"runs": runs, "run": shown, args.by: [attrs.asdict(g) for g in found]})))
    return 0


def _by_sample(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.sample, []).append(cell)
    return found


def _table(rows: Sequence[Growth]) -> list[str]:
    head = f"{'name':<24}{'trials':>7}{'rate':>7}   {'95 %':<15}{'versions':>10}{'early':>7}{'late':>7}{'q':>9}  moved"
    lines = [head]
    for g in rows:
        rate, interval = g.passes / g.trials, f"{g.low:.3f} - {g.high:.3f}"
        versions = f"{g.versions[0]}-{g.versions[1]}"
        moved = ("up" if g.z > 0 else "down") if g.moved else ""
        lines.append(
            f"{g.name[:23]:<24}{g.trials:>7}{rate:>7.3f}   {interval:<15}{versions:>10}{g.first:>7.3f}{g.last:>7.3f}"
            f"{g.q:>9.2g}  {moved}"
        )
    return lines
