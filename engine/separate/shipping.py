"""New weights on their way from the training mesh to rollout nodes: over the process group, or fetched by HTTP.

In the job rank 0 broadcasts a version in buckets, and each rollout rank puts it into its engine between two steps.
Nodes from elsewhere fetch it in pieces, whose sha256 the manifest gives. Both ends compare what the engine holds with
what was sent, bit by bit. Invariants: an engine gets a version whole or not at all; a piece of one version is never
mixed with another's. Knows tensors by name; no policy, no session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from safetensors.torch import load, save

from uniagent.engine.learner.weights import SyncMismatch, broadcast, checksum, compare
from uniagent.engine.ports import Json, KvPolicy, StepEngine

Named = Sequence[tuple[str, torch.Tensor]]
PIECE = 64 << 20  # bytes


def send(weights: Named, version: int, group: Any) -> None:
    """To every rollout rank of the job. On rank 0's accelerator thread; returns when all have come for it."""
    dist.broadcast_object_list([version, checksum(weights)], src=0, group=group)
    for _ in broadcast(weights, group=group, device=_device(weights)):
        pass


def receive(engine: StepEngine, group: Any, device: str, kv: KvPolicy) -> int:
    """What ``send`` sends, into the engine; the version. On the rank's accelerator thread."""
    head: list[Any] = [None, None]
    dist.broadcast_object_list(head, src=0, group=group)
    version, expected = head
    weights = list(broadcast(None, group=group, device=device))
    if checksum(weights) != expected:
        raise SyncMismatch(f"the weights of policy version {version} were changed on their way from rank 0")
    put(engine, weights, version, kv)
    return int(version)


def put(engine: StepEngine, weights: Named, version: int, kv: KvPolicy) -> None:
    """Into an engine, atomically, and compared afterwards. On its accelerator thread."""
    engine.update(weights, version, kv)
    if (held := engine.weights()) is not None:
        compare(weights, held)


@frozen(eq=False)
class Version:
    """One version on the shelf."""

    version: int
    pieces: tuple[bytes, ...]
    sums: tuple[str, ...]


class WeightShelf:
    """The newest weights as nodes fetch them. ``place`` is slow: off the loop."""

    def __init__(self) -> None:
        self._newest: Version | None = None

    def place(self, weights: Named, version: int) -> None:
        pieces: list[bytes] = []
        now: dict[str, torch.Tensor] = {}
        size = 0
        for name, tensor in weights:
            if now and size + tensor.nbytes > PIECE:
                pieces.append(save(now))
                now, size = {}, 0
            now[name] = tensor.detach().cpu().contiguous()
            size += tensor.nbytes
        pieces.append(save(now))
        self._newest = Version(version, tuple(pieces), tuple(hashlib.sha256(p).hexdigest() for p in pieces))

    def manifest(self) -> dict[str, Json]:
        newest = self._newest
        if newest is None:
            return {"version": -1, "sha256": []}
        return {"version": newest.version, "sha256": list(newest.sums)}

    def piece(self, version: int, number: int) -> bytes:
        newest = self._newest
        if newest is None or newest.version != version or not 0 <= number < len(newest.pieces):
            raise KeyError(version)
        return newest.pieces[number]


async def fetch(
    manifest: Callable[[], Awaitable[dict[str, Json]]], piece: Callable[[int, int], Awaitable[bytes]], least: int
) -> tuple[int, list[tuple[str, torch.Tensor]]] | None:
    """(version, weights) of the newest version; None when it is older than ``least``, or was replaced meanwhile, or a
    piece came damaged: ask again."""
    found = await manifest()
    version = int(found["version"])
    if version < least:
        return None
    weights: list[tuple[str, torch.Tensor]] = []
    for number, expected in enumerate(found["sha256"]):
        try:
            data = await piece(version, number)
        except KeyError:
            return None
        if hashlib.sha256(data).hexdigest() != expected:
            return None
        weights += load(data).items()
    return version, weights


def _device(weights: Named) -> str:
    return weights[0][1].device.type if weights else "cpu"
