"""``uniagent rollout --join URL``: a rollout node of a job of its own, for a run whose head is at URL.

The config comes from the head; ``--set`` changes what is different here (paths, the device, engine.slots). Ctrl-C lets
running sessions end, pushes them and leaves; a second one leaves at once. The node ends when the run does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import trio
from rich.console import Console

from uniagent.engine import config_file
from uniagent.engine.config import RunConfig
from uniagent.engine.crash import guard
from uniagent.engine.errors import UserError
from uniagent.engine.observe.progress import Lines, Progress
from uniagent.engine.separate import formation
from uniagent.engine.separate.http import HeadClient
from uniagent.engine.separate.worker import Unreachable

PATIENCE_S = 60.0  # for a head that is not up yet
PAUSE_S = 0.5


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str]) -> int:
    """Rolls out until the run ends; the exit status."""
    parser = _Parser(prog="uniagent rollout", description="Roll out for a separate run elsewhere.", allow_abbrev=False)
    parser.add_argument("--join", required=True, metavar="URL", help="the head's, http://HOST:PORT")
    parser.add_argument("--token", help=f"opens the head's door (default: the environment's {formation.TOKEN})")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="what is different on this machine"
    )
    args = parser.parse_args(argv)
    url, token = args.join.rstrip("/"), args.token or formation.given_token()
    if urlsplit(url).scheme != "http" or not urlsplit(url).port:
        raise UserError(f"--join {args.join}: write http://HOST:PORT, as the head's run prints it")
    if not token:
        raise UserError(f"the head's token is missing: give --token, or set {formation.TOKEN}")
    with guard(), Lines(0, Console(stderr=True)) as progress:
        return trio.run(_join, url, token, args.set, progress)


async def _join(url: str, token: str, sets: Sequence[str], progress: Progress) -> int:
    head = HeadClient.to(url, token)
    async with head.client:
        text = await _config(head)
        from uniagent.engine.separate.nodes import join

        return await join(await trio.to_thread.run_sync(_read, text, ["gateway.port=0", *sets]), head, progress)


async def _config(head: HeadClient) -> str:
    """The run's config, once its head is up."""
    began = trio.current_time()
    while True:
        try:
            return await head.config()
        except Unreachable as problem:
            if trio.current_time() - began > PATIENCE_S:
                raise UserError(f"no head answers at {head.url}: start the run first, or check --join") from problem
        await trio.sleep(PAUSE_S)


def _read(text: str, sets: Sequence[str]) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(text, encoding="utf-8")
        return config_file.load(file, sets)
