"""Log parsers by name, from the package swebench (``pip install 'uniagent[swe]'``): those of its version 5, and of 4.

The package is taken for its parsers: there are more than fifty, each grown with the logs it has met, and a reward
should come from the same ones as published scores. Importing it is slow (seconds): call ``find`` in a thread.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from uniagent.engine.errors import UserError, nearest

Parse = Callable[[str], dict[str, str]]  # a log -> test -> status


def find(name: str, *, instance_id: str, repo: str, version: str) -> Parse:
    """The parser ``name`` for one instance. Raises UserError where the package or the parser is missing."""
    known = registry()
    if name not in known:
        raise UserError(
            f"instance {instance_id!r}: the installed swebench has no log parser {name!r}: {nearest(name, known)}"
        )
    spec = SimpleNamespace(instance_id=instance_id, repo=repo, version=version)
    return lambda log: dict(known[name](log, spec))


def registry() -> dict[str, Callable[[str, Any], dict[str, str]]]:
    """Every parser of the installed package by the name of its function."""
    package = harness("log_parsers")
    found: dict[str, Callable[[str, Any], dict[str, str]]] = dict(getattr(package, "PARSER_REGISTRY", {}))
    for module in pkgutil.iter_modules(package.__path__):
        for name, value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).items():
            if name.startswith("parse_log_") and callable(value):
                found.setdefault(name, value)
    return found


def harness(name: str) -> Any:
    """A module of ``swebench.harness``; raises UserError where the package is missing."""
    try:
        return importlib.import_module(f"swebench.harness.{name}")
    except ImportError as problem:
        raise UserError(
            f"repair tasks read test logs with the package swebench: pip install 'uniagent[swe]' ({problem})"
        ) from None
