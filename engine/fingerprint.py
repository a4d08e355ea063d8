"""sha256 fingerprints of what a run is made of, for the record's header: data set, template, tokenizer, model, config.

Blocking: hashing a large model's weights takes seconds, so call it from a worker thread.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from uniagent.engine.storage import plain

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")
_MODEL = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin")
_SOFTWARE = ("uniagent", "trio", "torch", "transformers", "tokenizers", "numpy")


def of_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def of_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """Of samples in their order; keys in any order give the same."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(plain(row), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def of_files(folder: Path, patterns: Iterable[str]) -> str:
    """Of the names and contents of a folder's files that match; no match gives the hash of nothing."""
    digest = hashlib.sha256()
    for path in sorted({p for pattern in patterns for p in folder.glob(pattern) if p.is_file()}):
        with path.open("rb") as file:
            digest.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def of_run(*, config: str, model: Path, template: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The ``hashes`` of a record's header: the resolved config as TOML, the model's Hugging Face folder, the chat
    template's text and the samples."""
    return {
        "config": of_text(config),
        "dataset": of_rows(rows),
        "template": of_text(template),
        "tokenizer": of_files(model, TOKENIZER),
        "model": of_files(model, _MODEL),
    }


def software() -> dict[str, str]:
    """Versions of what computes the numbers; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in _SOFTWARE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
