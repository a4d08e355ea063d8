"""Reads a Task Config file, TOML or YAML: a list of tasks, a table ``tasks`` that holds one, or a single task.

Gives plain tables in the order of the file; what they mean is ``config``'s business. A key written twice is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli
import yaml

from uniagent.engine.errors import UserError, nearest


class _UniqueKeys(yaml.SafeLoader):
    """YAML allows a key twice and keeps the last; a config that does so is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_tasks(path: Path) -> list[Mapping[str, Any]]:
    """The tasks of a file. Raises UserError for a file that cannot be read, parsed or has another shape."""
    parsers: dict[str, Callable[[str], Any]] = {".toml": tomli.loads, ".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in parsers:
        raise UserError(f"{path}: a Task Config ends in {', '.join(parsers)}; this one in {path.suffix!r}")
    try:
        found = parsers[path.suffix](path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob("*") if p.suffix in parsers] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such Task Config: {nearest(path.name, siblings)}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{path}: cannot read the Task Config: {problem}") from None
    except (tomli.TOMLDecodeError, yaml.YAMLError) as problem:
        raise UserError(f"{path}: not valid {path.suffix[1:].upper()}: {' '.join(str(problem).split())}") from None
    if isinstance(found, Mapping) and "name" not in found and "tasks" in found:
        if extra := sorted(str(k) for k in found if k != "tasks"):
            raise UserError(f"{path}: beside the list 'tasks' stands {extra[0]!r}; move it into a task")
        found = found["tasks"]
    tasks = [found] if isinstance(found, Mapping) else found
    if not isinstance(tasks, list) or not all(isinstance(task, Mapping) for task in tasks):
        raise UserError(f"{path}: a Task Config is a list of tasks, or a single one, each a table with a name")
    return list(tasks)


def _yaml(text: str) -> Any:
    return yaml.load(text, _UniqueKeys)
