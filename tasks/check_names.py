"""Names that hidden tests need and nobody told the agent: not in the statement, not in the files it is given. Pure.

What tests use of the code under test is what they import from its files and the attributes they take; names they define
themselves, builtins and the standard library's are none.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Mapping

WORD = re.compile(r"[^\W\d]\w*")
USUAL = frozenset(name for kind in (str, bytes, list, dict, set, tuple, int, float, object, BaseException) for name in
                  dir(kind)) | frozenset(dir(builtins))  # fmt: skip


def untold(tests: Mapping[str, str], statement: str, given: Iterable[str]) -> dict[str, list[str]]:
    """Test -> names it needs that stand neither in the statement nor in a given text."""
    known = set(WORD.findall(statement)) | USUAL
    for text in given:
        known |= set(WORD.findall(text))
    missing = {test: sorted(needed(text) - known) for test, text in tests.items()}
    return {test: names for test, names in missing.items() if names}


def needed(test: str) -> set[str]:
    """Names a test takes from elsewhere: imported ones, called and used attributes, keywords of calls."""
    try:
        tree = ast.parse(_dedented(test))
    except SyntaxError:
        return set()
    found: set[str] = set()
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and not _of_the_test(node):
            found.add(node.attr)
        elif isinstance(node, ast.Call):
            found |= {k.arg for k in node.keywords if k.arg}
            found |= {node.func.id} if isinstance(node.func, ast.Name) else set()
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            own.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            own.add(node.name)
    return found - own


def _of_the_test(node: ast.Attribute) -> bool:
    """``self.…``, ``pytest.…``: the test's own."""
    top: ast.expr = node
    while isinstance(top, ast.Attribute | ast.Call | ast.Subscript):
        top = top.value if not isinstance(top, ast.Call) else top.func
    return isinstance(top, ast.Name) and top.id in ("self", "cls", "pytest", "unittest", "mock", "monkeypatch")


def _dedented(text: str) -> str:
    """A method's own text begins at its ``def`` and goes on indented: under a class it parses."""
    return text if not text[:1].isspace() else f"if 1:\n{text}"
