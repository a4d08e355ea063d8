"""Problem statements by template: which function, what it should do (its documentation), and what goes wrong, as the
shortest piece of each failing test that shows it. Pure.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence

from attrs import field, frozen

from uniagent.tasks.bugfix.mutate import Function, functions

SHOWN_LINES = 14  # of one test
SHOWN_ERRORS = 3  # of one test with several sets of parameters


@frozen
class Failure:
    """A test that the bug makes fail: its id, what was raised, the line of its file where it shows (0: none), and its
    parameters as they are written."""

    test: str
    error: str
    line: int
    parameters: Mapping[str, str] = field(factory=dict)

    @property
    def path(self) -> str:
        return self.test.partition("::")[0]

    @property
    def function(self) -> str:
        """The test without its parameters."""
        return self.test.partition("[")[0]


@frozen
class Broken:
    """``text`` is the source before the bug; ``operator`` the bug's kind."""

    path: str
    function: str
    operator: str
    text: str = field(repr=False)
    failures: Sequence[Failure] = ()

    @property
    def dotted(self) -> str:
        parts = self.path.removeprefix("src/").removesuffix(".py").split("/")
        return ".".join([*(part for part in parts if part != "__init__"), self.function])

    @property
    def definition(self) -> Function:
        return next(node for name, node in functions(ast.parse(self.text)) if name == self.function)


def statement(broken: Broken, tests: Mapping[str, str]) -> str | None:
    """The text, or None where neither the documentation nor a test would say what is right. ``tests``: path -> source
    of the test files."""
    documentation = describe(broken.definition)
    shown = list(_shown(broken, tests))
    if not documentation and not any(_says(broken, example) for example, _ in shown):
        return None
    parts = [_headline(broken)]
    if documentation:
        parts.append("Its documentation:\n\n" + _indented(documentation))
    for example, errors in shown:
        if example:
            parts.append("This fails:\n\n" + _indented(example) + "\n\nwith\n\n" + _indented("\n".join(errors)))
    if not any(example for example, _ in shown):
        parts.append("It is seen as\n\n" + _indented("\n".join(dict.fromkeys(e for _, some in shown for e in some))))
    return "\n\n".join(parts)


def _headline(broken: Broken) -> str:
    where = f"`{broken.dotted}` (in `{broken.path}`)"
    if broken.operator == "function":
        return f"{where} is missing. Its signature is\n\n" + _indented(signature(broken.definition))
    if broken.operator == "body":
        return f"{where} is not implemented: its body is gone. It must be written again."
    return f"{where} does not do what it should."


def signature(definition: Function) -> str:
    """Decorators and the ``def`` line."""
    shell = ast.parse(ast.unparse(definition)).body[0]
    assert isinstance(shell, Function)
    shell.body = [ast.Expr(ast.Constant(...))]
    return ast.unparse(shell)


def describe(definition: Function) -> str:
    """The documentation up to its examples and field lists, at most 12 lines."""
    text = inspect.cleandoc(ast.get_docstring(definition) or "")
    kept: list[str] = []
    for line in text.splitlines():
        if len(kept) >= 12 or re.match(r"\s*(:\w+|>>>|Args:|Parameters|Returns:|Examples?:*$|\.\. )", line):
            break
        kept.append(line)
    return "\n".join(kept).strip()


def _shown(broken: Broken, tests: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """For each failing test function: the piece of it that fails, and the errors of its first sets of parameters."""
    by_function: dict[str, list[Failure]] = {}
    for failure in broken.failures:
        by_function.setdefault(failure.function, []).append(failure)
    for failures in by_function.values():
        first = failures[0]
        example = piece(tests.get(first.path, ""), first.line)
        errors = [told(f, example) for f in failures if f.line == first.line][:SHOWN_ERRORS]
        yield example, list(dict.fromkeys(errors))


def _says(broken: Broken, example: str) -> bool:
    """Whether an example is about the function: it names it, or for a special method its class."""
    own, name = broken.function.split("."), broken.function.rpartition(".")[2]
    names = set(re.findall(r"\w+", example))
    return name in names or (name.startswith("__") and len(own) > 1 and (own[0] in names or "assert" in names))


def told(failure: Failure, example: str) -> str:
    """The error, and the parameters that the example needs."""
    used = [f"{name} = {value}" for name, value in failure.parameters.items() if re.search(rf"\b{name}\b", example)]
    return (f"{', '.join(used)}: " if used else "") + short(failure.error)


def short(error: str) -> str:
    """The first lines of an error, without the addresses of objects."""
    lines = [line for line in error.splitlines() if line.strip()][:4]
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines))[:400]


def piece(text: str, line: int) -> str:
    """The statement at ``line`` of a test file, after the statements of its function that its names come from. Empty
    where the line is in no function, or the piece is long."""
    if not line or not text:
        return ""
    around = [node for node in ast.walk(ast.parse(text)) if isinstance(node, Function) and _has(node, line)]
    if not around:
        return ""
    test = max(around, key=lambda node: node.lineno)
    at = next((n for n, s in enumerate(test.body) if _has(s, line)), None)
    if at is None:
        return ""
    chosen = [test.body[at]]
    needed = _loaded(test.body[at])
    for earlier in reversed(test.body[:at]):
        if _stored(earlier) & needed:
            chosen.insert(0, earlier)
            needed |= _loaded(earlier)
    lines = text.splitlines()
    shown = [row for one in chosen for row in lines[_start(one) - 1 : one.end_lineno]]
    if len(shown) > SHOWN_LINES:
        return ""
    return inspect.cleandoc("\n" + "\n".join(shown))


def _has(node: ast.stmt, line: int) -> bool:
    return _start(node) <= line <= (node.end_lineno or 0)


def _start(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    first: int = min([node.lineno, *(d.lineno for d in decorators)])
    return first


def _loaded(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _stored(node: ast.AST) -> set[str]:
    """Names a statement gives a value to, or whose value it may change by calling a method of theirs."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    found |= {n.name for n in ast.walk(node) if isinstance(n, Function | ast.ClassDef)}
    found |= {(a.asname or a.name).split(".")[0] for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)
              for a in n.names}  # fmt: skip
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        owner = node.value.func.value
        found |= {owner.id} if isinstance(owner, ast.Name) and owner.id != "self" else set()
    if isinstance(node, ast.Assign | ast.Delete | ast.AugAssign):
        targets = node.targets if not isinstance(node, ast.AugAssign) else [node.target]
        found |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name) and n.id != "self"}
    return found


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
