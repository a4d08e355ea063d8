"""The folder of one run: config.toml (resolved), metrics.jsonl, episodes.jsonl, checkpoints/, summary.json, crash.txt.

Invariants: a run never writes into a folder that held something before, save that of the run it goes on with; after any
end, a crash or a full disk included, what is in the folder can be read. Knows no training.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli
from attrs import frozen

from uniagent.engine.config import RunConfig
from uniagent.engine.config_file import dump
from uniagent.engine.errors import UserError
from uniagent.engine.storage import plain, write_atomic, writing

STATE = "state.json"  # of a checkpoint: what training goes on from, beside the shards in dcp
FIXED = ("run.seed", "model.path", "tasks.data", "tasks.options", "learner.lora_rank")  # one run has one of each
_STEP = re.compile(r"step-(\d+)")


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


def reopen(path: Path, config: RunConfig) -> tuple[RunFolder, list[str]]:
    """The folder of an earlier run, to go on with, and the keys that ``config`` changes. Raises UserError where that
    would make another run of it."""
    folder = existing(path)
    before, now = (tomli.loads(text) for text in (folder.config.read_text(encoding="utf-8"), dump(config)))
    changed = sorted(
        f"{section}.{key}"
        for section in before.keys() | now.keys()
        for key in before.get(section, {}).keys() | now.get(section, {}).keys()
        if before.get(section, {}).get(key) != now.get(section, {}).get(key)
    )
    if other := [key for key in changed if key in FIXED]:
        raise UserError(
            f"cannot resume {path} with another {', '.join(other)}: use the run's own config ({folder.config}), or "
            "start a run of its own from the checkpoint (--checkpoint)"
        )
    if changed:
        write_atomic(folder.config, dump(config))
    with writing(folder.checkpoints):
        folder.checkpoints.mkdir(exist_ok=True)
    return folder, changed


def newest_state(folder: RunFolder) -> Path | None:
    """The newest checkpoint that training can go on from; None before the first one."""
    return next((step for step in _newest_first(folder.path) if (step / STATE).is_file()), None)


def adopt(folder: RunFolder, state: Path) -> Path:
    """Copies a training checkpoint of another run into the folder, so that this run can be resumed before it has one of
    its own."""
    target = folder.checkpoint(int(state.name.removeprefix("step-")))
    part = target.with_name(f".{target.name}.part")
    with writing(target):
        shutil.copytree(state, part)
        part.rename(target)
    return target


def find_state(path: Path) -> Path:
    """The training checkpoint (a step-N) that ``--checkpoint`` means: of a run folder the newest, a step-N folder, or
    its ``dcp``."""
    for candidate in [*_newest_first(path), path, *([path.parent] if path.name == "dcp" else [])]:
        if (candidate / STATE).is_file() and _STEP.fullmatch(candidate.resolve().name):
            return candidate.resolve()
    what = "does not exist" if not path.exists() else f"holds no training state ({STATE} and dcp)"
    raise UserError(
        f"--checkpoint {path}: it {what}; give checkpoints/step-N of a run, or, to start from weights alone, set "
        "model.path to its hf folder"
    )


def find_checkpoint(path: Path) -> Path:
    """The Hugging Face folder that ``--checkpoint`` means: a run folder (its newest whole checkpoint), a ``step-N``
    folder, its ``hf`` or ``dcp``, or any Hugging Face folder."""
    beside = [path.parent / "hf"] if path.name == "dcp" else []
    for candidate in [*(step / "hf" for step in _newest_first(path)), path, path / "hf", *beside]:
        if (candidate / "config.json").is_file():
            return candidate
    what = "does not exist" if not path.exists() else "holds no model (no hf/config.json)"
    raise UserError(f"--checkpoint {path}: it {what}; give checkpoints/step-N of a run, or the run folder itself")


def _newest_first(run: Path) -> list[Path]:
    """The whole checkpoints of a run folder."""
    steps = {int(m[1]): p for p in _children(run / "checkpoints") if (m := _STEP.fullmatch(p.name))}
    return [steps[n] for n in sorted(steps, reverse=True)]


def _children(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else []


def _free(path: Path) -> Path:
    """The path, or path-2, path-3, ... when runs start in one second."""
    names = (path if n == 1 else path.with_name(f"{path.name}-{n}") for n in range(1, 1000))
    return next(p for p in names if not p.exists())
