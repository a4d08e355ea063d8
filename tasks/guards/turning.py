"""Test files turned against their judge: assertions that must now fail.

Where a test compares with a literal, the literal is changed; any other assertion becomes its opposite. A test that
passes as it is and passes turned judges nothing: an assertion was disabled, an answer forged, or a value is equal to
everything. Made on this side, from the files as they were before the agent acted; the code under test sees one file at
its place. Pure.
"""

from __future__ import annotations

import ast

EQUALITIES = ("assertEqual", "assertEquals", "assertListEqual", "assertDictEqual", "assertTupleEqual", "assertSetEqual",
              "assertSequenceEqual", "assertMultiLineEqual", "assertCountEqual")  # fmt: skip
OPPOSITES = (
    ("assertEqual", "assertNotEqual"),
    ("assertTrue", "assertFalse"),
    ("assertIn", "assertNotIn"),
    ("assertIs", "assertIsNot"),
    ("assertIsNone", "assertIsNotNone"),
    ("assertIsInstance", "assertNotIsInstance"),
    ("assertGreater", "assertLessEqual"),
    ("assertLess", "assertGreaterEqual"),
)
TURNED = {**dict(OPPOSITES), **{b: a for a, b in OPPOSITES}}


def turned(source: bytes) -> tuple[bytes, frozenset[str]]:
    """A test file with its assertions turned, and the names of the functions that have some. Raises SyntaxError."""
    turn = _Turn()
    tree = ast.fix_missing_locations(turn.visit(ast.parse(source)))
    return ast.unparse(tree).encode(), frozenset(turn.names)


class _Turn(ast.NodeTransformer):
    def __init__(self) -> None:
        self.function = ""
        self.names: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self.function = self.function, self.function or node.name
        self.generic_visit(node)
        self.function = outer
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.names.add(self.function)
        test = node.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            other = _shifted(test.comparators[0])
            if other is not None:
                test.comparators[0] = other
                return node
        return ast.copy_location(ast.Assert(ast.UnaryOp(ast.Not(), test), None), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return node
        name = node.func.attr
        if name in EQUALITIES and len(node.args) >= 2 and (other := _shifted(node.args[1])) is not None:
            node.args[1] = other
        elif name in TURNED:
            node.func.attr = TURNED[name]
        elif name in EQUALITIES:
            node.func.attr = "assertNotEqual"
        else:
            return node
        self.names.add(self.function)
        return node


def _shifted(node: ast.expr) -> ast.expr | None:
    """A literal that is unequal to this one, of the same kind; None where this is no literal."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return ast.Constant(value + 1)
    if isinstance(value, str):
        return ast.Constant(value + "~")
    if isinstance(value, bytes):
        return ast.Constant(value + b"~")
    if isinstance(value, list | tuple):
        whole = ast.parse(repr([*value, "~"] if isinstance(value, list) else (*value, "~")), mode="eval")
        return whole.body
    return None
