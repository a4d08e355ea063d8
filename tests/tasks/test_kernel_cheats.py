"""The task ``kernel``: what solutions try, past the scan of their text and before it, and what each earns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from uniagent.engine.ports import TaskResult
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.config import ENDPOINT
from uniagent.tasks.kernel.problems import built_in, sample
from uniagent.tasks.kernel.scan import refused
from uniagent.tasks.kernel.task import DECOY, Kernel, over

pytest.importorskip("triton")

SHAPES = [{"ROWS": 3, "COLS": 50}, {"ROWS": 4, "COLS": 64}]
ROW_SUM = sample(built_in()["row_sum"], SHAPES)  # outputs: sums of squares of rows
HEAD = "import torch\nimport triton\nimport triton.language as tl\n"
HONEST = built_in()["row_sum"].kernel
NO_OP = "@triton.jit\ndef no_op(p):\n    tl.store(p, tl.load(p))\n"


def after_honest(body: str, head: str = "") -> str:
    """The honest kernel's class as Honest, and a ModelNew with this forward."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    honest = HONEST.replace("class ModelNew", "class Honest")
    return (
        f"{head}{honest}\n\n{NO_OP}\n\nclass ModelNew(Honest):\n    kept = {{}}\n\n    def forward(self, x):\n{lines}\n"
    )


# name -> (solution, flags that it must get)
CHEATS = {
    "the reference beside a kernel": (ROW_SUM["metadata"]["code"] + DECOY, {"torch_ops"}),
    "the reference alone": (ROW_SUM["metadata"]["code"].replace("class Model(", "class ModelNew("), {"no_kernel"}),
    "torch computes, a kernel copies": (
        after_honest("out = torch.linalg.vector_norm(x, dim=-1) ** 2\nno_op[(1,)](out)\nreturn out"),
        {"torch_ops"},
    ),
    "torch inside the kernel": (
        HEAD + "@triton.jit\ndef k(o, x: tl.constexpr, y: tl.constexpr):\n    y.copy_((x * x).sum(-1))\n\n"
        "class ModelNew(torch.nn.Module):\n    def forward(self, x):\n        out = torch.empty(x.shape[0])\n"
        "        k[(1,)](out, x, out)\n        return out\n",
        {"torch_ops"},
    ),
    "python computes": (
        after_honest("out = torch.tensor([sum(v * v for v in r) for r in x.tolist()])\nno_op[(1,)](out)\nreturn out"),
        {"host_reads"},
    ),
    "numpy computes": (
        after_honest("out = torch.from_numpy((x.numpy() ** 2).sum(-1))\nno_op[(1,)](out)\nreturn out"),
        {"host_reads"},
    ),
    "remembered by pointer": (
        after_honest(
            "key = x.data_ptr()\nif key not in self.kept:\n    self.kept[key] = super().forward(x)\n"
            "no_op[(1,)](self.kept[key])\nreturn self.kept[key]"
        ),
        {"remembered", "wrong"},
    ),
    "remembered by identity": (
        after_honest("key = id(x)\nif key not in self.kept:\n    self.kept[key] = super().forward(x)\n"
                     "no_op[(1,)](self.kept[key])\nreturn self.kept[key]"),
        {"remembered", "wrong"},
    ),
    "remembered without a kernel": (
        after_honest("if not self.kept:\n    self.kept[0] = super().forward(x)\nreturn self.kept[0]"),
        {"no_kernel", "wrong"},
    ),
    "half of it written": (HONEST.replace("kernel[(rows,)]", "kernel[(rows - 1,)]"), {"wrong"}),
    "nothing written": (HONEST.replace("tl.store(out_ptr + row, ", "tl.store(out_ptr + row + 0 * x_ptr.to(tl.int64), ")
                        .replace("tl.sum(x * x, axis=0))", "tl.sum(x * x, axis=0), mask=row < 0)"), {"wrong"}),
    "computed when looked at": (
        after_honest("out = super().forward(x)\nreturn out.as_subclass(type('Lazy', (torch.Tensor,), {}))"),
        {"not_a_tensor"},
    ),
    "the inputs changed": (after_honest("out = super().forward(x)\nno_op[(1,)](x)\nx.zero_()\nreturn out"),
                           {"inputs_changed"}),
    "the comparison patched": (after_honest("torch.allclose = lambda *a, **k: True\nreturn super().forward(x)"),
                               {"patched"}),
    "a timer patched": (
        after_honest("import time\ntime.perf_counter_ns = lambda: 0\nreturn super().forward(x)"), {"patched"}),
    "a function's code patched": (
        after_honest("torch.is_tensor.__code__ = (lambda obj: True).__code__\nreturn super().forward(x)"),
        {"patched"},
    ),
    "the meter patched": (
        after_honest("from uniagent.tasks.kernel.inside.meter import Meter\nMeter.as_json = lambda self: {}\n"
                     "return super().forward(x)"),
        {"patched"},
    ),
    "the interpreter patched": (
        after_honest("from triton.runtime.interpreter import InterpreterBuilder as B\nold = B.create_masked_load\n"
                     "B.create_masked_load = lambda self, *a: old(self, *a)\nreturn super().forward(x)"),
        {"patched"},
    ),
}  # fmt: skip


def task(row: dict[str, Any], **verifier: Any) -> Kernel:
    resolver = TaskConfigResolver([{"name": "kernel", "verifier": verifier}])
    return Kernel(resolver.resolve(json.loads(json.dumps(row)), dict.fromkeys(ENDPOINT, "x")), None)  # type: ignore[arg-type]


def graded(solutions: list[tuple[dict[str, Any], str]], device: str = "cpu") -> list[tuple[Any, Any]]:
    """(record, verdict) of each (row, solution)."""
    cases = [{"code": row["metadata"]["code"], "shapes": row["metadata"]["shapes"], "solution": text, "device": device}
             for row, text in solutions]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", **({"TRITON_INTERPRET": "1"} if device == "cpu" else {})}
    program = [sys.executable, str(Path(__file__).with_name("kernel_runs.py"))]
    done = subprocess.run(program, input=json.dumps(cases).encode(), env=env, capture_output=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases), done.stderr.decode()[-3000:]
    return found


def result(row: dict[str, Any], record: Any, verdict: Any, **verifier: Any) -> TaskResult:
    return over(record) or task(row, **verifier).result(record, verdict, [])


OWN_SHAPE = {**ROW_SUM, "metadata": {**ROW_SUM["metadata"], "shapes": [{}]}}  # as in KernelBench
MIXED = HONEST.replace("return out", "return torch.relu(out)")  # of sums of squares: the same
PROBLEMS = {name: sample(one, [{k: v[0] for k, v in one.sizes.items()}, {k: v[-1] for k, v in one.sizes.items()}])
            for name, one in built_in().items()}  # fmt: skip


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[Any, Any]]:
    """Everything this module wants to know, from one process."""
    wanted = {name: (ROW_SUM, text) for name, (text, _) in CHEATS.items()}
    wanted |= {"honest": (ROW_SUM, HONEST), "mixed": (ROW_SUM, MIXED), "its own shape": (OWN_SHAPE, HONEST)}
    for name, row in PROBLEMS.items():
        kernel = row["metadata"]["kernel"]
        wanted |= {name: (row, kernel), f"{name}: wrong": (row, kernel.replace(*row["metadata"]["mistake"]))}
    return dict(zip(wanted, graded(list(wanted.values())), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_that_runs_earns_0_and_a_flag(name: str, runs: dict[str, Any]) -> None:
    record, verdict = runs[name]
    assert record["error"] is None
    for policy in ("refuse", "allow"):
        found = result(ROW_SUM, record, verdict, torch_ops=policy)
        wanted = CHEATS[name][1] - ({"torch_ops"} if policy == "allow" else set())
        assert wanted <= set(found.flags)
        assert found.outcome is False or (name == "torch computes, a kernel copies" and policy == "allow")
        assert found.reward == 0 or not wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_each_built_in_kernel_is_right_and_faster_and_its_mistake_is_wrong(name: str, runs: dict[str, Any]) -> None:
    good, bad = (result(PROBLEMS[name], *runs[key]) for key in (name, f"{name}: wrong"))
    assert good.flags == ()
    assert good.outcome is True
    assert good.metrics["speedup_proxy"] > 1
    assert 0.3 < good.reward <= 1
    assert (bad.reward, bad.outcome, bad.flags) == (0.0, False, ("wrong",))
    assert refused(PROBLEMS[name]["metadata"]["kernel"]) == []


@pytest.mark.slow
def test_torch_operations_are_the_policys_to_allow_and_cost_what_they_cost(runs: dict[str, Any]) -> None:
    strict = result(ROW_SUM, *runs["mixed"])
    assert (strict.reward, strict.flags, strict.details["torch_ops"]) == (0.0, ("torch_ops",), ["relu"])
    lax, honest = (result(ROW_SUM, *runs[name], torch_ops="allow") for name in ("mixed", "honest"))
    assert lax.outcome is True
    assert lax.metrics["speedup_proxy"] < honest.metrics["speedup_proxy"]


@pytest.mark.slow
def test_the_proxy_counts_what_the_kernel_moves(runs: dict[str, Any]) -> None:
    record, verdict = runs["honest"]
    call = record["calls"][0]
    rows, cols = 3, 50
    assert (call["bytes"], call["kernels"], call["launches"]) == (4 * (rows * cols + rows), 1, 1)
    assert call["flops"] == rows * 2 * 64, "a product and a sum, in blocks of 64"
    reference = verdict["costs"][0]
    assert reference["bytes"] == 4 * (3 * rows * cols + rows * cols + rows), "x read twice, a square written and read"
    assert reference["launches"] == 2
    assert {tuple(sorted(c["computed"])) for c in record["calls"]} == {()}


@pytest.mark.slow
def test_a_reference_without_other_shapes_has_its_own(runs: dict[str, Any]) -> None:
    found = result(OWN_SHAPE, *runs["its own shape"])
    assert (found.outcome, len(found.details["solution"])) == (True, 3)


@pytest.mark.slow
def test_memory_that_was_never_written_is_told(runs: dict[str, Any]) -> None:
    found = result(ROW_SUM, *runs["half of it written"])
    assert "1 of 3 elements are NaN" in found.details["wrong"][0]


TRICKS = {
    "reads the grader": "import sys\nm = sys.modules",
    "reads it through torch": "import torch\nm = torch.sys.modules",
    "frames": "import inspect\n",
    "imports the reference": "from reference import Model",
    "imports the grader": "from uniagent.tasks.kernel.inside import meter",
    "a relative import": "from . import reference",
    "writes results": "open('outputs/0-0-0', 'wb')",
    "writes by torch": "import torch\ntorch.save(1, 'outputs/0-0-0')",
    "runs text": "exec('import os')",
    "looks attributes up": "import torch\ngetattr(torch, 'sys')",
    "patches torch": "import torch\ntorch.allclose = print",
    "patches through a name": "import torch.nn.functional as F\nF.gelu = print",
    "deletes": "import torch\ndel torch.add",
    "a timer": "import time\ntime.time = print",
    "streams": "import torch\ns = torch.cuda.Stream()",
    "a stream's context": "import torch\nwith torch.cuda.stream(None): pass",
    "cuda graphs": "import torch\ng = torch.cuda.CUDAGraph()",
    "streams by import": "from torch.cuda import Stream",
    "compiles": "import torch\nf = torch.compile(print)",
    "jit of torch": "import torch\n@torch.jit.script\ndef f(x): return x",
    "jit by import": "from torch import jit",
    "modes": "import torch\ntorch._C._set_grad(1)",
    "operators": "import torch\ntorch.ops.aten.add",
    "special methods": "x = ().__class__.__base__",
    "special names": "x = __builtins__",
    "class patterns": "match 1:\n    case object(real=r): pass",
    "out of torch": "def f(x): return x.numpy()",
    "out of torch, as a list": "def f(x): return x.tolist()",
    "interpreter": "import triton\ntriton.runtime.interpreter",
    "handles": "def k(x): return x.handle.data",
    "threads": "import threading",
    "C": "import ctypes",
    "C++ without a GPU": "from torch.utils.cpp_extension import load_inline",
    "a star": "from torch import *",
    "no Python": "def f(:",
}


@pytest.mark.parametrize("name", TRICKS)
def test_a_text_that_reaches_out_is_refused_before_it_runs(name: str) -> None:
    assert refused(TRICKS[name])


def test_what_honest_kernels_do_is_not_refused() -> None:
    text = """
from __future__ import annotations
import math
from functools import partial
import torch, triton
from torch import nn
import torch.nn.functional as F
from triton import language as tl

@triton.autotune(configs=[triton.Config({"B": 64}, num_warps=4)], key=["n"])
@triton.jit
def k(x, y, n, B: tl.constexpr):
    at = tl.program_id(axis=0) * B + tl.arange(0, B)
    tl.store(y + at, tl.math.exp2(tl.load(x + at, mask=at < n, other=0.0)), mask=at < n)

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x

class ModelNew(nn.Module):
    def __init__(self, size=None):
        super(ModelNew, self).__init__()
        self._size, self.data = size, None
        self.weight = nn.Parameter(torch.ones(3, device="cpu"))

    def forward(self, x):
        if not x.is_contiguous():
            x = x.contiguous()
        y = torch.empty_like(x)
        grid = lambda meta: (triton.cdiv(x.numel(), meta["B"]),)
        k[grid](x, y, x.numel(), B=64)
        return y.view(x.shape).to(torch.float32)
"""
    assert refused(text) == []
    assert refused("from torch.utils.cpp_extension import load_inline\nm = load_inline('a', '')", cuda=True) == []


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_timed() -> None:
    row = sample(built_in()["softmax"], [{"ROWS": 4096, "COLS": 2048}])
    wanted = [(row, row["metadata"]["kernel"]), (row, row["metadata"]["code"] + DECOY)]
    good, cheat = (result(row, *one, device="cuda") for one in graded(wanted, "cuda"))
    assert good.flags == ()
    assert good.metrics["speedup"] > 1.2
    assert "torch_ops" in cheat.flags
