"""Another correct solution than the reference: the same function, written anew with other names. Pure."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator

from uniagent.tasks.bugfix.mutate import Function, functions


def rewritten(text: str, function: str) -> str | None:
    """The file with the function as the syntax tree prints it: layout, comments and the names of its local variables
    are others. None where there is nothing to rename (a nested scope uses them, or there are none)."""
    tree = ast.parse(text)
    node = next((node for name, node in functions(tree) if name == function), None)
    if node is None:
        return None
    names = _locals(text, function)
    nested = {n.id for inner in _scopes(node) for n in ast.walk(inner) if isinstance(n, ast.Name)}
    renamed = {name: f"{name}_value" for name in names - nested if f"{name}_value" not in names}
    if not renamed:
        return None
    lines = text.splitlines(keepends=True)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    indent = " " * node.col_offset
    last = node.end_lineno or node.lineno
    _Renamed(renamed).visit(node)
    if any("\n" in c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)):
        indent_text = ast.unparse(ast.Module([node], []))
        body = _indented(indent_text, indent)
    else:
        body = "".join(f"{indent}{line}\n" for line in ast.unparse(node).splitlines())
    changed = "".join([*lines[: first - 1], body, *lines[last:]])
    try:
        ast.parse(changed)
    except SyntaxError:
        return None
    return changed


def _indented(text: str, indent: str) -> str:
    """Code under an indentation, where texts of several lines stay as they are."""
    inside = {row for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant | ast.JoinedStr)
              for row in range(node.lineno + 1, (node.end_lineno or 0) + 1)}  # fmt: skip
    rows = enumerate(text.splitlines(), 1)
    return "".join(f"{line}\n" if row in inside or not line else f"{indent}{line}\n" for row, line in rows)


def _scopes(node: Function) -> Iterator[ast.AST]:
    """Functions, classes and comprehensions inside."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
             ast.GeneratorExp)  # fmt: skip
    return (inner for inner in ast.walk(node) if inner is not node and isinstance(inner, kinds))


def _locals(text: str, function: str) -> set[str]:
    """Local variables of a function that are no parameters."""
    table = symtable.symtable(text, "file", "exec")
    for name in function.split("."):
        found = [child for child in table.get_children() if child.get_name() == name]
        if not found:
            return set()
        table = found[0]
    if not isinstance(table, symtable.Function):
        return set()
    free = {s.get_name() for child in table.get_children() for s in child.get_symbols() if s.is_free()}
    own = {s.get_name() for s in table.get_symbols() if s.is_local() and s.is_assigned() and not s.is_parameter()}
    imported = {s.get_name() for s in table.get_symbols() if s.is_imported() or s.is_namespace()}
    return own - free - imported


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = self.names.get(node.name, node.name) if node.name else None
        return self.generic_visit(node)
