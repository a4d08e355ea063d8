"""The processes that train together, and the collectives the learner needs of them.

Every rank sees the whole batch as numbers and takes its share of the rows, so that a plan is the same everywhere
without a word between them. Ranks along ``data`` take different rows; ranks along ``context`` share one row, each
with a part of its tokens. Only the thread that owns the device calls these.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Ranks:
    """Where this process stands; ``mesh`` is one-dimensional over all of them and shards the weights. They are the
    first ``size`` of the world's: what is left of it does not train."""

    rank: int = 0
    size: int = 1
    context: int = 1  # ranks that share a row
    mesh: Any = None
    context_group: Any = None
    io_group: Any = None  # of threads that write checkpoints beside the training
    group: Any = None  # None: the whole world
    outlet: Any = None  # rank 0 and those that do not train: the way of new weights

    @property
    def shares(self) -> int:
        """Rows trained at once."""
        return self.size // self.context

    @property
    def share(self) -> int:
        return self.rank // self.context

    @property
    def part(self) -> int:
        return self.rank % self.context

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)


ALONE = Ranks()


def join(*, context: int = 1, device: str = "cpu", train: int = 0) -> Ranks:
    """The ranks of the process group that torch.distributed was started with; alone without one. ``train``: only the
    first so many of them (0: all); the others call it too. Raises ValueError when ``context`` does not divide them."""
    together = dist.is_initialized() and dist.get_world_size() > 1
    size = (train or dist.get_world_size()) if together else 1
    if size % context:
        raise ValueError(
            f"learner.context_parallel = {context} does not divide the ranks that train ({size}): start so many "
            "with torchrun --nproc-per-node, or use 1"
        )
    if not together:
        return ALONE
    from torch.distributed.device_mesh import DeviceMesh

    rank, world = dist.get_rank(), dist.get_world_size()
    members = list(range(size))
    outlet = dist.new_group([0, *range(size, world)]) if size < world else None
    if size == 1:
        return Ranks(rank, 1, outlet=outlet)
    both = DeviceMesh(device, torch.tensor(members).view(-1, context), mesh_dim_names=("data", "context"))
    mesh = DeviceMesh(device, torch.tensor(members))
    io_group = dist.new_group(members, backend="gloo")
    part = dist.new_group(members) if size < world else None
    shared = both.get_group("context") if context > 1 and rank < size else None
    return Ranks(rank, size, context, mesh, shared, io_group, part, outlet)


def shard(policy: torch.nn.Module, layers: Any, ranks: Ranks, dtype: torch.dtype | None) -> None:
    """FSDP2: every layer and the rest are sharded over all ranks; gradients are summed, not averaged, because every
    token's weight is already of the whole step. ``dtype``: of weights and activations in use; gradients are reduced in
    fp32."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    wide = None if dtype is None else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide)
    for module in (*layers, policy):
        fully_shard(module, mesh=ranks.mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
