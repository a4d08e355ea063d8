"""Compares outputs with the reference's, in a process that no agent's code ever was in.

Inputs are drawn again from the seeds. An output that is that of another call's inputs was remembered, and says so. What
the reference costs is counted on the way, on a GPU timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from uniagent.tasks.kernel.inside.meter import Meter, on_device
from uniagent.tasks.kernel.inside.problem import Reference, moved

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}  # both kinds


def difference(found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """What is wrong with an output; None when it is within the tolerance of its type. |found - wanted| <= tolerance x
    (1 + |wanted|); integers and truth values are compared exactly."""
    if found.shape != wanted.shape:
        return f"its shape is {list(found.shape)}, not {list(wanted.shape)}"
    if found.dtype != wanted.dtype:
        return f"its type is {found.dtype}, not {wanted.dtype}"
    if not wanted.is_floating_point():
        return None if torch.equal(found, wanted) else f"{int((found != wanted).sum())} elements differ"
    lost = int((found.isnan() & ~wanted.isnan()).sum())
    if lost:
        return f"{lost} of {found.numel()} elements are NaN: were they written?"
    limit = TOLERANCE[wanted.dtype]
    if torch.allclose(found.double(), wanted.double(), rtol=limit, atol=limit, equal_nan=True):
        return None
    return f"largest difference {float((found.double() - wanted.double()).abs().max()):.3g}, tolerance {limit:g}"


def read(folder: Path, output: Mapping[str, Any]) -> torch.Tensor:
    """An output as the worker wrote it: bytes alone, nothing that could run."""
    raw = bytearray((folder / output["file"]).read_bytes())
    dtype = getattr(torch, output["dtype"])
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(output["shape"])


def compare(
    code: str, shapes: Sequence[Mapping[str, Any]], seeds: Sequence[int], device: str,
    calls: Sequence[Mapping[str, Any]], folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """``wrong`` says what is, at most one line a call; ``remembered``: whether an output was another call's; ``costs``
    of the reference, by shape; ``seconds`` on a GPU."""
    wrong: list[str] = []
    remembered = False
    costs, times = [], []
    for number, constants in enumerate(shapes):
        reference = Reference(code, constants)
        model = reference.model(seeds[0], device)
        wanted: list[list[torch.Tensor]] = []
        meter = Meter()
        rotated = [moved(reference.inputs(seed), device) for seed in seeds]
        for inputs in rotated:
            meter = Meter()
            with torch.no_grad(), meter:
                out = model(*inputs)
            wanted.append([one.detach().cpu() for one in (out if isinstance(out, (tuple, list)) else [out])])
        costs.append(meter.as_json())
        if device != "cpu":
            times.append(on_device(model, rotated, device)[0])
        own = [call for call in calls if call["shape"] == number]
        if {call["turn"] for call in own} != set(range(len(seeds))):
            wrong.append(f"shape {dict(constants) or number}: it was not called with all inputs")
        for call in own:
            found, turn = [read(folder, one) for one in call["outputs"]], call["turn"]
            problem = _wrong(found, wanted[turn])
            if problem:
                wrong.append(f"shape {dict(constants) or number}, inputs {turn + 1}: {problem}")
                remembered |= any(not _wrong(found, wanted[other]) for other in range(len(seeds)) if other != turn)
    return {"wrong": wrong, "remembered": remembered, "costs": costs, "seconds": times}


def _wrong(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str | None:
    if len(found) != len(wanted):
        return f"{len(found)} outputs, not {len(wanted)}"
    return next((text for text in map(difference, found, wanted) if text), None)


def main() -> None:
    """argv: a folder with reference.py and outputs/. Standard input: shapes, seeds, device and the worker's calls."""
    folder = Path(sys.argv[1])
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    code = (folder / "reference.py").read_text(encoding="utf-8")
    print(json.dumps(compare(code, job["shapes"], job["seeds"], job["device"], job["calls"], folder / "outputs")))


if __name__ == "__main__":
    main()
