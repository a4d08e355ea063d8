"""Every config key with its type, default and meaning: for the terminal, as Markdown (docs/config.md) and as JSON.

All of it is read off ``engine.config``; nothing is said twice.
"""

from __future__ import annotations

from typing import Any

import attrs

from uniagent.engine.config_file import FIELDS, allowed
from uniagent.engine.config_values import expected, show

_MARKDOWN_HEAD = """# Config

Made by `uniagent config --markdown`; do not edit.

A run is described by one TOML file. Every key has a default; a file names only what differs. `--set section.key=value`
overrides a key (the value in TOML, or bare text), `--set sandbox.options.local.isolation=none` reaches into a table.
Paths are relative to the TOML file, those of `--set` to the current folder. The run folder keeps the resolved config as
`config.toml`, from which the same run starts again. A mistake ends the command with status 2 and one line that names
the file, the key, the value and what is allowed. Counts are global, durations end in `_s`, sizes in `_mib`.
"""


@attrs.frozen
class Row:
    """One key: what it takes, in words, and what it means."""

    key: str
    type: str
    default: Any
    help: str


def rows() -> list[Row]:
    return [
        Row(f"{section}.{name}", _type(field), _default(field), field.metadata["help"])
        for section, fields in FIELDS.items()
        for name, field in fields.items()
    ]


def text() -> str:
    """A TOML file with every key at its default and its meaning as a comment."""
    lines: list[str] = []
    for section, keys in _by_section():
        lines += ["", f"[{section}]"]
        settings = [f"{row.key.split('.')[1]} = {_toml(row.default)}" for row in keys]
        width = min(40, max(map(len, settings)))
        lines += [f"{s:<{width}}  # {row.help} ({row.type})" for s, row in zip(settings, keys, strict=True)]
    return "\n".join(lines[1:])


def markdown() -> str:
    lines = [_MARKDOWN_HEAD]
    for section, keys in _by_section():
        lines += [f"## [{section}]", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for row in keys:
            cells = (f"`{row.key.split('.')[1]}`", row.type, f"`{_toml(row.default)}`", row.help)
            lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def as_json() -> list[dict[str, Any]]:
    return [attrs.asdict(row) for row in rows()]


def _by_section() -> list[tuple[str, list[Row]]]:
    every = rows()
    return [(section, [r for r in every if r.key.split(".")[0] == section]) for section in FIELDS]


def _type(field: attrs.Attribute[Any]) -> str:
    words = expected(field.type).removeprefix("a ")
    low, high = field.metadata.get("at_least"), field.metadata.get("at_most")
    names = allowed(field)
    if names:
        words = ("any of: " if words.startswith("list") else "one of: ") + ", ".join(names)
    bounds = [f"≥ {low}" if low is not None else "", f"≤ {high}" if high is not None else ""]
    return ", ".join([words, *filter(None, bounds)])


def _default(field: attrs.Attribute[Any]) -> Any:
    default: Any = field.default
    value = default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
    return list(value) if isinstance(value, tuple) else value


def _toml(value: Any) -> str:
    return "(not set)" if value is None else show(value)
