"""Checkpoints on disk: written beside their place and renamed into it, so that a crash leaves the last good one.

``checkpoints/step-N/hf`` is a Hugging Face folder that transformers and inference engines load.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from uniagent.engine.errors import UserError

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".safetensors.index.json", ".bin.index.json")


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def steps(checkpoints: Path) -> list[int]:
    """Steps with a whole checkpoint, ascending."""
    found = [p.name.removeprefix("step-") for p in checkpoints.glob("step-*") if p.is_dir()]
    return sorted(int(n) for n in found if n.isdigit())


def save_hf(model: Any, tokenizer_folder: Path, target: Path) -> None:
    """Writes ``model`` and the tokenizer files of ``tokenizer_folder`` to the folder ``target``, atomically. Raises
    UserError when it cannot be written, for example on a full disk."""
    with atomic_folder(target) as folder:
        model.save_pretrained(folder)
        for file in tokenizer_folder.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHTS) and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def load_hf(folder: Path, *, dtype: Any = None) -> Any:
    """The causal LM of a Hugging Face folder, in eval mode on the CPU, in the dtype it was saved in unless given."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a Hugging Face folder: it has no config.json")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", local_files_only=True).eval()


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to write into that becomes ``target`` at the end, on disk and whole, or disappears on an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.{os.getpid()}.part")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
        yield folder
        _flush(folder)
        if target.exists():  # a folder cannot be replaced in one call; between the two renames there is none
            old = target.with_name(f".{target.name}.{os.getpid()}.old")
            target.rename(old)
            folder.rename(target)
            shutil.rmtree(old)
        else:
            folder.rename(target)
        _sync(target.parent)
    except (OSError, SafetensorError) as problem:
        raise UserError(f"cannot write {target}: {problem}: free space there, or choose another folder") from problem
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
