"""Notices what a cheat would change or read around the meter: functions that measure and compare, ways out of
torch.

An object that is changed and put back within a call is not noticed; the scan of the text is the first line of defence.
"""

from __future__ import annotations

import builtins
import hashlib
import hmac
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from uniagent.tasks.kernel.inside import meter as meters

HOST_READS = ("numpy", "tolist", "__array__", "__dlpack__")  # ways out of torch that no dispatch mode sees


@contextmanager
def host_reads_noted(metered: Sequence[meters.Meter], flags: list[str]) -> Iterator[None]:
    """A tensor's content that leaves torch during a call sets the flag ``host_reads``."""
    originals = {name: getattr(torch.Tensor, name) for name in HOST_READS}

    def noted(original: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            if metered:
                flags.append("host_reads")
            return original(*args, **kwargs)

        return read

    own = {name: torch.Tensor.__dict__.get(name) for name in HOST_READS}
    for name, original in originals.items():
        setattr(torch.Tensor, name, noted(original))
    try:
        yield
    finally:
        for name, before in own.items():
            if before is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, before)


def known_objects() -> dict[tuple[str, str], tuple[Any, Any, Any]]:
    """Callables of everything that measures or compares, by owner and name, with the code they run."""
    import triton
    from triton.runtime import interpreter, jit

    owners: list[Any] = [
        torch, torch.Tensor, torch.nn.Module, torch.nn.functional, torch.cuda, torch.utils.flop_counter, time, os, json,
        hashlib, hmac, builtins, np, triton, interpreter, interpreter.InterpreterBuilder, interpreter.GridExecutor,
        interpreter.ReduceOps, interpreter.ScanOps, jit.JITFunction, meters, meters.Meter,
        sys.modules[__name__], sys.modules["__main__"],
    ]  # fmt: skip
    found = {}
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if callable(value) or isinstance(value, (staticmethod, classmethod, property)):
                found[owner.__name__, name] = (owner, value, getattr(value, "__code__", None))
    return found


def changed_objects(kept: Mapping[tuple[str, str], tuple[Any, Any, Any]]) -> list[str]:
    changed = []
    for (owner_name, name), (owner, value, code) in kept.items():
        now = vars(owner).get(name)
        if now is not value or getattr(now, "__code__", None) is not code:
            changed.append(f"{owner_name}.{name}")
    return sorted(changed)
