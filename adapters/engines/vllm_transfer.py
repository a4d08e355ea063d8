"""Weights to a vLLM engine in a child process: which way, and how they are sent.

On a CPU through a file in memory, which the child loads (``vllm_weights``); on GPUs by vLLM's own senders: CUDA IPC
where the child has one device, NCCL where it has several.
"""

from __future__ import annotations

import functools
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import trio
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    WeightSource,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from uniagent.adapters.engines.vllm_setup import Options
from uniagent.adapters.engines.vllm_weights import BACKEND, unfused
from uniagent.engine.portal import Portal

Pairs = Iterable[tuple[str, torch.Tensor]]
Sender = Callable[[Pairs, int], None]  # (weights, version), on a thread of trio's, the engine paused


def backend(options: Options, *, device: str) -> str:
    """Name in vLLM's registry. ``ipc`` sends pickled handles between processes of this run, which vLLM must allow."""
    if device == "cpu" or options.transfer == "file":
        return BACKEND
    several = options.tensor_parallel * options.pipeline_parallel > 1
    found = ("nccl" if several else "ipc") if options.transfer == "auto" else options.transfer
    if found == "ipc":
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return found


def sender(llm: Any, portal: Portal, name: str, options: Options) -> Sender:
    """Call it, and what it gives, on a thread of trio's."""
    client = Client(llm, portal)
    if name == BACKEND:
        client.init_weight_transfer_engine({})
        return functools.partial(_by_file, client)
    source = Source()
    first = functools.cache(lambda: _trainer(name, client, source, options))  # it asks for the names and shapes

    def send(weights: Pairs, version: int) -> None:
        source.pairs = [(key, tensor.detach()) for key, tensor in unfused(weights)]
        first().send_weights()
        client.label(version)

    return send


def _by_file(client: Client, weights: Pairs, version: int) -> None:
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as folder:
        path = Path(folder) / "weights.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights}, path)
        client.start_weight_update()
        client.update_weights({"path": str(path)})
        client.finish_weight_update(str(version))


def _trainer(name: str, client: Client, source: WeightSource, options: Options) -> Any:
    if name == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info: Any = IPCTrainerInitInfo(rank=0, packed=True)
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        workers = options.tensor_parallel * options.pipeline_parallel
        info = NCCLTrainerInitInfo("127.0.0.1", port, workers + 1, rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


class Source(WeightSource):  # type: ignore[misc]
    """The weights of one update after the other: always the same names."""

    pairs: list[tuple[str, torch.Tensor]]

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.pairs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.pairs)


class Client:
    """vLLM's ``VLLMWeightSyncClient`` over the portal; made on a thread of trio's, used from any thread."""

    def __init__(self, llm: Any, portal: Portal) -> None:
        self._llm, self._portal = llm, portal
        self._token = trio.from_thread.run_sync(trio.lowlevel.current_trio_token)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call(self._llm.init_weight_transfer_engine, WeightTransferInitRequest(init_info))

    def start_weight_update(self) -> None:
        self._call(self._llm.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        self._call(self._llm.update_weights, WeightTransferUpdateRequest(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call(self._llm.finish_weight_update, weight_version)

    def label(self, version: int) -> None:
        self._call(self._llm.update_weight_version, str(version))

    def _call(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        trio.from_thread.run(self._portal.call, function, *args, trio_token=self._token)
