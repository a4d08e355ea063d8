"""Weights on their way from the learner to engines.

By reference when the engine decodes on the learner's own module: nothing moves, only the version. By copy otherwise:
tensors under the model's names, in the engine's dtype, which the engine's own loader maps. To other ranks by broadcast,
in buckets. ``checksum`` says whether two sides hold the same bits, and ``compare`` names the weights that differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from uniagent.engine.learner.lora import merged

NamedTensors = Iterable[tuple[str, Tensor]]


class SyncMismatch(RuntimeError):
    """An engine does not hold the weights it was sent."""


def named_weights(model: Any, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight, tied ones once, adapters merged into theirs, without gradient. The tensors are
    the model's own where nothing had to be changed: a receiver copies them before the next optimizer step. Weights that
    are sharded over ranks are gathered one at a time, so all ranks go through them."""
    for name, parameter in model.named_parameters():
        if named := merged(model, name, _whole(parameter.detach()), _whole):
            yield named[0], named[1] if dtype is None else named[1].to(dtype)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_weights(source: NamedTensors, target: Any) -> None:
    """Copies into the parameters of ``target`` by name, in place; raises ValueError when names or shapes differ."""
    own = dict(target.named_parameters())
    seen = set()
    for name, tensor in source:
        if name not in own or own[name].shape != tensor.shape:
            raise ValueError(f"weight {name} {tuple(tensor.shape)} has no place in the target model")
        own[name].copy_(tensor)
        seen.add(name)
    if missing := own.keys() - seen:
        raise ValueError(f"weights missing from the source: {', '.join(sorted(missing))}")


def broadcast(
    weights: NamedTensors | None, *, source: int = 0, group: Any = None, device: str = "cpu", bucket_mib: int = 256
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of rank ``source``'s weights on every rank of the group, bucket by bucket, so that a receiver
    never holds more than one bucket beside its own weights. All ranks of the group go through all of it; only the
    source gives ``weights``. ``source`` is a rank of the whole world; ``device`` that of the buckets (as the group's
    back-end wants it) and of what is yielded."""
    me = dist.get_rank()
    buckets = _buckets(weights or (), bucket_mib << 20)
    while True:
        bucket = next(buckets, []) if me == source else []
        box: list[Any] = [[(name, tensor.dtype, tensor.shape) for name, tensor in bucket]]
        dist.broadcast_object_list(box, src=source, group=group)
        layout: list[tuple[str, torch.dtype, torch.Size]] = box[0]
        if not layout:
            return
        sizes = [dtype.itemsize * shape.numel() for _, dtype, shape in layout]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        if me == source:
            torch.cat([t.to(device).contiguous().view(-1).view(torch.uint8) for _, t in bucket], out=flat)
        dist.broadcast(flat, src=source, group=group)
        for (name, dtype, shape), part in zip(layout, torch.split(flat, sizes), strict=True):
            yield name, part.clone().view(dtype).view(shape)  # a part may begin at an odd address


def _buckets(weights: NamedTensors, limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def checksum(weights: NamedTensors) -> str:
    """A fingerprint of the bits, the same on every device and in every order of the tensors. Sums are integers modulo
    2**64, so that they do not depend on how the work is split; a changed or moved element changes the sum."""
    return f"{sum(_digest(name, tensor) for name, tensor in weights) % 2**64:016x}"


def compare(sent: NamedTensors, held: NamedTensors) -> str:
    """The checksum of what was sent, in the dtypes it is held in. Raises SyncMismatch when anything sent is not held
    bit by bit; ``held`` may have more names (tied weights under both)."""
    own, total, wrong = dict(held), 0, []
    for name, tensor in sent:
        here = own.get(name)
        expected = _digest(name, tensor if here is None else tensor.to(here.dtype))
        total += expected
        if here is None or _digest(name, here) != expected:
            wrong.append(name)
    if wrong:
        raise SyncMismatch(
            f"after a weight sync the engine's {', '.join(wrong[:3])} ({len(wrong)} weights in all) are not what the "
            "learner sent: the new weights did not arrive whole"
        )
    return f"{total % 2**64:016x}"


def _digest(name: str, tensor: Tensor) -> int:
    return _mix(_hash_name(name) + _sum(tensor))


def _hash_name(name: str) -> int:
    value = 14695981039346656037  # FNV-1a
    for byte in name.encode():
        value = (value ^ byte) * 1099511628211 % 2**64
    return value


def _sum(tensor: Tensor) -> int:
    chunk = 1 << (20 if tensor.device.type == "cpu" else 24)
    words = tensor.detach().contiguous().view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk].to(torch.int64)
        place = torch.arange(start, start + len(part), device=tensor.device, dtype=torch.int64)
        mixed = (part + place * 0x9E3779B1) * 0x2545F4914F6CDD1D
        total += (mixed ^ (mixed >> 29)).sum()
    return int(total) % 2**64


def _mix(value: int) -> int:
    value %= 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    return value ^ value >> 27
