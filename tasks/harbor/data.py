"""Task folders as samples: ``harbor/NAME`` with the option ``path``, a folder of task folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from uniagent.engine.errors import UserError, nearest
from uniagent.tasks.harbor.folder import read_folder


def samples(split: str, seed: int, *, path: str | None = None, tasks: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """One sample a folder below ``path`` (or below ``path/split``, where there is one), in the order of their names;
    ``tasks`` names some. Raises UserError for a folder that is not as it should be."""
    if path is None:
        raise UserError("the data set harbor needs the option path: a folder of task folders")
    root = Path(path, split) if Path(path, split).is_dir() else Path(path)
    found = {folder.name: folder for folder in sorted(root.glob("*")) if is_task(folder)}
    if is_task(root):
        found = {root.name: root}
    if not found:
        raise UserError(f"{root}: holds no task folder (one with task.toml or task.yaml)")
    if missing := [name for name in tasks if name not in found]:
        raise UserError(f"{root}: there is no task {missing[0]!r}: {nearest(missing[0], found)}")
    return (sample(found[name]) for name in (tasks or found))


def is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "task.yaml").is_file()


def sample(folder: Path) -> dict[str, Any]:
    """Raises UserError."""
    instruction = read_folder(folder).turns[0].instruction
    return {
        "name": "harbor",
        "prompt": [{"role": "user", "content": instruction}],
        "metadata": {"task": str(folder.resolve())},
    }
