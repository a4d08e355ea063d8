"""The built-in problems, and rows of KernelBench, as samples."""

from __future__ import annotations

import hashlib
import random
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from attrs import field, frozen

from uniagent.engine.errors import UserError, nearest
from uniagent.tasks.data_files import rows_of
from uniagent.tasks.structure import structure

SPLITS = ("train", "heldout")
HELD_OUT = 5  # one combination of problem and shapes in five
SHAPES = 2  # of one sample
FILE = "solution.py"
INSTRUCTIONS = (
    "Write a faster version of this PyTorch model with a kernel of your own, in {language}. Put it into the file "
    "`{file}` of the working directory, as a class `ModelNew` that is built and called like `Model` and gives the "
    "same; `reference.py` there holds the model. All computing must be in your kernels: PyTorch may allocate, view and "
    "move. `{file}` may import only torch, Triton, and math, typing, functools and dataclasses. It is judged on fresh "
    "inputs{shapes}: right first, then fast."
)


@frozen
class Problem:
    """``sizes``: the values that each constant of the reference is drawn from; ``mistake`` turns one text of the kernel
    into another, which makes it wrong."""

    name: str
    level: int
    reference: str = field(repr=False)
    kernel: str = field(repr=False)
    sizes: Mapping[str, Sequence[int]] = field(factory=dict)
    mistake: tuple[str, ...] = ()


@cache
def built_in() -> dict[str, Problem]:
    text = (files("uniagent.tasks.kernel") / "problems.toml").read_text(encoding="utf-8")
    found = [structure(Problem, one, "problems.toml") for one in tomllib.loads(text)["problems"]]
    return {problem.name: problem for problem in found}


def samples(
    split: str, seed: int, *, problems: Sequence[str] | None = None, file: str | None = None, cuda: bool = False
) -> Iterator[dict[str, Any]]:
    """An endless stream of rows over the built-in ``problems`` (names; left out: all), which take turns, with shapes
    drawn anew; a hash of problem and shapes decides the split. With ``file``: the rows of KernelBench in it, one in
    five held out. ``cuda``: CUDA code is welcome too (on a GPU). Raises UserError for a split or problem
    that does not exist."""
    if split not in SPLITS:
        raise UserError(f"kernel has no split {split!r}: {nearest(split, SPLITS)}")
    if file is not None:
        rows = [kernel_bench_row(given, file, cuda=cuda) for given in rows_of(Path(file))]
        yield from (row for row in rows if _held_out(row) == (split == "heldout"))
        return
    known = built_in()
    for name in problems or ():
        if name not in known:
            raise UserError(f"kernel has no problem {name!r}: {nearest(name, known)}")
    draw = random.Random(f"kernel/{split}/{seed}")
    while True:
        for name in problems or known:
            row = sample(known[name], _shapes(known[name], draw), cuda=cuda)
            while _held_out(row) != (split == "heldout"):
                row = sample(known[name], _shapes(known[name], draw), cuda=cuda)
            yield row


def _shapes(problem: Problem, draw: random.Random) -> list[dict[str, int]]:
    found: list[dict[str, int]] = []
    while len(found) < SHAPES:
        shape = {constant: draw.choice(values) for constant, values in problem.sizes.items()}
        found += [] if shape in found else [shape]
    return found


def sample(problem: Problem, shapes: Sequence[Mapping[str, int]], *, cuda: bool = False) -> dict[str, Any]:
    """One built-in problem at some shapes; the constants in the code are those of the first."""
    code = problem.reference
    for constant, value in shapes[0].items():
        code = re.sub(rf"(?m)^{constant} = .*$", f"{constant} = {value}", code)
    told = "; ".join(", ".join(f"{name} = {value}" for name, value in shape.items()) for shape in shapes)
    return {
        "name": "kernel",
        "prompt": [{"role": "user", "content": prompt(code, f", with {told}", cuda=cuda)}],
        "metadata": {
            "problem_id": problem.name,
            "level": problem.level,
            "name": problem.name,
            "code": code,
            "shapes": [dict(shape) for shape in shapes],
            "kernel": problem.kernel,
            "mistake": list(problem.mistake),
        },
    }


def kernel_bench_row(given: Mapping[str, Any], where: str, *, cuda: bool = False) -> dict[str, Any]:
    """A row of KernelBench's data set (code, level, name, problem_id) as a sample."""
    missing = [key for key in ("code", "name") if not isinstance(given.get(key), str)]
    if missing:
        raise UserError(f"{where}: a row has no text {' and no '.join(missing)}: is it KernelBench's?")
    metadata = {key: given[key] for key in ("code", "level", "name", "problem_id") if key in given}
    return {
        "name": "kernel",
        "prompt": [{"role": "user", "content": prompt(given["code"], cuda=cuda)}],
        "metadata": {**metadata, "problem_id": str(given.get("problem_id", given["name"]))},
    }


def prompt(code: str, shapes: str = "", *, cuda: bool = False) -> str:
    language = "Triton, or in CUDA through torch.utils.cpp_extension.load_inline" if cuda else "Triton"
    told = INSTRUCTIONS.format(file=FILE, shapes=shapes, language=language)
    return f"{told}\n\n```python\n{code.strip()}\n```\n"


def _held_out(row: Mapping[str, Any]) -> bool:
    data = row["metadata"]
    key = f"{data['name']}\n{sorted(map(str, data.get('shapes', ())))}"
    return hashlib.sha256(key.encode()).digest()[0] % HELD_OUT == 0
