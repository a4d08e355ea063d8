"""AdamW as the learner uses it: decay on matrices only, clipping, one learning rate."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def adamw(module: torch.nn.Module, *, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """Over the parameters that require a gradient. Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101) on
    tensors of two or more dimensions. The learning rate is set at each step."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip(parameters: Iterable[Tensor], limit: float) -> float:
    """Scales gradients, sharded or not, to a total 2-norm of at most ``limit`` and gives the norm before; 0 clips
    nothing."""
    found = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(found, limit if limit > 0 else float("inf"))
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
