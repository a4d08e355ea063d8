"""Checkpoint folders: written beside their place and renamed into it, so that a crash leaves the last good one.

A run's ``checkpoints/step-N`` holds ``hf``, a Hugging Face folder that transformers and inference engines load, and
``dcp``, what training goes on from (``snapshots``). A folder with its final name is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from uniagent.engine.errors import UserError
from uniagent.engine.learner.weights import named_weights
from uniagent.engine.storage import refused, write_atomic

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".safetensors.index.json", ".bin.index.json")


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def steps(checkpoints: Path) -> list[int]:
    """Steps with a whole checkpoint, ascending."""
    found = [p.name.removeprefix("step-") for p in checkpoints.glob("step-*") if p.is_dir()]
    return sorted(int(n) for n in found if n.isdigit())


def mark_best(checkpoints: Path, step: int, value: float) -> bool:
    """Notes a step's score (higher is better) and says whether it is the best so far; ``prune`` keeps that one."""
    before = _best(checkpoints)
    if before is not None and before["value"] >= value:
        return False
    write_atomic(checkpoints / "best.json", json.dumps({"step": step, "value": value}))
    return True


def forget_best(checkpoints: Path, *, after: int) -> None:
    """Takes back the note of a best step after ``after``: a run that goes on from there has yet to come to it."""
    found = best(checkpoints)
    if found is not None and found > after:
        (checkpoints / "best.json").unlink()


def best(checkpoints: Path) -> int | None:
    """The step with the best score noted."""
    found = _best(checkpoints)
    return None if found is None else int(found["step"])


def _best(checkpoints: Path) -> dict[str, float] | None:
    file = checkpoints / "best.json"
    return json.loads(file.read_text()) if file.exists() else None


def prune(checkpoints: Path, keep: int) -> list[int]:
    """Removes all but the newest ``keep`` checkpoints and the best, and what a crash left half written. Gives the steps
    that are left."""
    chosen = {*steps(checkpoints)[-keep:], best(checkpoints)}
    for step in steps(checkpoints):
        if step not in chosen:
            gone = checkpoints / f".step-{step}.old"  # hidden first: a folder with its final name is whole
            step_folder(checkpoints, step).rename(gone)
            shutil.rmtree(gone)
    for rest in (*checkpoints.glob(".step-*.part"), *checkpoints.glob(".step-*.old")):
        shutil.rmtree(rest, ignore_errors=True)
    return steps(checkpoints)


def save_hf(model: Any, tokenizer_folder: Path, target: Path) -> None:
    """Writes ``model`` and the tokenizer files of ``tokenizer_folder`` to the folder ``target``, atomically. Raises
    UserError when it cannot be written, for example on a full disk."""
    with atomic_folder(target) as folder:
        write_hf(model, dict(exported(model)), tokenizer_folder, folder)


def exported(model: Any) -> Iterator[tuple[str, Tensor]]:
    """What a Hugging Face folder holds: weights, tied ones once, and buffers that are saved."""
    yield from named_weights(model)
    saved = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def write_hf(model: Any, weights: dict[str, Any], tokenizer_folder: Path, folder: Path) -> None:
    """The files of a Hugging Face folder, without more ado: ``model`` gives the config."""
    model.save_pretrained(folder, state_dict=weights)
    for file in tokenizer_folder.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS) and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to write into that becomes ``target`` at the end, on disk and whole, or disappears on an error."""
    part = begin(target)
    try:
        with writing(target):
            yield part
            commit(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """What goes wrong on disk becomes a UserError that names ``target``."""
    try:
        yield
    except OSError as problem:
        raise refused(target, problem.errno) from problem
    except SafetensorError as problem:
        raise UserError(f"cannot write {target}: {problem}; free some space or choose another folder") from problem


def begin(target: Path) -> Path:
    """An empty folder beside ``target``."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with writing(target):
        part.mkdir(parents=True)
    return part


def commit(part: Path, target: Path) -> None:
    """Makes ``part`` the folder ``target``, once all of it is on disk."""
    for path in [*part.rglob("*"), part]:
        _sync(path)
    if target.exists():  # a folder cannot be replaced in one call; between the two renames there is none
        old = target.with_name(f".{target.name}.old")
        target.rename(old)
        part.rename(target)
        shutil.rmtree(old)
    else:
        part.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
