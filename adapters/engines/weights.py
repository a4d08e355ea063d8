"""Named tensors into a module's parameters, in place and completely.

Takes the names of ``named_parameters`` and of a Hugging Face checkpoint alike: tied matrices under either name or both,
and the experts of a mixture one by one (``experts.3.gate_proj.weight``) or fused (``experts.gate_up_proj``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

_EXPERT = re.compile(r"^(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight$")


@torch.no_grad()
def load(module: torch.nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Every parameter must come, at its own shape; dtype and device are converted. Raises ValueError otherwise: the
    module then holds a mixture and must not be used."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    written: dict[int, int] = {}
    for name, tensor in weights:
        parameter, place = _place(parameters, name)
        if place.shape != tensor.shape:
            raise ValueError(f"weight {name} has shape {tuple(tensor.shape)}, the engine's {tuple(place.shape)}")
        place.copy_(tensor)
        written[id(parameter)] = written.get(id(parameter), 0) + place.numel()
    missing = [name for name, p in module.named_parameters() if written.get(id(p), 0) < p.numel()]
    if missing:
        raise ValueError(f"an update must bring every weight; {len(missing)} did not come, such as {missing[0]}")


def _place(parameters: dict[str, torch.nn.Parameter], name: str) -> tuple[torch.nn.Parameter, Tensor]:
    """The parameter a name belongs to, and the part of it that it means."""
    if name in parameters:
        return parameters[name], parameters[name]
    expert = _EXPERT.match(name)
    fused = "down_proj" if expert and expert["part"] == "down" else "gate_up_proj"
    parameter = parameters.get(f"{expert['experts']}.{fused}") if expert else None
    if expert is None or parameter is None:
        raise ValueError(f"the engine's model has no weight named {name}")
    one = parameter[int(expert["number"])]
    if fused == "down_proj":
        return parameter, one
    half = one.shape[0] // 2  # gate first, then up
    return parameter, one[:half] if expert["part"] == "gate" else one[half:]
