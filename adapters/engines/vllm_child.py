"""vLLM in a child process: its AsyncLLM, on the asyncio portal, as an ``InferenceEngine``.

For replicas over several devices of one node (tensor, pipeline parallel) and for engines that must not share this
interpreter. Weights go through vLLM's own transfer (``vllm_transfer``). Invariants: the scheduler stands still from
before the first tensor of an update to after the last; a token's version is the label that the child's core had when it
made the step; when the child dies, or gives logprobs that are not finite, every waiter fails at once and the block of
``open_child`` ends with the cause.

What the child holds is seen from here: load and prefixes are those of the requests that went through this object.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import outcome
import trio
from attrs import define, field, frozen

from uniagent.adapters.engines.prefixes import BLOCK, Prefixes
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
from uniagent.engine import config
from uniagent.engine.portal import Portal, open_portal
from uniagent.engine.ports import (
    Capacity,
    Finish,
    Generation,
    Ids,
    KvPolicy,
    OnTokens,
    Sampling,
    SessionId,
    StepRequest,
    Weights,
)

EXTENSION = "uniagent.adapters.engines.vllm_weights.Extension"


class ChildError(RuntimeError):
    """The child process died, or what it computes is no use. The cause is chained."""


@frozen
class ChildFactory:
    """What the node opens: ``factory(settings, folder)`` is ``open_child``."""

    dtype: str
    device: str
    steps: ClassVar[bool] = False
    shares_module: ClassVar[bool] = False
    trains: ClassVar[bool] = True

    def __call__(self, settings: config.Engine, folder: Path) -> AbstractAsyncContextManager[ChildEngine]:
        return open_child(settings, folder, dtype=self.dtype, device=self.device)


@asynccontextmanager
async def open_child(
    settings: config.Engine, folder: Path, *, dtype: str = "auto", device: str = "cpu"
) -> AsyncIterator[ChildEngine]:
    """An engine over the model in ``folder`` while the block lasts. Raises ChildError, and cancels the block, when the
    child fails; UserError when vLLM is missing or an option is unknown."""
    options = read_options(settings, device=device)
    vllm = await trio.to_thread.run_sync(import_vllm)
    from uniagent.adapters.engines import vllm_transfer

    prepare(options, device=device)
    backend = vllm_transfer.backend(options, device=device)
    arguments = engine_arguments(settings, options, str(folder), dtype=dtype, device=device)
    async with open_portal() as portal:
        llm = await portal.call(_start, vllm, arguments, backend)
        engine = ChildEngine(vllm, llm, portal, options, context=settings.context, slots=settings.slots)
        try:
            engine.sender = await trio.to_thread.run_sync(vllm_transfer.sender, llm, portal, backend, options)
            with engine.body:
                yield engine
        finally:
            with trio.CancelScope(shield=True):
                await portal.call(_stop, llm)
            engine.forget()
            del llm
        if engine.crash is not None:
            raise engine.error()


async def _start(vllm: Any, arguments: dict[str, Any], backend: str) -> Any:
    """Takes as long as loading the model; nothing else runs on this thread."""
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        vllm.AsyncEngineArgs(
            **arguments,
            weight_transfer_config=WeightTransferConfig(backend=backend),
            worker_extension_cls=EXTENSION,
            disable_log_stats=True,
        )
    )
    await llm.update_weight_version("0")
    return llm


async def _stop(llm: Any) -> None:
    llm.shutdown()
    if llm.output_handler is not None:
        with suppress(asyncio.CancelledError):
            await llm.output_handler


@define(eq=False)
class _Call:
    """A generation under way; cancelling ``scope`` aborts it."""

    live: Live
    on_tokens: OnTokens | None
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    error: BaseException | None = None  # of on_tokens

    def end(self) -> None:
        """Whatever cancels the caller meanwhile, it gets what was sampled, or the error."""
        self.on_tokens = None
        self.scope.shield = True
        self.scope.cancel()


class ChildEngine:
    """An ``InferenceEngine``. ``crash``: why it can serve nothing more; ``sender``: how weights reach the child."""

    def __init__(self, vllm: Any, llm: Any, portal: Portal, options: Options, *, context: int, slots: int) -> None:
        self.body = trio.CancelScope()
        self.crash: BaseException | None = None
        self.sender: Callable[[Weights, int], None] | None = None
        self._vllm, self._llm, self._portal, self._options = vllm, llm, portal, options
        self._context, self._slots = context, slots
        self._vocabulary = int(llm.model_config.get_vocab_size())
        cache = llm.vllm_config.cache_config
        self._block = int(cache.block_size)
        self._total = (int(cache.num_gpu_blocks) - 1) * self._block  # one is a placeholder
        self._token = trio.lowlevel.current_trio_token()
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._epochs = [0]  # epoch -> policy version
        self._prefixes = Prefixes(self._total)
        self._updating = trio.Lock()

    # ------------------------------------------------------------ InferenceEngine, on the trio loop

    async def generate(
        self,
        prompt: Ids,
        sampling: Sampling,
        *,
        session: SessionId,
        on_tokens: OnTokens | None = None,
        on_abort: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """See ``InferenceEngine``; ChildError when the child is gone."""
        request = StepRequest(next(self._numbers), prompt, sampling, session, stream=on_tokens is not None)
        check(request, context=self._context, vocabulary=self._vocabulary)
        arguments = sampling_arguments(request, self._options, context=self._context, vocabulary=self._vocabulary)
        if self.crash is not None:
            raise self.error()
        call = self._calls[request.id] = _Call(Live(request), on_tokens)
        try:
            with call.scope:
                await self._portal.call(self._run, call, arguments)
        except trio.Cancelled:
            if on_abort is not None and self.crash is None:
                on_abort(self._generation(call, Finish.ABORTED))
            raise
        except (RuntimeError, self._vllm.v1.engine.exceptions.EngineDeadError) as problem:
            self._fail(problem)
        finally:
            del self._calls[request.id]
        if self.crash is not None:
            raise self.error() from self.crash
        if call.error is not None:
            raise call.error
        return self._generation(call, call.live.finish or Finish.ABORTED)

    async def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        """See ``InferenceEngine``. An update that fails half-way ends the engine; once begun it is not cancelled."""
        assert self.sender is not None
        if weights is None:
            raise ValueError("the engine has its own copy of the model: update with (name, tensor) pairs")
        async with self._updating:
            with trio.CancelScope(shield=True):
                try:
                    await self._portal.call(self._pause, kv)
                    await trio.to_thread.run_sync(self.sender, weights, version)
                    await self._portal.call(self._resume, version)
                except BaseException as problem:
                    self._fail(problem)
                    raise
            self._prefixes.clear()

    def capacity(self) -> Capacity:
        lives = [call.live for call in self._calls.values()]
        lengths = [len(live.request.prompt) + len(live.ids) for live in lives if live.ids]
        held = sum(-(-length // self._block) * self._block for length in lengths)
        running = min(self._slots, len(lengths))
        return Capacity(self._total, max(0, self._total - held), running, len(lives) - running, self._context)

    def resident(self, prompt: Ids) -> int:
        whole = BLOCK * len(self._prefixes.believed(prompt))
        return min(whole, (len(prompt) - 1) // self._block * self._block)

    def error(self) -> ChildError:
        error = ChildError(f"the inference engine's child process failed: {self.crash}")
        error.__cause__ = self.crash
        return error

    def forget(self) -> None:
        """vLLM's objects do not outlive the interpreter well."""
        self._llm = self.sender = None

    def _fail(self, problem: BaseException) -> None:
        """Every waiter gets the error itself and not the cancellation of the block."""
        if self.crash is None:
            self.crash = problem
            for call in self._calls.values():
                call.end()
            self.body.cancel()

    def _generation(self, call: _Call, finish: Finish) -> Generation:
        live = call.live
        live.versions += [self._epochs[-1]] * (len(live.ids) - len(live.versions))
        if live.ids:
            self._prefixes.hold(live.computed())
        return live.generation(finish, self._epochs, self._epochs[-1])

    def _heard(self, call: _Call, ids: Ids) -> None:
        """New tokens for ``on_tokens``."""
        if len(call.live.ids) == len(ids):
            self._prefixes.hold(call.live.request.prompt)  # siblings find it now
        if call.on_tokens is None:
            return
        said = outcome.capture(call.on_tokens, ids)
        if isinstance(said, outcome.Error):
            call.error = said.error
        if isinstance(said, outcome.Error) or said.value is True:
            call.end()

    # ------------------------------------------------------------ on the asyncio thread

    async def _run(self, call: _Call, arguments: dict[str, Any]) -> None:
        """From the first step to the last; cancelled, it aborts and takes what was sampled by then."""
        request = call.live.request
        kind = self._vllm.sampling_params.RequestOutputKind.DELTA
        adding = asyncio.ensure_future(
            self._llm.add_request(
                str(request.id),
                self._vllm.TokensPrompt(prompt_token_ids=request.prompt.tolist(), cache_salt=salt(self._epochs[-1])),
                self._vllm.SamplingParams(**arguments, output_kind=kind),
            )
        )
        try:
            queue = await asyncio.shield(adding)
        except asyncio.CancelledError:  # half-added it could not be aborted
            await self._llm.abort((await adding).request_id, internal=True)
            raise
        try:
            while not self._take(call, queue.get_nowait() or await queue.get()):
                continue
        except asyncio.CancelledError:
            if (said := queue.get_nowait()) is None or not self._take(call, said):
                await self._llm.abort(queue.request_id, internal=True)
                if (said := queue.get_nowait()) is not None:
                    self._take(call, said)
            raise
        finally:
            queue.close()

    def _take(self, call: _Call, output: Any) -> bool:
        """Whether it was the last."""
        first = not call.live.ids
        ids = call.live.take(output, self._vocabulary)
        if output.finished:
            call.live.versions = [
                int(span.version)
                for span in output.outputs[0].weight_versions or ()
                for _ in range(span.start, span.end)
            ]
        if len(ids) and (first or call.on_tokens is not None):
            self._token.run_sync_soon(self._heard, call, ids)
        return bool(output.finished)

    async def _pause(self, kv: KvPolicy) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=kv is KvPolicy.RECOMPUTE)

    async def _resume(self, version: int) -> None:
        self._epochs.append(version)
        await self._llm.resume_generation()
