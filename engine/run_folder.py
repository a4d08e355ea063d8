"""The folder of one run: config.toml (resolved), metrics.jsonl, episodes.jsonl, checkpoints/, summary.json, crash.txt.

Invariants: a run never writes into a folder that held something before; after any end, a crash or a full disk included,
what is in the folder can be read. Knows no training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import frozen

from uniagent.engine.config import RunConfig
from uniagent.engine.config_file import dump
from uniagent.engine.errors import UserError
from uniagent.engine.storage import plain, write_atomic, writing


@frozen
class RunFolder:
    """Where the parts of a run are."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def episodes(self) -> Path:
        return self.path / "episodes.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def crash(self) -> Path:
        return self.path / "crash.txt"

    def checkpoint(self, step: int) -> Path:
        """``checkpoints/step-N``; it will hold ``hf`` (a Hugging Face folder) and ``dcp`` (to go on training)."""
        return self.checkpoints / f"step-{step}"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomic(self.summary, json.dumps(plain(summary), indent=2) + "\n")


def create(path: Path | None, config: RunConfig, *, stem: str, now: datetime) -> RunFolder:
    """A fresh run folder with the resolved config in it: ``path``, or ``runs/<stem>-<UTC time>``. Raises UserError when
    the folder holds anything or cannot be written."""
    folder = RunFolder(path if path is not None else _free(Path("runs") / f"{stem}-{now:%Y%m%dT%H%M%SZ}"))
    if folder.path.exists() and not folder.path.is_dir():
        raise UserError(f"the run folder {folder.path} is a file; choose another with --run-dir")
    if folder.path.is_dir() and any(folder.path.iterdir()):
        raise UserError(f"the run folder {folder.path} is not empty; choose another with --run-dir, or remove it")
    with writing(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        write_atomic(folder.config, dump(config))  # first: where this fails the folder stays empty, to be tried again
        folder.checkpoints.mkdir()
    return folder


def existing(path: Path) -> RunFolder:
    """The folder of an earlier run; raises UserError when it is none."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        what = "holds no config.toml" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}; give the folder of a run, as uniagent train printed it (runs/...)")
    return folder


def find_checkpoint(path: Path) -> Path:
    """The Hugging Face folder that ``--checkpoint`` means: a run folder (its newest whole checkpoint), a ``step-N``
    folder, its ``hf`` or ``dcp``, or any Hugging Face folder."""
    steps = {int(m[1]): p for p in _children(path / "checkpoints") if (m := re.fullmatch(r"step-(\d+)", p.name))}
    newest_first = [steps[n] / "hf" for n in sorted(steps, reverse=True)]
    beside = [path.parent / "hf"] if path.name == "dcp" else []
    for candidate in [*newest_first, path, path / "hf", *beside]:
        if (candidate / "config.json").is_file():
            return candidate
    what = "does not exist" if not path.exists() else "holds no model (no hf/config.json)"
    raise UserError(f"--checkpoint {path}: it {what}; give checkpoints/step-N of a run, or the run folder itself")


def _children(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else []


def _free(path: Path) -> Path:
    """The path, or path-2, path-3, ... when runs start in one second."""
    names = (path if n == 1 else path.with_name(f"{path.name}-{n}") for n in range(1, 1000))
    return next(p for p in names if not p.exists())
