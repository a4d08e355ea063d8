"""Counts what a computation does: torch operations by a dispatch mode, Triton kernels in Triton's interpreter, and on a
GPU seconds.

The counted cost is a proxy of time on a machine with memory of a limited bandwidth, not a measurement: bytes read and
written by every operation (views are free), floating-point operations, launches. In the interpreter a load or store
counts the distinct addresses of its lanes that are not masked. Fresh memory is filled with NaN (integers: the largest
value), so that what a kernel never wrote shows.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
MOVES = {
    "clone", "copy_", "_to_copy", "contiguous", "fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like",
    "full_like", "new_zeros", "new_ones", "new_full", "_pin_memory",
}  # fmt: skip
VIEWS = {"_unsafe_view", "detach", "alias", "set_", "lift_fresh", "resize_", "_reshape_alias"}
INTERPRETERS_OWN = {"new_empty", "set_", "copy_", "empty"}  # how it takes arguments and gives them back
SEVERAL = {  # floating-point operations per element of what eager PyTorch does in one kernel
    "_softmax": 5, "_log_softmax": 6, "native_layer_norm": 8, "native_batch_norm": 8, "native_group_norm": 8, "gelu": 8,
    "silu": 4, "sigmoid": 3, "tanh": 4, "softplus": 4, "mish": 7, "elu": 3, "var": 4, "std": 4, "norm": 2,
    "linalg_vector_norm": 2, "logsumexp": 4, "hardswish": 4, "rsqrt": 2,
}  # fmt: skip


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``computed`` are torch operations that compute, by name; the rest are totals."""

    def __init__(self, *, poison: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.poison, self.launching = poison, False
        self.bytes = self.flops = self.launches = self.kernels = 0
        self.computed: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if self.launching and name in INTERPRETERS_OWN:
            return out
        if name in ALLOCATES:
            if self.poison:
                poisoned(out)
        elif not (name in VIEWS or getattr(func, "is_view", False)):
            if space != "aten" or name not in MOVES:
                self.computed[name] += 1
            self._torch_operation(func, args, kwargs or {}, out)
        return out

    def _torch_operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        written = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.launches += 1
        self.bytes += sum(_storage_bytes(t) for t in read) + sum(_storage_bytes(t) for t in written)
        counted = flop_registry.get(func.overloadpacket)
        if counted is not None:
            self.flops += int(counted(*args, **kwargs, out_val=out))
        else:
            name = func._schema.name.partition("::")[2]
            self.flops += SEVERAL.get(name, 1) * max((t.numel() for t in (*read, *written)), default=0)

    def as_json(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "flops": self.flops,
            "launches": self.launches,
            "kernels": self.kernels,
            "computed": dict(self.computed),
        }


def _storage_bytes(tensor: torch.Tensor) -> int:
    """Of the elements that are really there: an expanded dimension is read once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return int(np.prod([size for size, stride in sizes if stride or not size], dtype=np.int64)) * tensor.element_size()


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


# ---------------------------------------------------------------- Triton


@contextmanager
def kernels_counted(current: Callable[[], Meter | None]) -> Iterator[None]:
    """While it lasts, every Triton kernel is counted in the meter that ``current`` gives; interpreted ones with their
    traffic."""
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    changed: list[tuple[Any, str, Any]] = []

    def wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        changed.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, around(owner.__dict__[name]))

    def launch(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            meter = current()
            if meter is None or meter.launching:
                return original(*args, **kwargs)
            meter.launching = True
            meter.kernels += 1
            meter.launches += 1
            try:
                return original(*args, **kwargs)
            finally:
                meter.launching = False

        return run

    def counting(measure: Callable[..., tuple[int, int]]) -> Callable[[Any], Any]:
        """``measure`` gives (bytes, floating-point operations) of one call."""

        def around(original: Any) -> Any:
            def run(self: Any, *args: Any, **kwargs: Any) -> Any:
                out = original(self, *args, **kwargs)
                meter = current()
                if meter is not None:
                    moved, done = measure(out, *args, **kwargs)
                    meter.bytes += moved
                    meter.flops += done
                return out

            return run

        return around

    builder = interpreter.InterpreterBuilder
    wrap(interpreter.GridExecutor, "__call__", launch)
    wrap(JITFunction, "run", launch)
    wrap(builder, "create_masked_load", counting(lambda out, ptrs, mask, *_, **__: (_touched(ptrs, mask, out), 0)))
    wrap(
        builder, "create_masked_store", counting(lambda out, ptrs, val, mask, *_, **__: (_touched(ptrs, mask, val), 0))
    )
    wrap(builder, "create_atomic_rmw", counting(lambda out, op, ptr, val, mask, *_: (2 * _touched(ptr, mask, val), 0)))
    wrap(builder, "create_atomic_cas", counting(lambda out, ptr, *_: (2 * out.data.nbytes, 0)))
    for name in ("binary_op", "unary_op", "create_fma", "create_erf", "create_rsqrt", "create_fabs"):
        wrap(builder, name, counting(lambda out, *_, **__: (0, _floats(out.data))))
    wrap(builder, "create_dot", counting(lambda out, a, b, *_: (0, 2 * out.data.size * a.data.shape[-1])))
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        wrap(kind, "apply_impl", counting(lambda out, given: (0, sum(_floats(one.handle.data) for one in given))))
    try:
        yield
    finally:
        for owner, name, original in changed:
            setattr(owner, name, original)


def _touched(pointers: Any, mask: Any, value: Any) -> int:
    """Bytes at the distinct addresses of lanes that are not masked."""
    lanes = np.broadcast_to(mask.data, pointers.data.shape)
    return int(np.unique(pointers.data[lanes]).size) * int(value.data.itemsize)


def _floats(data: Any) -> int:
    return int(data.size) if np.issubdtype(data.dtype, np.floating) else 0


# ---------------------------------------------------------------- time


def seconds(
    call: Callable[[], Any],
    *,
    prepare: Callable[[int], Any],
    wait: Callable[[], None],
    clock: Callable[[], int] = time.perf_counter_ns,
    warm_up: int = 10,
    repeats: int = 50,
) -> float:
    """The median seconds of a call. ``prepare`` gets the number of each call before it; ``wait`` ends when nothing runs
    on the device any more, on whatever stream: it is called before the clock starts, and before it stops."""
    found = []
    for number in range(warm_up + repeats):
        prepare(number)
        wait()
        started = clock()
        call()
        wait()
        found.append(clock() - started)
    return statistics.median(found[warm_up:]) / 1e9


def device_kernels(call: Callable[..., Any], inputs: Sequence[Any]) -> int:
    """Kernels that a call runs on the GPU, but for PyTorch's own: those of CUDA code, which nothing else counts."""
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad(), profile(activities=[ProfilerActivity.CUDA]) as seen:
        call(*inputs)
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() or () if event.device_type.name == "CUDA"]
    return sum("at::native" not in name and not name.startswith(("Memcpy", "Memset")) for name in names)


def on_device(
    model: Callable[..., Any], sets: Sequence[Sequence[Any]], device: str, *, warm_up: int = 10, repeats: int = 50
) -> tuple[float, list[Any]]:
    """``seconds`` on the GPU, and what the last call with each input set gave. The sets take turns in the same tensors,
    filled anew before every call; then the second-level cache is flushed."""
    scratch = torch.empty(256 << 20, dtype=torch.int8, device=device)
    buffers = [value.clone() if isinstance(value, torch.Tensor) else value for value in sets[0]]
    given: list[Any] = [None] * len(sets)
    turn = 0

    def prepare(number: int) -> None:
        nonlocal turn
        given[turn] = tree_map_only(torch.Tensor, torch.clone, given[turn])  # a model may use its outputs again
        turn = number % len(sets)
        for place, value in enumerate(sets[turn]):
            buffers[place] = filled(buffers[place], value)
        scratch.zero_()

    def call() -> None:
        given[turn] = model(*buffers)

    with torch.no_grad():
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        found = seconds(call, prepare=prepare, wait=wait, warm_up=warm_up, repeats=repeats)
    return found, given


def filled(old: Any, new: Any) -> Any:
    """The old tensor with the new content, where that fits."""
    if not isinstance(new, torch.Tensor):
        return new
    return old.copy_(new) if old.shape == new.shape and old.dtype == new.dtype else new.clone()
