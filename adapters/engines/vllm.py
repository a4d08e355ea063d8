"""vLLM in this process: its LLMEngine, stepped by the accelerator's thread, with live weights.

The engine keeps its own copy of the model and takes new weights between two steps (``vllm_weights``). Invariants: a
request's tokens come with the policy version that sampled them, and ``kv_versions`` says whose weights wrote the K/V;
a prefix written by older weights is never found by a new request (every version has its own salt); the global torch
generator is left as it was; requests are seeded by (seed, session, turn), so that a draw does not depend on the batch.

vLLM's own engine thread and process are not used (VLLM_ENABLE_V1_MULTIPROCESSING = 0): a colocated learner could not
hand live tensors to another process. ``process = "child"`` is another driver (``vllm_child``), several torchrun ranks
are ``vllm_ranks``.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from uniagent.adapters.engines.requests import check
from uniagent.adapters.engines.vllm_requests import Live
from uniagent.adapters.engines.vllm_setup import (
    Options,
    engine_arguments,
    import_vllm,
    prepare,
    read_options,
    salt,
    sampling_arguments,
)
from uniagent.engine import config, model_files
from uniagent.engine.ports import Capacity, Finish, Generation, Ids, KvPolicy, StepOutput, StepRequest, Weights

log = logging.getLogger("uniagent.engines.vllm")


def build(settings: config.Engine, model: Any, *, shared: bool) -> Any:
    """The registry's factory: an engine over the folder that ``model`` was loaded from. In a torchrun world all ranks
    have called ``prepare_ranks`` before. Raises UserError when vLLM is missing or an option is unknown."""
    if shared:
        raise ValueError("vLLM keeps its own copy of the model")
    device = model.device.type
    options = read_options(settings, device=device)
    import_vllm()
    from uniagent.adapters.engines import vllm_ranks

    dtype = str(model.dtype).removeprefix("torch.")
    if options.tensor_parallel > 1:
        return vllm_ranks.build_parallel(model.name_or_path, settings, options, dtype=dtype, device=device)
    vllm_ranks.check_prepared()
    return VllmEngine(model.name_or_path, settings, options, dtype=dtype, device=device)


def build_part(settings: config.Engine, model: Any) -> Any:
    """A follower's part of an engine over several ranks; None where every rank's engine is its own."""
    options = read_options(settings, device=model.device.type)
    return build(settings, model, shared=False) if options.tensor_parallel > 1 else None


def choose(run: config.RunConfig) -> Any:
    """The factory that a run's options ask for."""
    device = model_files.pick_device(run.model.device)
    if read_options(run.engine, device=device).process == "inline":
        _tell_what_fits(run, device)
        return build
    from uniagent.adapters.engines.vllm_child import ChildFactory

    default = "float32" if device == "cpu" else "bfloat16"
    return ChildFactory(default if run.model.dtype == "auto" else run.model.dtype, device)


def _tell_what_fits(run: config.RunConfig, device: str) -> None:
    """On a GPU, whose memory vLLM takes a fixed share of."""
    if device == "cpu":
        return
    from uniagent.adapters.engines.memory import of_run, table

    plan = of_run(run, ranks=int(os.environ.get("WORLD_SIZE", "1")))
    _tell(table(plan), logging.WARNING if plan.problem else logging.INFO)


@functools.cache  # a run asks for its factory more than once
def _tell(text: str, level: int) -> None:
    log.log(level, "memory\n%s", text)


def prepare_ranks(settings: config.Engine, device: str) -> None:
    """What every rank of a torchrun world calls once, after torch.distributed was initialised and before any of them
    builds an engine, also a rank that will build none."""
    from uniagent.adapters.engines import vllm_ranks

    vllm_ranks.prepare_world(device, tensor_parallel=read_options(settings, device=device).tensor_parallel)


build.shares_module = False  # type: ignore[attr-defined]  # read by the node
build.prepare_ranks = prepare_ranks  # type: ignore[attr-defined]  # called by the node where there are several ranks
build.build_part = build_part  # type: ignore[attr-defined]
build.choose = choose  # type: ignore[attr-defined]


class VllmEngine:
    """A ``StepEngine``. ``executor``: how vLLM finds its ranks (``external_launcher`` under torchrun)."""

    def __init__(
        self,
        folder: str,
        settings: config.Engine,
        options: Options,
        *,
        dtype: str,
        device: str,
        executor: str | None = None,
    ) -> None:
        self._options = options
        prepare(options, device=device)
        self._vllm = import_vllm()
        from vllm.config import WeightTransferConfig

        from uniagent.adapters.engines import vllm_weights

        vllm_weights.register()
        arguments = engine_arguments(settings, options, folder, dtype=dtype, device=device)
        with _own_generator():
            self._engine = self._vllm.LLMEngine.from_engine_args(
                self._vllm.EngineArgs(
                    **arguments,
                    weight_transfer_config=WeightTransferConfig(backend=vllm_weights.BACKEND),
                    distributed_executor_backend=executor,
                )
            )
        self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        self._core = self._engine.engine_core.engine_core
        self._context = settings.context
        self._vocabulary = int(self._engine.model_config.get_vocab_size())
        self._cache = _PrefixCache(self._core)
        self._live: dict[int, Live] = {}
        self._epochs = [0]  # epoch -> policy version
        self._asleep = False
        self._broken: str | None = None

    @property
    def _version(self) -> int:
        return self._epochs[-1]

    # ------------------------------------------------------------ requests

    def add(self, request: StepRequest) -> None:
        check(request, context=self._context, vocabulary=self._vocabulary)
        arguments = sampling_arguments(request, self._options, context=self._context, vocabulary=self._vocabulary)
        self._engine.add_request(
            str(request.id),
            self._vllm.TokensPrompt(prompt_token_ids=request.prompt.tolist(), cache_salt=salt(self._version)),
            self._vllm.SamplingParams(**arguments, output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA),
        )
        self._live[request.id] = Live(request)

    def abort(self, id: int) -> Generation | None:
        live = self._live.pop(id, None)
        if live is None:
            return None
        self._engine.abort_request([str(id)])
        return live.generation(Finish.ABORTED, self._epochs, self._version)

    def weights(self) -> Weights:
        return None

    def busy(self) -> bool:
        return bool(self._live) and not self._asleep

    def capacity(self) -> Capacity:
        scheduler = self._core.scheduler
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        return Capacity(self._cache.total, self._cache.free, running, waiting, self._context)

    def resident(self, prompt: Ids) -> int:
        return self._cache.resident(prompt, self._version)

    # ------------------------------------------------------------ weights

    def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        if weights is None:
            raise ValueError("the engine has its own copy of the model: update with (name, tensor) pairs")
        from uniagent.adapters.engines import vllm_weights

        if self._asleep:
            self._engine.wake_up(["weights"])
        else:
            self._core.pause_scheduler(mode="keep", clear_cache=kv is KvPolicy.RECOMPUTE)
        self._broken = f"the update to version {version} failed half-way: its weights are a mixture"
        with _own_generator():
            vllm_weights.push(self._engine, weights)
        self._broken = None
        self._engine.set_weight_version(str(version))
        self._resume(version)

    def sleep(self) -> None:
        """With ``sleep`` among the options: gives the memory of weights and K/V back until ``wake`` or ``update``.
        Requests stay, and are prefilled again; no step runs in between."""
        if self._options.sleep and not self._asleep:
            self._asleep = True
            self._core.sleep(level=1, mode="keep")

    def wake(self) -> None:
        """With the weights as they were; after an ``update`` it is awake already."""
        if self._asleep:
            self._engine.wake_up(["weights"])
            self._resume(self._version)

    def _resume(self, version: int) -> None:
        if self._asleep:
            self._engine.wake_up(["kv_cache"])  # resumes
            self._asleep = False
        else:
            self._core.resume_scheduler()
        self._epochs.append(version)

    def close(self) -> None:
        """Ends the workers, and nothing else: vLLM's own finalizer destroys all of torch.distributed."""
        self._engine.engine_core._finalizer.detach()
        self._engine.model_executor.shutdown()
        self._live.clear()

    # ------------------------------------------------------------ steps

    def step(self) -> list[StepOutput]:
        if self._broken is not None:
            raise RuntimeError(self._broken)
        with _own_generator():
            outputs = self._engine.step()
        return [out for o in outputs if (out := self._take(o)) is not None]

    def _take(self, output: Any) -> StepOutput | None:
        live = self._live.get(int(output.request_id))
        if live is None:
            return None
        ids = live.take(output, self._vocabulary)
        live.versions += [self._version] * len(ids)
        if not output.finished:
            return StepOutput(live.request.id, ids) if len(ids) else None
        del self._live[live.request.id]
        generation = live.generation(live.finish or Finish.ABORTED, self._epochs, self._version)
        return StepOutput(live.request.id, ids, generation)


class _PrefixCache:
    """Looks at vLLM's block pool; reads only, from any thread."""

    def __init__(self, core: Any) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils

        settings = core.vllm_config.cache_config
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._block = int(settings.block_size)
        self._hash = get_hash_fn_by_name(settings.prefix_caching_hash_algo)
        self._chain = kv_cache_utils.hash_block_tokens

    @property
    def total(self) -> int:
        return (int(self._pool.num_gpu_blocks) - 1) * self._block  # one is a placeholder

    @property
    def free(self) -> int:
        return int(self._pool.get_num_free_blocks()) * self._block

    def resident(self, prompt: Ids, version: int) -> int:
        parent, held = None, 0
        while held + self._block < len(prompt):
            extra = None if held else (("cache_salt", salt(version)),)
            parent = self._chain(self._hash, parent, prompt[held : held + self._block].tolist(), extra)
            if self._pool.get_cached_block(parent, [0]) is None:
                break
            held += self._block
        return held


class _own_generator:
    """Inside, the global CPU generator may be drawn from; afterwards it is as before."""

    def __enter__(self) -> None:
        import torch

        self._state = torch.get_rng_state()

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_rng_state(self._state)
