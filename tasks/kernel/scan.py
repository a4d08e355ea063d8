"""What a solution's text must not have, before any of it runs. Pure.

A kernel needs few things: a few modules, its own functions and classes. Everything that reaches out of them (files, the
interpreter, other modules through a module's attributes, streams, ways around what is recorded) is refused by name. The
rules are strict where an honest kernel does not notice; what passes is watched while it runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

MODULES = {
    "__future__", "dataclasses", "functools", "math", "typing", "torch", "torch.nn", "torch.nn.functional", "triton",
    "triton.language", "triton.language.extra.libdevice", "triton.language.extra",
}  # fmt: skip
CUDA_MODULES = {"torch.utils.cpp_extension"}
BUILTINS = {
    "eval", "exec", "compile", "open", "globals", "locals", "vars", "getattr", "setattr", "delattr", "breakpoint",
    "input", "memoryview", "dir", "help", "exit", "quit",
}  # fmt: skip
OUTSIDE = {
    "sys", "os", "io", "inspect", "gc", "ctypes", "importlib", "builtins", "subprocess", "threading", "multiprocessing",
    "modules", "types", "abc", "warnings", "weakref", "pathlib", "socket", "signal", "time", "traceback",
}  # fmt: skip
AROUND = {
    "compile", "ops", "library", "hub", "distributed", "package", "utils", "testing", "overrides", "serialization",
    "runtime", "compiler", "knobs", "backends", "profiler", "fx", "func", "save", "from_file", "from_numpy",
    "frombuffer", "tofile", "numpy", "tolist", "untyped_storage", "storage", "data", "handle", "share_memory_", "fn",
    "set_default_device", "set_num_threads", "register_forward_hook", "Tag",
}  # fmt: skip
STREAMS = {"Stream", "stream", "ExternalStream", "set_stream", "CUDAGraph", "graph", "make_graphed_callables", "Event",
           "record_stream", "default_stream"}  # fmt: skip
SPECIAL = {"__init__"}  # the only attribute in double underscores
OWNERS = {"self", "ctx"}  # whose attributes may be set


def refused(text: str, *, cuda: bool = False) -> list[str]:
    """Sentences with line numbers; none when the text may run."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as problem:
        return [f"it is no Python: {problem}"]
    checker = _Checker(MODULES | (CUDA_MODULES if cuda else set()), _aliases(tree))
    return sorted({f"line {line}: {what}" for node in ast.walk(tree) for line, what in checker.found(node)})


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Names that imports bind to modules."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


class _Checker:
    """``aliases``: module by the name it has in the text."""

    def __init__(self, modules: set[str], aliases: dict[str, str]) -> None:
        self.modules, self.aliases = modules, aliases

    def found(self, node: ast.AST) -> Iterator[tuple[int, str]]:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            yield from ((line, f"import {a.name}") for a in node.names if a.name not in self.modules)
        elif isinstance(node, ast.ImportFrom):
            yield from self._imported(node)
        elif isinstance(node, ast.Name):
            if node.id in BUILTINS or (node.id.startswith("__") and node.id.endswith("__")):
                yield line, f"the name {node.id}"
        elif isinstance(node, ast.Attribute):
            yield from self._attribute(node)
        elif isinstance(node, ast.MatchClass):
            yield line, "a class pattern"

    def _imported(self, node: ast.ImportFrom) -> Iterator[tuple[int, str]]:
        if node.level or node.module not in self.modules:
            yield node.lineno, f"from {'.' * node.level}{node.module or ''} import"
            return
        for alias in node.names:
            bad = alias.name == "*" or alias.name.startswith("_") or self._bad(node.module, alias.name)
            if bad and f"{node.module}.{alias.name}" not in self.modules and node.module != "__future__":
                yield node.lineno, f"from {node.module} import {alias.name}"

    def _attribute(self, node: ast.Attribute) -> Iterator[tuple[int, str]]:
        name, owner = node.attr, ast.unparse(node.value)
        if not isinstance(node.ctx, ast.Load) and owner not in OWNERS:
            yield node.lineno, f"the attribute {name} of something else is changed"
        special = name.startswith("__") and name not in SPECIAL
        if special or (owner != "self" and (name.startswith("_") or self._bad(self._module(owner), name))
                       and name not in SPECIAL):  # fmt: skip
            yield node.lineno, f"the attribute {name}"

    def _module(self, owner: str) -> str:
        first, dot, rest = owner.partition(".")
        return self.aliases.get(first, first) + dot + rest

    def _bad(self, module: str, name: str) -> bool:
        if module == "triton.language":
            return name in OUTSIDE
        if f"{module}.{name}" in self.modules:
            return False
        by_owner = (name == "jit" and module != "triton") or (name == "load" and module.startswith("torch"))
        return by_owner or name in OUTSIDE | AROUND | STREAMS or name in BUILTINS - {"input"}
