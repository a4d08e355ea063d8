"""``uniagent bugfix make PROJECT --out data.jsonl``: samples of the task bugfix from any Python project with tests."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import httpx
import trio

from uniagent.engine.ports import Json
from uniagent.engine.providers import NodeProviders
from uniagent.tasks.base import open_sandbox
from uniagent.tasks.bugfix import place
from uniagent.tasks.bugfix.data import rows
from uniagent.tasks.bugfix.generate import Generator, Wanted
from uniagent.tasks.bugfix.project import Project, files_of, make_runtime
from uniagent.tasks.bugfix.recipe import Recipe, write
from uniagent.tasks.bugfix.writer import rewritten
from uniagent.tasks.check_judge import endpoint
from uniagent.tasks.config import SandboxConfig, TaskConfig
from uniagent.tasks.endpoint import Endpoint

OPTIONS = {"output_mib": 64.0, "memory_mib": 4096, "pids": 256}


def main(argv: Sequence[str]) -> int:
    """0 when there are samples, 1 when none was found; UserError where the project cannot be used."""
    parser = argparse.ArgumentParser(prog="uniagent bugfix", description=__doc__)
    making = parser.add_subparsers(required=True, metavar="make").add_parser("make", description=__doc__)
    making.add_argument("project", help="a folder, a git repository, or a version of a package: boltons==26.2.0")
    making.add_argument("--out", type=Path, required=True, help="samples, one a line")
    making.add_argument("--recipe", type=Path, help="the same in compact form")
    making.add_argument("--requires", nargs="*", default=[], help="packages that its tests need beside pytest")
    making.add_argument("--n", type=int, default=100, help="samples wanted (default 100)")
    making.add_argument("--tries", type=int, default=6, help="bugs tried in each function (default 6)")
    making.add_argument("--per-function", type=int, default=2, help="bugs kept in each function (default 2)")
    making.add_argument("--minutes", type=float, default=math.inf, help="stop looking after so many")
    making.add_argument("--seed", type=int, default=0)
    making.add_argument("--jobs", type=int, default=2, help="sandboxes at once (default 2)")
    making.add_argument("--writer", metavar="URL", help="a chat-completions endpoint that writes the statements")
    making.add_argument("--writer-model", default="", metavar="NAME", help="its model")
    making.add_argument("--writer-key", metavar="VARIABLE", help="the environment variable that holds its key")
    making.add_argument("--json", action="store_true", help="print the summary as one JSON line, last")
    args = parser.parse_args(argv)
    wanted = Wanted(args.n, args.tries, args.per_function, seed=args.seed, limit_s=60 * args.minutes)
    writer = endpoint("writer", args.writer, args.writer_model, args.writer_key)
    recipe = trio.run(make, Project(args.project, tuple(args.requires)), wanted, args.jobs, writer)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows(recipe)), encoding="utf-8")
    if args.recipe:
        write(recipe, args.recipe)
    print(table(recipe))
    if args.json:
        print(json.dumps({"samples": len(recipe.repairs), "tests": len(recipe.tests), "rejected": recipe.rejected}))
    return 0 if recipe.repairs else 1


async def make(project: Project, wanted: Wanted, jobs: int, writer: Endpoint | None = None) -> Recipe:
    files = await trio.to_thread.run_sync(files_of, project)
    await trio.to_thread.run_sync(make_runtime, project.requires)
    place.refuse_installed(files.packages)
    options: dict[str, Json] = {**OPTIONS}
    sandbox = place.shown(SandboxConfig(options=options), project)
    config = TaskConfig(name="bugfix", sandbox=sandbox)
    async with trio.open_nursery() as nursery, httpx.AsyncClient() as client:
        write_one = partial(rewritten, client, writer) if writer else None
        providers = NodeProviders(nursery, {"local": {"warm": 0}})
        generator = Generator(project, files, wanted, lambda: open_sandbox(config, providers), sandbox)
        recipe = await generator.make(lambda line: print(line, file=sys.stderr, flush=True), write_one, jobs)
        nursery.cancel_scope.cancel()
    return recipe


def table(recipe: Recipe) -> str:
    lines = [
        f"{recipe.project.source}: {len(recipe.repairs)} samples",
        "",
        "| bugs | what became of them |",
        "|---|---|",
    ]
    lines += [f"| {len(recipe.repairs)} | kept |"]
    return "\n".join([*lines, *(f"| {count} | {reason} |" for reason, count in recipe.rejected.items())])
