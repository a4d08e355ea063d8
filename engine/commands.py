"""The commands of the engine itself: train, eval, show, config.

Each takes its arguments and gives the exit status. With ``--json`` standard output holds one JSON line and what people
read goes to standard error. The node is imported when a config has been accepted, so that mistakes are told at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from uniagent.engine import config_file, config_listing, run_folder, team
from uniagent.engine.config import RunConfig
from uniagent.engine.crash import guard
from uniagent.engine.errors import UserError, nearest
from uniagent.engine.observe.progress import Lines
from uniagent.engine.separate import formation
from uniagent.engine.storage import plain


class Parser(argparse.ArgumentParser):
    """argparse with a mistake told as a UserError, in one line."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"uniagent {command}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        if unknown != message.split(" ")[0] and unknown.startswith("-"):
            options = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
            message = f"there is no option {unknown}: {nearest(unknown.partition('=')[0], options)}"
        elif "=" in unknown and unknown != message.split(" ")[0]:
            message = f"write --set before each setting: --set {unknown}"
        raise UserError(f"{message} (see {self.prog} --help)")


def train(argv: Sequence[str]) -> int:
    """``uniagent train CONFIG``: a run from its config to summary.json."""
    parser = config_parser("train", "Train as a config says; everything is kept in the run folder.")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder (default: runs/<config>-<UTC time>)")
    where.add_argument("--resume", type=Path, metavar="RUN", help="go on in a run folder, from its newest checkpoint")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="go on from checkpoints/step-N of a run, in a new run folder"
    )
    args = parser.parse_args(argv)
    if args.resume and args.checkpoint:
        raise UserError(
            "--resume takes the run's newest checkpoint: leave --checkpoint out, or use it with a new --run-dir"
        )
    config = config_file.load(args.config, args.set)
    config_file.require(config, args.config, "tasks.file", "tasks.data")
    formation.refuse(config)
    if team.world()[0] > 0:  # torchrun: rank 0 runs the node, the others follow it
        with guard():
            _follow(config)
        return 0
    changed: list[str] = []
    if args.resume:
        folder, changed = run_folder.reopen(args.resume, config)
        start = run_folder.newest_state(folder)
    else:
        start = run_folder.find_state(args.checkpoint) if args.checkpoint else None
        folder = run_folder.create(args.run_dir, config, stem=Path(args.config).stem, now=datetime.now(UTC))
        if start:
            start = run_folder.adopt(folder, start)
    with guard(folder.crash), Lines(config.run.steps, Console(stderr=args.json)) as progress:
        progress.note(f"run folder {folder.path}")
        if args.resume or start:
            progress.note(f"goes on from {start or 'the start: there is no checkpoint yet'}")
        if changed:
            progress.note(f"changed since: {', '.join(changed)}")
        progress.phase("starting")
        from uniagent.engine import run

        summary = run.train(config, folder, progress, start=start, resumed=bool(args.resume))
        folder.write_summary(summary)
        progress.note(_trained(summary, folder.path))
    if args.json:
        print(json.dumps(plain(summary)))
    return int(summary.get("exit_status", 0))


def _follow(config: RunConfig) -> None:
    if config.rollout.mode == "separate":
        from uniagent.engine.separate.nodes import follow
    else:
        from uniagent.engine.team import follow
    follow(config)


def evaluate(argv: Sequence[str]) -> int:
    """``uniagent eval CONFIG``: success on the held-out samples."""
    parser = config_parser("eval", "Evaluate on the held-out samples, sampling and (eval.greedy) greedily.")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="checkpoints/step-N of a run, or the run folder")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="record the episodes in this folder")
    args = parser.parse_args(argv)
    if team.world()[1] > 1:
        raise UserError("uniagent eval runs in one process: start it without torchrun")
    config = config_file.load(args.config, args.set)
    config_file.require(config, args.config, "tasks.file", "eval.data")
    checkpoint = run_folder.find_checkpoint(args.checkpoint) if args.checkpoint else None
    folder = None
    if args.run_dir:
        folder = run_folder.create(args.run_dir, config, stem=Path(args.config).stem, now=datetime.now(UTC))
    with guard(folder.crash if folder else None), Lines(0, Console(stderr=args.json)) as progress:
        progress.phase("starting")
        from uniagent.engine import run

        result = run.evaluate(config, checkpoint, progress, folder)
        progress.note(_score(result))
    if args.json:
        print(json.dumps(plain(result)))
    return int(result.get("exit_status", 0))


def show(argv: Sequence[str]) -> int:
    """``uniagent show RUN [N]``: one recorded episode."""
    from uniagent.engine.observe.show import show as show_episode

    parser = Parser(
        "show", "Print a recorded episode: its tokens by who wrote them, its reward, where its tokens went."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("n", nargs="?", default="-1", metavar="N", help="episode from 1, -1 the last, or a session")
    args = parser.parse_args(argv)
    show_episode(args.run, args.n, Console())
    return 0


def config(argv: Sequence[str]) -> int:
    """``uniagent config``: every key."""
    parser = Parser("config", "Print every config key with its type, default and meaning, as a TOML file.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="as docs/config.md")
    form.add_argument("--json", action="store_true", help="as one line of JSON")
    args = parser.parse_args(argv)
    if args.json:
        print(json.dumps(config_listing.as_json()))
    else:
        print(config_listing.markdown() if args.markdown else config_listing.text())
    return 0


def config_parser(command: str, description: str) -> Parser:
    """A parser that takes CONFIG, --set and --json."""
    parser = Parser(command, description)
    parser.add_argument("config", metavar="CONFIG", help="a TOML file; uniagent config lists what it may say")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key; may be given repeatedly",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    return parser


def _trained(summary: Mapping[str, Any], folder: Path) -> str:
    ends = [summary.get("eval", {}).get(when) for when in ("before", "after")]
    scores = " → ".join(_score(end) for end in ends if end)
    stopped = "stopped early" if summary.get("exit_status") else "done"
    took = f" in {summary['wall_s']:.0f} s" if "wall_s" in summary else ""
    return f"{stopped}{took}{': ' + scores if scores else ''}. See {folder}/summary.json, uniagent show {folder}"


def _score(result: Mapping[str, Any]) -> str:
    if result.get("success") is None:
        return "not evaluated"
    spread = f" ± {result['stderr']:.3f}" if "stderr" in result else ""
    greedy = f", greedy {result['success_greedy']:.3f}" if result.get("success_greedy") is not None else ""
    return f"success {result['success']:.3f}{spread}{greedy}"
