"""A GGUF file as a Hugging Face folder, to start training from: ``python -m uniagent.engine.learner.gguf FILE FOLDER``.

Quantised weights are expanded to fp32 first. Needs the extra ``gguf``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from uniagent.engine.errors import UserError
from uniagent.engine.learner.checkpoints import atomic_folder
from uniagent.engine.model_files import differences


def import_gguf(file: Path, target: Path) -> None:
    """Writes the model and tokenizer of ``file`` to the folder ``target``, atomically. Raises UserError for a file that
    transformers cannot read."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if not file.is_file():
        raise UserError(f"there is no file {file}")
    source = {"gguf_file": file.name, "local_files_only": True}
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            file.parent,
            dtype="float32",
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            **source,
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    except ImportError as problem:
        raise UserError("reading a GGUF file needs the package gguf: pip install 'uniagent[gguf]'") from problem
    except (OSError, ValueError, KeyError, NotImplementedError) as problem:
        raise UserError(f"cannot read {file} as a GGUF model: {problem}") from problem
    if wrong := differences(loaded):
        raise UserError(f"{file} does not hold the weights of a {type(model).__name__}: {wrong}")
    with atomic_folder(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m uniagent.engine.learner.gguf FILE.gguf FOLDER", file=sys.stderr)
        return 2
    try:
        import_gguf(Path(argv[0]), Path(argv[1]))
    except UserError as mistake:
        print(f"uniagent: {mistake}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
