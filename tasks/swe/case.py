"""One repair as the tasks of this folder see it, whatever its data set; made from the row in a sample's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import field, frozen

from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json


@frozen
class Case:
    """``script`` puts the hidden tests in place and runs them (see ``script``); ``parser`` reads its log. ``gold`` is
    the reference patch. ``archive``: a tar file of the repository on this machine, for a sandbox without one."""

    instance_id: str
    repo: str
    base_commit: str
    problem: str
    script: str
    parser: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_patch: str
    gold: str
    fail_only: bool = False
    workdir: str = "/testbed"
    version: str = ""
    created_at: str = ""
    archive: Path | None = None
    row: Mapping[str, Json] = field(factory=dict, repr=False)


def text(row: Mapping[str, Json], name: str, default: str | None = None) -> str:
    """A text of the row; raises UserError that names the instance and the field."""
    value = row.get(name, default)
    if not isinstance(value, str):
        raise UserError(f"{_where(row)}: the row's {name} is {_what(value)}, expected a text")
    return value


def texts(row: Mapping[str, Json], name: str) -> tuple[str, ...]:
    """A list of texts, which some data sets hold as JSON in a text."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, str) for one in value):
        raise UserError(f"{_where(row)}: the row's {name} is {_what(row.get(name))}, expected a list")
    return tuple(value)


def archive_of(row: Mapping[str, Json]) -> Path | None:
    """The row's own ``archive``, where somebody added one."""
    if "archive" not in row:
        return None
    path = Path(text(row, "archive"))
    if not path.is_file():
        raise UserError(f"{_where(row)}: archive = {str(path)!r}: there is no such file")
    return path


def _where(row: Mapping[str, Json]) -> str:
    return f"instance {row.get('instance_id', '?')!r}"


def _what(value: Json) -> str:
    return "missing" if value is None else repr(value)[:80]
