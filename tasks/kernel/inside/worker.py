"""Runs an agent's ``ModelNew`` and tells what it gave and what that took. Nothing of the reference is in this process:
a child of it draws the inputs before the agent's code is loaded, and the file is removed.

The same buffers are filled anew before every call, so that what a kernel remembers by identity or pointer is wrong.
What a cheat would have to change (torch, Triton, numpy, timers) is noted before the code is loaded and compared after.
The record is signed with a key from standard input and written to the standard output of before; the process ends
there, so nothing registered for later can run.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first use of a dispatch mode loads it, and it replaces functions of torch then

from uniagent.tasks.kernel.inside.meter import Meter, device_kernels, filled, kernels_counted, on_device
from uniagent.tasks.kernel.inside.problem import Reference, built, moved
from uniagent.tasks.kernel.inside.watch import changed_objects, host_reads_noted, known_objects


class Drawn:
    """One shape's inputs: for building the model, and for each seed."""

    def __init__(self, seed: int, init_inputs: list[Any], inputs: list[list[Any]]) -> None:
        self.seed, self.init_inputs, self.inputs = seed, init_inputs, inputs


def drawn(code: str, shapes: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[Drawn]:
    found = []
    for constants in shapes:
        reference = Reference(code, constants)
        found.append(Drawn(seeds[0], reference.init_inputs(seeds[0]), [reference.inputs(seed) for seed in seeds]))
    return found


def drawn_elsewhere(path: Path, shapes: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[Drawn]:
    """The same from a forked child; ``path`` is gone afterwards. Raises RuntimeError with what went wrong there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            made = [vars(one) for one in drawn(path.read_text(encoding="utf-8"), shapes, seeds)]
            told = io.BytesIO()
            torch.save(made, told)
            answer = b"+" + told.getvalue()
        except BaseException:  # noqa: BLE001, told to the parent
            answer = b"-" + traceback.format_exc().encode()
        with os.fdopen(writing, "wb") as out:
            out.write(answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as got:
        answer = got.read()
    os.waitpid(child, 0)
    path.unlink()
    if not answer.startswith(b"+"):
        raise RuntimeError(f"the reference gives no inputs: {answer[1:].decode(errors='replace')}")
    return [Drawn(**one) for one in torch.load(io.BytesIO(answer[1:]), weights_only=True)]


# ---------------------------------------------------------------- what the agent's code does


def examine(solution: Path, drawn_sets: Sequence[Drawn], device: str, outputs: Path) -> dict[str, Any]:
    """The record: ``calls`` (shape, seed number, counts, outputs by file), ``flags``, ``error`` where it raised.
    Outputs are written as bytes into ``outputs``."""
    record: dict[str, Any] = {"calls": [], "flags": [], "error": None, "seconds": []}
    flags: list[str] = record["flags"]
    metered: list[Meter] = []
    with kernels_counted(lambda: metered[-1] if metered else None), host_reads_noted(metered, flags):
        if device != "cpu":
            torch.zeros(1, device=device)  # the first use changes things, too
        kept, notes = known_objects(), list(metered)
        try:
            kind = loaded(solution).ModelNew
            for number, one in enumerate(drawn_sets):
                model = built(kind, one.init_inputs, one.seed, device)
                buffers = moved([_copied(value) for value in one.inputs[0]], device)
                for turn, values in enumerate(one.inputs):
                    buffers = [filled(old, new) for old, new in zip(buffers, moved(values, device), strict=True)]
                    call, given = called(model, buffers, metered, flags, device)
                    if not all(_same(now, value) for now, value in zip(buffers, moved(values, device), strict=True)):
                        flags.append("inputs_changed")
                    files = [written(out, outputs / f"{number}-{turn}-{n}") for n, out in enumerate(given)]
                    record["calls"].append({"shape": number, "turn": turn, **call.as_json(), "outputs": files})
                if device != "cpu":
                    taken, given = on_device(model, [moved(values, device) for values in one.inputs], device)
                    record["seconds"].append(taken)
                    record["calls"] += timed(number, given, outputs, flags)
        except BaseException:  # noqa: BLE001, whatever an agent's code raises is its own
            record["error"] = traceback.format_exc()[-4000:]
        metered[:] = notes
        record["patched"] = changed_objects(kept)
    flags += ["patched"] if record["patched"] else []
    record["flags"] = sorted(set(flags))
    return record


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("solution", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["solution"] = module
    spec.loader.exec_module(module)
    return module


def called(
    model: Callable[..., Any], inputs: Sequence[Any], metered: list[Meter], flags: list[str], device: str
) -> tuple[Meter, list[torch.Tensor]]:
    """One call under a meter, with copies of what it gave."""
    meter = Meter(poison=True)
    metered.append(meter)
    try:
        with torch.no_grad(), meter:
            given = model(*inputs)
        if device != "cpu":
            if torch.cuda.current_stream() != torch.cuda.default_stream():
                flags.append("streams")
            torch.cuda.synchronize()
    finally:
        metered.pop()
    outputs = plain(given, flags)
    if not meter.kernels and (device == "cpu" or not device_kernels(model, inputs)):
        flags.append("no_kernel")
    return meter, [out.detach().clone() for out in outputs]


def plain(given: Any, flags: list[str]) -> list[torch.Tensor]:
    """What a call gave, as a list; empty where not all are tensors: a subclass could compute when looked at."""
    outputs = list(given) if isinstance(given, (tuple, list)) else [given]
    if all(type(out) is torch.Tensor for out in outputs):
        return outputs
    flags.append("not_a_tensor")
    return []


def timed(shape: int, given: Sequence[Any], outputs: Path, flags: list[str]) -> list[dict[str, Any]]:
    """The outputs of timed calls, to be compared too: speed may not come from calls that give something else."""
    nothing = Meter().as_json()
    return [
        {"shape": shape, "turn": turn, **nothing,
         "outputs": [written(out, outputs / f"{shape}-{turn}-{n}-timed") for n, out in enumerate(plain(one, flags))]}
        for turn, one in enumerate(given)
    ]  # fmt: skip


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    return torch.equal(one.nan_to_num() if one.is_floating_point() else one,
                       other.nan_to_num() if other.is_floating_point() else other)  # fmt: skip


def written(tensor: torch.Tensor, path: Path) -> dict[str, Any]:
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    path.write_bytes(raw)
    digest = hashlib.sha256(raw).hexdigest()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"file": path.name, "shape": list(tensor.shape), "dtype": dtype, "sha256": digest}


# ---------------------------------------------------------------- the program


def main() -> None:
    """argv: a folder with reference.py and solution.py. Standard input: a JSON object with key, shapes, seeds, device.
    Writes a signed line {"ready": true} before the agent's code is loaded, and the record as the second line."""
    folder = Path(sys.argv[1])
    job = json.load(sys.stdin)
    key = bytes.fromhex(job.pop("key"))
    told = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    torch.set_num_threads(1)

    def tell(what: Mapping[str, Any]) -> None:
        body = json.dumps(what).encode()
        os.write(told, hmac.new(key, body, "sha256").hexdigest().encode() + b" " + body + b"\n")

    sets = drawn_elsewhere(folder / "reference.py", job["shapes"], job["seeds"])
    outputs = folder / "outputs"
    outputs.mkdir()
    tell({"ready": True})
    tell(examine(folder / "solution.py", sets, job["device"], outputs))
    os._exit(0)


if __name__ == "__main__":
    main()
