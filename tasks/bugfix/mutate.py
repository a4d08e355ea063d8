"""Bugs: every way to break one function of a Python file that the operators know, as edits of whole lines.

Pure: text in, edits out, always in the same order. An edit keeps the file's layout and comments: only the text of one
syntax node changes. Nested functions belong to the function around them. The reference fix is the edit undone.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from attrs import frozen

Function = ast.FunctionDef | ast.AsyncFunctionDef
Rewrite = Callable[[ast.AST], Iterator[ast.AST]]


@frozen
class Edit:
    """Lines ``line`` .. of a file (from 1): ``old`` stood there, ``new`` takes its place."""

    line: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        return _replace(text, self.line, self.old, self.new)

    def undo(self, text: str) -> str:
        return _replace(text, self.line, self.new, self.old)


@frozen
class Bug:
    """One way to break ``function`` (qualified by its classes), whose definition starts at ``first_line``, decorators
    included, as the interpreter's code objects count it."""

    operator: str
    function: str
    first_line: int
    edit: Edit


def _replace(text: str, line: int, old: str, new: str) -> str:
    lines = text.splitlines(keepends=True)
    start = sum(len(one) for one in lines[: line - 1])
    if text[start : start + len(old)] != old:
        raise ValueError(f"line {line} is not what the edit expects: {text[start : start + 60]!r}")
    return text[:start] + new + text[start + len(old) :]


# ---------------------------------------------------------------- operators: a node, and what may stand in its place

COMPARISONS: Mapping[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt,),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt,),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _comparison(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from (_changed(node, ops=[other()]) for other in COMPARISONS[type(node.ops[0])])


def _boolean(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BoolOp):
        yield _changed(node, op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
        yield node.values[0]  # the other conditions forgotten


def _negation(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand


def _arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        text_format = isinstance(node.op, ast.Mod) and isinstance(node.left, (ast.Constant, ast.JoinedStr))
        if not text_format:
            yield _changed(node, op=ARITHMETIC[type(node.op)]())


def _number(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Constant(value=bool(truth)):
            yield ast.Constant(not truth)
        case ast.Constant(value=int(number)):
            yield ast.Constant(number + 1)


def _slice(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Slice):
        for bound in ("lower", "upper"):
            if (old := getattr(node, bound)) is not None:
                yield _changed(node, **{bound: ast.BinOp(old, ast.Add(), ast.Constant(1))})


def _arguments(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call):
        if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            yield _changed(node, args=[node.args[1], node.args[0], *node.args[2:]])
        for gone in node.keywords:
            if gone.arg is not None:
                yield _changed(node, keywords=[k for k in node.keywords if k is not gone])


def _branch(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.IfExp):
        yield _changed(node, body=node.orelse, orelse=node.body)


def _jump(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Break):
        yield ast.Continue()
    if isinstance(node, ast.Continue):
        yield ast.Break()


def _statement(node: ast.AST) -> Iterator[ast.AST]:
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if call or isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
        yield ast.Pass()


def _guard(node: ast.AST) -> Iterator[ast.AST]:
    """An ``if`` without else that only leaves (a guard at the top) forgotten."""
    leaves = (ast.Return, ast.Raise, ast.Continue)
    if isinstance(node, ast.If) and not node.orelse and len(node.body) == 1 and isinstance(node.body[0], leaves):
        yield ast.Pass()


OPERATORS: Mapping[str, Rewrite] = {
    "comparison": _comparison,
    "boolean": _boolean,
    "negation": _negation,
    "arithmetic": _arithmetic,
    "number": _number,
    "slice": _slice,
    "arguments": _arguments,
    "branch": _branch,
    "jump": _jump,
    "statement": _statement,
    "guard": _guard,
}
REMOVALS = ("body", "function")  # beside OPERATORS: the body alone, the whole definition


# ---------------------------------------------------------------- the bugs of a file


def bugs(text: str) -> Iterator[Bug]:
    """Every bug of every function, in the order of the file."""
    tree = ast.parse(text)
    source = _Source(text)
    for name, function in functions(tree):
        statements = _without_docstring(function)
        if not statements:
            continue
        first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
        for statement in statements:
            for node in ast.walk(statement):
                for operator, rewrite in OPERATORS.items():
                    for other in rewrite(node):
                        if (edit := source.edit(function, node, other)) is not None:
                            yield Bug(operator, name, first, edit)
        yield Bug("body", name, first, source.emptied(statements))
        yield Bug("function", name, first, source.removed(function))


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """The functions of a module and the methods of its classes, with their qualified names."""

    def of(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
        for one in body:
            if isinstance(one, Function):
                yield prefix + one.name, one
            elif isinstance(one, ast.ClassDef):
                yield from of(one.body, f"{prefix}{one.name}.")

    return of(tree.body, "")


def _without_docstring(function: Function) -> list[ast.stmt]:
    return function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body


SYMBOLS: Mapping[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or", ast.Add: "+", ast.Sub: "-",
    ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.BitAnd: "&", ast.BitOr: "|", ast.LShift: "<<",
    ast.RShift: ">>",
}  # fmt: skip


class _Source:
    """Text of a file by syntax node. Columns of ``ast`` count UTF-8 bytes."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines(keepends=True)

    def edit(self, function: Function, node: ast.AST, other: ast.AST) -> Edit | None:
        """``other`` in place of ``node``; None where that is no legal text or no change. Parentheses are put where
        they are needed alone, and an operator is changed where it stands: nothing shows where the bug is."""
        start, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        old = "".join(self.lines[start - 1 : last])
        head, tail = self.lines[: start - 1][function.lineno - 1 :], self.lines[last : function.end_lineno]

        def parsed(new: str) -> str | None:
            block = "if 1:\n" * bool(function.col_offset) + "".join([*head, new, *tail])
            try:
                return ast.dump(ast.parse(block))
            except SyntaxError:
                return None

        written = self._operator(node, other) or ast.unparse(ast.fix_missing_locations(other))
        if "\n" in written and self._operator(node, other) is None:
            return None
        before = self._part(start, 0, node.col_offset)  # type: ignore[attr-defined]
        after = self._part(last, node.end_col_offset, None)  # type: ignore[attr-defined]
        new = before + written + after
        if isinstance(other, ast.expr):
            wanted = parsed(f"{before}({written}){after}")
            if wanted is not None and parsed(new) != wanted:
                new = f"{before}({written}){after}"
        found = parsed(new)
        return None if found is None or found == parsed(old) else Edit(start, old, new)

    def _operator(self, node: ast.AST, other: ast.AST) -> str | None:
        """The node's text with another operator, where that is all that changes."""
        match node, other:
            case ast.Compare(ops=[was]), ast.Compare(ops=[becomes]):
                operands = [node.left, node.comparators[0]]
            case ast.BinOp(op=was), ast.BinOp(op=becomes):
                operands = [node.left, node.right]
            case ast.BoolOp(op=was), ast.BoolOp(op=becomes):
                operands = node.values
            case _:
                return None
        at, text = (node.lineno, node.col_offset), ""
        for left, right in pairwise(operands):
            text += self._span(at, (left.end_lineno or 0, left.end_col_offset or 0))
            gap = self._span((left.end_lineno or 0, left.end_col_offset or 0), (right.lineno, right.col_offset))
            text += gap.replace(SYMBOLS[type(was)], SYMBOLS[type(becomes)], 1)
            at = (right.lineno, right.col_offset)
        return text + self._span(at, (node.end_lineno or 0, node.end_col_offset or 0))

    def _part(self, line: int, start: int, end: int | None) -> str:
        return self.lines[line - 1].encode()[start:end].decode()

    def _span(self, start: tuple[int, int], end: tuple[int, int]) -> str:
        """Text between two places (line from 1, column in bytes)."""
        if start[0] == end[0]:
            return self._part(start[0], start[1], end[1])
        inner = "".join(self.lines[start[0] : end[0] - 1])
        return self._part(start[0], start[1], None) + inner + self._part(end[0], 0, end[1])

    def emptied(self, statements: list[ast.stmt]) -> Edit:
        start, last = statements[0].lineno, statements[-1].end_lineno
        if isinstance(statements[0], Function | ast.ClassDef) and statements[0].decorator_list:
            start = statements[0].decorator_list[0].lineno
        before = self._part(start, 0, statements[0].col_offset)
        return Edit(start, "".join(self.lines[start - 1 : last]), before + "raise NotImplementedError\n")

    def removed(self, function: Function) -> Edit:
        start = min([function.lineno, *(d.lineno for d in function.decorator_list)])
        return Edit(start, "".join(self.lines[start - 1 : function.end_lineno]), "")
