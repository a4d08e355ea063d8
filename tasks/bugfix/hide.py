"""What the agent sees of a project: the bug is in, the tests that show it are out. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from uniagent.tasks.bugfix.mutate import Function


def hidden_functions(tests: Iterable[str]) -> dict[str, set[str]]:
    """File -> qualified test functions (``Class.test``), of ids of pytest."""
    found: dict[str, set[str]] = {}
    for test in tests:
        path, *names = test.partition("[")[0].split("::")
        found.setdefault(path, set()).add(".".join(names))
    return found


def without(text: str, names: set[str]) -> str:
    """A test file without those functions; a class that has nothing left gets a ``pass``."""
    lines = text.splitlines(keepends=True)
    for body, first, last in sorted(_places(ast.parse(text).body, "", names), key=lambda one: -one[1]):
        indent = lines[last - 1][: len(lines[last - 1]) - len(lines[last - 1].lstrip())]
        alone = f"{indent if body else ''}pass\n" if body else ""
        lines[first - 1 : last] = [alone] if alone else []
    return "".join(lines)


def _places(body: list[ast.stmt], prefix: str, names: set[str]) -> list[tuple[bool, int, int]]:
    """(whether a ``pass`` must stay, first line, last line) of what goes."""
    found = []
    gone = [one for one in body if isinstance(one, Function) and prefix + one.name in names]
    for one in body:
        if isinstance(one, ast.ClassDef):
            found += _places(one.body, f"{prefix}{one.name}.", names)
    for number, one in enumerate(gone):
        first = min([one.lineno, *(d.lineno for d in one.decorator_list)])
        last = one.end_lineno or one.lineno
        found.append((bool(prefix) and number == 0 and len(gone) == len(body), first, last))
    return found


def sources(tests: Iterable[str], texts: Mapping[str, str]) -> dict[str, str]:
    """The test functions' own text, by id without parameters."""
    found = {}
    for path, names in hidden_functions(tests).items():
        for name, node in _named(ast.parse(texts[path]).body, ""):
            if name in names:
                found["::".join([path, *name.split(".")])] = ast.get_source_segment(texts[path], node) or ""
    return found


def _named(body: list[ast.stmt], prefix: str) -> Iterable[tuple[str, ast.stmt]]:
    for one in body:
        if isinstance(one, Function):
            yield prefix + one.name, one
        elif isinstance(one, ast.ClassDef):
            yield from _named(one.body, f"{prefix}{one.name}.")
