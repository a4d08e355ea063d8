"""``uniagent harness``: which external harnesses there are, installing them, and finding out what one does.

``check`` needs no model and no network: a scripted model answers, in a sandbox on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import tomli
import trio
from attrs import field, frozen

from uniagent.adapters.agents import installs
from uniagent.adapters.agents.check import Report, check
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json
from uniagent.engine.registry import load

FOLDER = "UNIAGENT_HARNESSES"  # environment variable: where harnesses are installed


@frozen
class Settings:
    """The ``agent`` section of a task, as an agent reads it."""

    name: str
    options: Mapping[str, Json] = field(factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 where a check found that the harness does not do its task in one chain."""
    parser = argparse.ArgumentParser(prog="uniagent harness", description="External agent harnesses.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the named harnesses and their pinned packages")
    adding = commands.add_parser("install", help="install pinned harnesses into a folder, from npm and PyPI")
    adding.add_argument("folder", type=Path, help=f"each gets a folder in it; name it in {FOLDER} too")
    adding.add_argument("names", nargs="*", help="which; left out: all")
    checking = commands.add_parser("check", help="run a harness once against a scripted model and say what it does")
    checking.add_argument("name", help="a registered agent, or module:attribute")
    checking.add_argument("--programs", help=f"folder with its programs; left out: its own in ${FOLDER}")
    checking.add_argument("--options", type=Path, help="TOML file with agent.options, such as a recipe of `command`")
    checking.add_argument(
        "--ends-by", help="shell command that ends a session, where an answer without a call does not"
    )
    checking.add_argument("--isolation", default="bwrap", choices=("bwrap", "none"), help="of the sandbox")
    checking.add_argument("--timeout-s", type=float, default=180.0, help="wall clock of the run")
    checking.add_argument("--json", action="store_true", help="print one line of JSON last")
    checking.add_argument("--out", type=Path, help="write there, as JSON, what depends on the harness's version alone")
    args = parser.parse_args(argv)
    if args.command == "list":
        return _list()
    return _install(args) if args.command == "install" else _check(args)


def _list() -> int:
    for name in installs.harnesses():
        print(f"{name:<16}{load('agents', name).installer:<5}{' '.join(load('agents', name).packages)}")
    return 0


def _install(args: argparse.Namespace) -> int:
    for name in args.names or installs.harnesses():
        print(installs.install(args.folder.absolute(), name), flush=True)
    return 0


def _check(args: argparse.Namespace) -> int:
    given: dict[str, Json] = {}
    if args.options is not None:
        try:
            given = tomli.loads(args.options.read_text())
        except (OSError, ValueError) as problem:
            raise UserError(f"--options {args.options}: {problem}") from problem
    folder = os.environ.get(FOLDER)
    programs = args.programs or installs.installed(Path(folder) if folder else None, args.name)
    if programs:
        given = {"programs": str(Path(programs).absolute()), **given}
    run = partial(check, ends_by=args.ends_by, isolation=args.isolation, timeout_s=args.timeout_s)
    report = trio.run(run, Settings(args.name, given))
    if args.out is not None:
        args.out.write_text(json.dumps(report.lasting(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(text(report))
    if args.json:
        print(json.dumps(report.as_json(), ensure_ascii=False))
    return 0 if report.task_done and report.one_chain else 1


def text(report: Report) -> str:
    """The report for people."""
    r = report
    rows = {
        "harness": f"{r.harness} ({', '.join(r.packages) or 'not pinned'})",
        "task": f"{'done' if r.task_done else 'NOT done'}, {'finished' if r.finished else 'not finished'}"
        + (f": {r.error}" if r.error else ""),
        "dialect": f"{r.dialect}, {'streamed' if r.stream else 'not streamed'}",
        "sends": f"{', '.join(r.fields)}",
        "first request": f"{', '.join(r.roles)}; {r.sizes['system_chars']} characters of system text, "
        f"{len(r.tools)} tools of {r.sizes['tools_chars']} characters",
        "tools": ", ".join(r.tools),
        "shell tool": r.shell_tool or "none found",
        **{f"echo of {name}": ", ".join(ways) or "never" for name, ways in r.echoes.items()},
        "echo tiers": _counts(r.tiers),
        "side calls": str(r.side_calls),
        "chains": f"{_counts(r.chains)}: {'one conversation, one chain' if r.one_chain else 'NOT one chain'}",
        "tokens": f"{r.ledger['sampled']} sampled, {r.ledger['trainable']} trainable, {r.ledger['context']} context, "
        f"discarded: {_counts(r.ledger['discarded'])}",
        "left running": str(r.info.get("reaped", 0)),
        "stderr": str(r.info.get("stderr", "")).replace("\n", "\n" + " " * 20) or "empty",
    }
    return "\n".join(f"{name:<20}{value}" for name, value in rows.items())


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items()) or "none"
