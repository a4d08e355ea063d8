"""RunConfig from TOML and back: ``load`` and ``dump``.

Every mistake of a file is collected and told in one line each: the file (or the ``--set``), the key, the value, what
is allowed and the nearest valid name. Sections, keys, types and ranges are read off ``engine.config``; this module
knows no key by name. Relative paths are relative to the TOML file, those of ``--set`` to the current folder; a loaded
config holds absolute paths only, so ``load(dump(config))`` gives the same config from anywhere.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli
import tomli_w

from uniagent.engine import model_files, registry
from uniagent.engine.config import RunConfig, check, sections
from uniagent.engine.config_values import show, structure
from uniagent.engine.errors import UserError, nearest

_CLASSES: dict[str, Any] = {f.name: f.type for f in attrs.fields(attrs.resolve_types(RunConfig))}
FIELDS: dict[str, dict[str, attrs.Attribute[Any]]] = {
    section: {f.name: f for f in attrs.fields(attrs.resolve_types(_CLASSES[section]))} for section in sections()
}


def load(path: str | Path, sets: Sequence[str] = ()) -> RunConfig:
    """The config in a TOML file, with ``section.key=value`` settings on top. Raises UserError, one line a problem."""
    path = Path(path)
    document = _parse(path)
    origins: dict[str, str] = {}
    problems: list[str] = []
    for setting in sets:
        _apply(document, setting, origins, problems)
    values: dict[str, dict[str, Any]] = {}
    for section, table in document.items():
        if section not in FIELDS:
            problems.append(f"{_where(path, origins, section)}: {_unknown_section(section, table)}")
        elif not isinstance(table, dict):
            problems.append(f"{_where(path, origins, section)}: {section} = {show(table)}: it is a table, [{section}]")
        else:
            values[section] = _section(path, section, table, origins, problems)
    if not problems:
        config = RunConfig(**{section: _CLASSES[section](**given) for section, given in values.items()})
        problems = [f"{_where(path, origins, k)}: {k} = {show(v)}: {text}" for k, v, text in check(config)]
    if problems:
        raise UserError("\n".join(problems))
    return config


def require(config: RunConfig, path: str | Path, *keys: str) -> None:
    """Raise UserError unless each text key (``tasks.file``) is set."""
    missing = []
    for key in keys:
        section, name = key.split(".")
        if not getattr(getattr(config, section), name):
            missing.append(
                f"{path}: {key} is not set, and this command needs it ({FIELDS[section][name].metadata['help']})"
            )
    if missing:
        raise UserError("\n".join(missing))


def dump(config: RunConfig) -> str:
    """The config as TOML, every key of it. A key whose value is None is left out: TOML has no null."""
    return tomli_w.dumps({section: _plain(attrs.asdict(getattr(config, section))) for section in sections()})


def allowed(field: attrs.Attribute[Any]) -> list[str]:
    """The values a key is limited to: its choices and the names its registry knows; empty: no such limit."""
    names = registry.names(field.metadata["registry"]) if field.metadata.get("registry") else []
    return list(dict.fromkeys([*(field.metadata.get("choices") or ()), *names]))


# ---------------------------------------------------------------- reading


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomli.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        near = _near_file(path)
        raise UserError(f"{path}: there is no such config file{near} (looked in {path.absolute().parent})") from None
    except tomli.TOMLDecodeError as problem:
        raise UserError(f"{path}:{problem.lineno}:{problem.colno}: not valid TOML: {problem.msg}") from None
    except UnicodeDecodeError as problem:
        raise UserError(f"{path}: not UTF-8 text (byte {problem.start}); a config is a TOML file") from None
    except OSError as problem:
        raise UserError(f"{path}: cannot be read: {problem.strerror}") from None


def _apply(document: dict[str, Any], setting: str, origins: dict[str, str], problems: list[str]) -> None:
    """Put one ``section.key=value`` into the document. What is no TOML value is taken as bare text."""
    name, _, text = (part.strip() for part in setting.partition("="))
    try:
        given = tomli.loads(f"{name} = {text}")
    except tomli.TOMLDecodeError:
        try:
            given = tomli.loads(f"{name} = {json.dumps(text)}")
        except tomli.TOMLDecodeError:
            given = {}
    section = next(iter(given), "")
    inner = given.get(section)
    if not isinstance(inner, dict) or "=" not in setting:
        problems.append(f"--set {setting}: write section.key=value, for example --set run.steps=20")
        return
    name = next(iter(inner))
    field = FIELDS.get(section, {}).get(name)
    if field is not None and field.type is str and not isinstance(inner[name], str | dict):
        inner = {name: text}  # a key that holds text takes 123 or true as it stands
    origins[f"{section}.{name}"] = f"--set {setting}"
    if section not in document:
        origins[section] = f"--set {setting}"
    if isinstance(document.setdefault(section, {}), dict):
        document[section] = _merged(document[section], inner)


def _merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{k: _merged(below.get(k), v) for k, v in above.items()}}


def _section(
    path: Path, section: str, table: Mapping[str, Any], origins: Mapping[str, str], problems: list[str]
) -> dict[str, Any]:
    """The values of one section, as its class takes them."""
    given = {}
    for name, value in table.items():
        key = f"{section}.{name}"
        where = _where(path, origins, key)
        field = FIELDS[section].get(name)
        if field is None:
            problems.append(f"{where}: {key} = {show(value)}: {_unknown_key(section, name)}")
            continue
        try:
            base = Path() if key in origins else path.parent
            given[name] = _value(field, value, base)
        except ValueError as problem:
            problems.append(f"{where}: {key} = {show(value)}: {problem}")
    return given


def _value(field: attrs.Attribute[Any], value: Any, base: Path) -> Any:
    """One value as its field takes it; raises ValueError with what is allowed."""
    try:
        found = structure(value, field.type)
    except ValueError as problem:
        names = allowed(field)
        raise ValueError(f"{problem}; allowed: {', '.join(names)}" if names else str(problem)) from None
    for item in found if isinstance(found, tuple) else (found,):
        _in_range(field, item)
    return _located(field.metadata["path"], found, base) if field.metadata.get("path") and found else found


def _in_range(field: attrs.Attribute[Any], item: Any) -> None:
    """Raise ValueError for a number out of range or a name that is not one of those allowed."""
    low, high, kind = (field.metadata.get(k) for k in ("at_least", "at_most", "registry"))
    if isinstance(item, int | float) and not isinstance(item, bool):
        if not math.isfinite(item):
            raise ValueError("must be a finite number")
        if low is not None and item < low:
            raise ValueError(f"must be at least {low}")
        if high is not None and item > high:
            raise ValueError(f"must be at most {high}")
    names = allowed(field)
    dotted = kind and ":" in str(item)
    if (kind or names) and item is not None and item not in names and not dotted:
        raise ValueError(nearest(str(item), names) + (" (or module:attribute)" if kind else ""))


def _located(kind: str, value: str, base: Path) -> str:
    """A path made absolute and seen to exist; names of built-in models and data sets stay as they are."""
    builtin = kind == "model" and value.startswith("builtin:")
    try:
        path = (base / os.path.expanduser(value)).resolve()
        if kind == "new":
            return str(path)
        if kind == "model":
            model_files.folder(value if builtin else str(path))
            return value if builtin else str(path)
        if path.is_file() or (kind == "samples" and (path / "state.json").is_file()):  # a saved Hugging Face data set
            return str(path)
    except UserError as problem:
        raise ValueError(str(problem).removeprefix("model.path: ")) from None
    except OSError as problem:
        raise ValueError(f"cannot be looked up: {problem.strerror}") from None
    if kind == "samples":
        name, _, split = value.partition("/")
        names = registry.names("datasets")
        if split and (name in names or ":" in name):
            return value
        known = f"{nearest(name, names)} (as NAME/SPLIT)"
        raise ValueError(f"neither a file ({path} does not exist{_near_file(path)}) nor a registered dataset: {known}")
    raise ValueError(f"there is no file {path}{_near_file(path)}")


# ---------------------------------------------------------------- saying it


def _where(path: Path, origins: Mapping[str, str], key: str) -> str:
    return origins.get(key, str(path))


def _unknown_section(section: str, value: Any) -> str:
    if not isinstance(value, dict):
        home = [s for s in FIELDS if section in FIELDS[s]]
        hint = f"it belongs under [{home[0]}]" if home else "every key stands under a section, [run] or another"
        return f"{section} = {show(value)}: {hint}"
    return f"[{section}]: there is no such section: {nearest(section, FIELDS)}"


def _unknown_key(section: str, name: str) -> str:
    elsewhere = [s for s in FIELDS if name in FIELDS[s]]
    close = difflib.get_close_matches(name, FIELDS[section], n=1)
    if elsewhere and not close:
        return f"[{section}] has no such key: it belongs under [{elsewhere[0]}]"
    return f"[{section}] has no such key: {nearest(name, FIELDS[section])}"


def _near_file(path: Path) -> str:
    try:
        names = sorted(p.name for p in path.absolute().parent.iterdir())
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"; did you mean {close[0]!r}?" if close else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value
