"""Where a model's files are, and the module made of them.

``builtin:NAME`` is a model a package ships; anything else is a Hugging Face folder on this disk. Nothing is
fetched. The heavy imports happen in ``load`` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uniagent.engine.errors import UserError
from uniagent.engine.registry import load as load_part

if TYPE_CHECKING:
    import torch


def folder(path: str) -> Path:
    """The Hugging Face folder behind model.path; raises UserError when it is not one."""
    found = Path(load_part("models", path.removeprefix("builtin:"))()) if path.startswith("builtin:") else Path(path)
    if found.is_dir() and (found / "hf" / "config.json").exists():  # a checkpoint of ours
        found = found / "hf"
    if found.suffix == ".gguf" and found.is_file():
        raise UserError(
            f"model.path: {str(found)!r} is a GGUF file; make a folder of it: "
            f"python -m uniagent.engine.learner.gguf {found} FOLDER"
        )
    if not (found / "config.json").exists():
        what = "has no config.json" if found.is_dir() else "does not exist"
        raise UserError(
            f"model.path: the folder {str(found)!r} {what}; give a Hugging Face model folder or builtin:NAME"
        )
    return found


def pick_device(wanted: str) -> str:
    """auto: the accelerator where there is one."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device = 'cuda', but torch sees no CUDA device; use 'cpu' or 'auto'")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def load(path: Path, *, dtype: str, device: str) -> torch.nn.Module:
    """A causal language model, in evaluation mode. dtype auto: float32 on a CPU, bfloat16 on an accelerator. Raises
    UserError for a folder that cannot be read or does not hold exactly the model's weights."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    chosen = {"auto": torch.float32 if device == "cpu" else torch.bfloat16}.get(dtype) or getattr(torch, dtype)
    try:
        model: Any
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=chosen, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, KeyError, SafetensorError) as problem:
        raise UserError(f"model.path: cannot load a model from {str(path)!r}: {problem}") from problem
    if wrong := differences(found):
        raise UserError(f"model.path: {str(path)!r} does not hold the weights of a {type(model).__name__}: {wrong}")
    return model.to(device).eval()  # type: ignore[no-any-return]


def differences(loading: Mapping[str, Any]) -> str:
    """What of transformers' loading info says that a file does not hold exactly the model's weights; with a warning, it
    would go on with random ones. Tied weights may be there once or twice."""
    shapes = [f"{name} is {tuple(there)} instead of {tuple(here)}" for name, there, here in loading["mismatched_keys"]]
    return "; ".join(
        text
        for what, names in (
            ("missing", sorted(loading["missing_keys"])),
            ("unexpected", sorted(loading["unexpected_keys"])),
            ("of another shape", sorted(shapes)),
        )
        if (text := _listed(what, names))
    )


def _listed(what: str, names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{what}: {', '.join(names[:most])}{more}" if names else ""
