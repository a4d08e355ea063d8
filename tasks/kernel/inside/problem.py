"""A reference in KernelBench's format: ``class Model``, ``get_inputs()`` and ``get_init_inputs()`` as code text.

``constants`` replace the code's own module-level names, so that one text serves several shapes. Inputs are a function
of (code, constants, seed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

NEEDED = ("Model", "get_inputs")


class BadReference(Exception):
    """The reference itself is no good: nobody's kernel is to blame."""


class Reference:
    """The code, run once for one shape."""

    def __init__(self, code: str, constants: Mapping[str, Any]) -> None:
        self.names: dict[str, Any] = {"__name__": "reference"}
        exec(compile(code, "reference.py", "exec"), self.names)
        missing = [name for name in (*NEEDED, *constants) if name not in self.names]
        if missing:
            raise BadReference(f"the reference does not define {', '.join(missing)}")
        self.names.update(constants)

    def init_inputs(self, seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return list(self.names["get_init_inputs"]()) if "get_init_inputs" in self.names else []

    def inputs(self, seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return list(self.names["get_inputs"]())

    def model(self, seed: int, device: str) -> Any:
        return built(self.names["Model"], self.init_inputs(seed), seed, device)


def built(kind: Any, init_inputs: Sequence[Any], seed: int, device: str) -> Any:
    """A model whose weights are drawn from the seed: the reference's and the kernel's get the same ones."""
    torch.manual_seed(seed)
    made = kind(*init_inputs)
    return made.to(device).eval() if isinstance(made, torch.nn.Module) else made


def moved(values: Sequence[Any], device: str) -> list[Any]:
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in values]
