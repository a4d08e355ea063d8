"""vLLM in a torchrun world: independent engines beside FSDP2, and one engine over several ranks.

vLLM builds on whatever torch.distributed was initialised as, and making its groups is a collective of the whole world:
an engine built by one rank alone waits for the others for ever. So all ranks call ``prepare_world`` once; after that,
with tensor_parallel = 1, any of them builds an engine at any time, or never, and no step needs another rank.
With more, all ranks build together (``external_launcher``), rank 0 leads and the others replay its log (``replay``).
"""

from __future__ import annotations

import os

import torch.distributed as dist

from uniagent.adapters.engines.replay import Broadcast, Follower, Leader
from uniagent.adapters.engines.vllm import VllmEngine
from uniagent.adapters.engines.vllm_setup import Options, import_vllm
from uniagent.engine import config
from uniagent.engine.errors import UserError


def prepare_world(device: str, *, tensor_parallel: int = 1) -> None:
    """vLLM's groups, over all ranks of an initialised torch.distributed. Every rank calls it, also one that will build
    no engine; calling it again does nothing. UserError when the world cannot be split."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: the trainer's ranks join first")
    import_vllm()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    size = dist.get_world_size()
    if size % tensor_parallel:
        raise UserError(
            f"engine.options.tensor_parallel = {tensor_parallel} does not divide the {size} ranks of torchrun"
        )
    if model_parallel_is_initialized():
        return
    backend = "gloo" if device == "cpu" else "nccl"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(size, dist.get_rank(), "env://", int(os.environ["LOCAL_RANK"]), backend)
        ensure_model_parallel_initialized(tensor_parallel, 1)


def check_prepared() -> None:
    """RuntimeError in place of waiting for ever for the other ranks."""
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    if dist.is_initialized() and dist.get_world_size() > 1 and not model_parallel_is_initialized():
        raise RuntimeError(
            "a rank that builds a vLLM engine alone waits for the other ranks for ever: call "
            "uniagent.adapters.engines.vllm_ranks.prepare_world on every rank first"
        )


def build_parallel(
    folder: str, settings: config.Engine, options: Options, *, dtype: str, device: str
) -> Leader | Follower:
    """This rank's side of an engine over all ranks of the world, which call it at the same time after
    ``prepare_world``. UserError where torchrun did not start as many ranks as the engine is split over."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size != options.tensor_parallel:
        raise UserError(
            f"engine.options.tensor_parallel = {options.tensor_parallel}, but torchrun started {size} ranks: start as "
            "many (rank 0 leads, the others follow), or set engine.options.process = 'child'"
        )
    check_prepared()
    part = VllmEngine(folder, settings, options, dtype=dtype, device=device, executor="external_launcher")
    return Follower(part, Broadcast(), device) if dist.get_rank() else Leader(part, Broadcast())
