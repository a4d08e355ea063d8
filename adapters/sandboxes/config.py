"""What one local sandbox is asked to be, from the ``sandbox`` section of a task.

Knows the keys and their meaning; not how they are enforced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from attrs import field, fields, frozen

from uniagent.engine.errors import UserError, nearest
from uniagent.engine.ports import Json

MIB = 1 << 20


def key(default: Any, help: str, check: Callable[[Any], bool], expected: str) -> Any:
    """A config key: its default, its meaning, and what a value must be."""
    metadata = {"help": help, "check": check, "expected": expected}
    return field(factory=default, metadata=metadata) if callable(default) else field(default=default, metadata=metadata)


def one_of(*choices: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda v: v in choices), " or ".join(map(repr, choices))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())


POSITIVE = (_is_number, "a positive number")
COUNT = (_is_count, "a positive whole number")
COUNT_OR_NONE = ((lambda v: v is None or _is_count(v)), "a positive whole number (left out: no limit)")
TEXT_MAP = (_is_text_map, "a table of text values")
PATHS = ((lambda v: isinstance(v, list | tuple) and all(isinstance(p, str) and p.startswith("/") for p in v)),
         "a list of absolute paths")  # fmt: skip


@frozen
class LocalConfig:
    """Keys of a sandbox whose provider is ``local``."""

    provider: str = key("local", "the backend", *one_of("local"))
    isolation: str = key("bwrap", "bwrap: namespaces; none: plain processes on this machine", *one_of("bwrap", "none"))
    network: str = key(
        "none", "none: only a loopback of its own; host: this machine's network", *one_of("none", "host")
    )
    workdir: str = key("/work", "writable directory inside; with isolation none it is a private host directory",
                       lambda v: isinstance(v, str) and v.startswith("/") and PurePosixPath(v).parts[1:2] not in
                       [(), *((d,) for d in ("usr", "etc", "proc", "dev", "tmp", "bin", "sbin", "lib", "lib64"))],
                       "an absolute path outside /usr, /etc, /proc, /dev, /tmp, /bin and /lib")  # fmt: skip
    files: Mapping[str, str] = key(dict, "written before the first command: path in the workdir -> text; a path that "
                                         "ends in / is an empty directory", *TEXT_MAP)  # fmt: skip
    env: Mapping[str, str] = key(dict, "environment variables", *TEXT_MAP)
    read_only: tuple[str, ...] = key((), "more host paths to show inside, read-only, at the same place", *PATHS)
    memory_mib: int | None = key(None, "memory", *COUNT_OR_NONE)
    pids: int | None = key(None, "processes and threads at once", *COUNT_OR_NONE)
    cpu_s: int | None = key(None, "CPU seconds of one process", *COUNT_OR_NONE)
    file_mib: int | None = key(None, "largest file a process may write", *COUNT_OR_NONE)
    output_mib: float = key(1, "output kept of one command: its head and its tail", *POSITIVE)
    start_timeout_s: float = key(30, "until the first answer of a new sandbox", *POSITIVE)

    @property
    def output_bytes(self) -> int:
        return int(self.output_mib * MIB)


def local_config(section: Mapping[str, Json]) -> LocalConfig:
    """Checked config; raises UserError that names the key, the value and what is allowed."""
    known = {f.name: f for f in fields(LocalConfig)}
    values: dict[str, Any] = {}
    for name, value in section.items():
        if name not in known:
            raise UserError(f"sandbox.{name}: no such key of the local sandbox; {nearest(name, known)}")
        wanted = known[name].metadata
        if not wanted["check"](value):
            raise UserError(f"sandbox.{name} = {value!r}: must be {wanted['expected']} ({wanted['help']})")
        values[name] = tuple(value) if isinstance(value, list) else value
    return LocalConfig(**values)
