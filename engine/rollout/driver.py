"""StepDriver: any synchronous ``StepEngine`` as an ``InferenceEngine``, on the accelerator's thread.

A request is a waiter on the trio loop and an entry in the engine. Invariants: a waiter ends exactly once; cancelling
``generate`` drops its waiter at once and queues an abort; outputs for a request nobody waits for are counted in
``late`` and dropped; ``update`` runs between two steps. Knows nothing of models or versions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

import outcome
import trio
from attrs import define, field

from uniagent.engine.accelerator import Accelerator, AcceleratorError
from uniagent.engine.ports import (
    Capacity,
    Generation,
    Ids,
    KvPolicy,
    OnTokens,
    Sampling,
    SessionId,
    StepEngine,
    StepOutput,
    StepRequest,
    Weights,
)

ABORT_S = 5.0  # how long a cancelled caller waits for what was sampled
Batch: TypeAlias = tuple[list[StepOutput], list[tuple[int, outcome.Outcome[Generation]]]]  # of one step


@define(eq=False)
class _Waiter:
    on_tokens: OnTokens | None
    done: trio.Event = field(factory=trio.Event)
    result: outcome.Outcome[Generation] | None = None

    def end(self, result: outcome.Outcome[Generation]) -> None:
        self.result = result
        self.done.set()


class StepDriver:
    """The engine must not be touched by anything else once it is driven.

    While fewer than ``gather_below`` requests run, each step waits ``gather_s`` for more to join: a step costs nearly
    the same for one request as for many, and a thread that steps all the time keeps the interpreter from those who
    would ask (measured on two cores: half the CPU time, a third of the wall time). 0: never wait.
    """

    def __init__(
        self, accelerator: Accelerator, engine: StepEngine, *, gather_s: float = 0.0, gather_below: int = 0
    ) -> None:
        self.late = 0
        self._gather_s, self._gather_below = gather_s, gather_below
        self._accelerator = accelerator
        self._engine = engine
        self._ids = itertools.count()
        self._waiters: dict[int, _Waiter] = {}
        self._ended: list[tuple[int, outcome.Outcome[Generation]]] = []  # on the thread: refusals and aborts
        accelerator.attach(self)

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
        """See ``InferenceEngine``; ValueError for a prompt the engine refuses, AcceleratorError when it crashed."""
        request = StepRequest(next(self._ids), prompt, sampling, session, stream=on_tokens is not None)
        waiter = self._waiters[request.id] = _Waiter(on_tokens)
        try:
            self._accelerator.post(lambda: self._add(request))
            await waiter.done.wait()
        except trio.Cancelled:
            self._abort(request.id)
            if on_abort is not None:
                waiter.on_tokens = None
                with trio.move_on_after(ABORT_S, shield=True):
                    await waiter.done.wait()
                if isinstance(waiter.result, outcome.Value):
                    on_abort(waiter.result.value)
            raise
        finally:
            self._waiters.pop(request.id, None)
        assert waiter.result is not None
        return waiter.result.unwrap()

    def interrupt(self) -> None:
        """Ends every generation: each returns what was sampled so far, finish ABORTED."""
        for id in tuple(self._waiters):
            self._abort(id)

    async def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        await self._accelerator.run(self._engine.update, weights, version, kv, kind="engine")

    def capacity(self) -> Capacity:
        return self._engine.capacity()

    def resident(self, prompt: Ids) -> int:
        return self._engine.resident(prompt)

    def _abort(self, id: int) -> None:
        if not self._accelerator.ended:
            self._accelerator.post(lambda: self._take_out(id))

    # ------------------------------------------------------------ Worker

    def deliver(self, batch: Batch) -> None:
        outputs, ended = batch
        for output in outputs:
            waiter = self._waiters.get(output.id)
            if waiter is None or waiter.done.is_set():
                self.late += 1
                continue
            self._stream(output, waiter)
            if output.generation is not None and not waiter.done.is_set():
                waiter.end(outcome.Value(output.generation))
        for id, result in ended:
            waiter = self._waiters.get(id)
            if waiter is not None and not waiter.done.is_set():
                waiter.end(result)

    def _stream(self, output: StepOutput, waiter: _Waiter) -> None:
        if waiter.on_tokens is None or not len(output.token_ids):
            return
        said = outcome.capture(waiter.on_tokens, output.token_ids)
        if isinstance(said, outcome.Error):
            waiter.end(said)
        if isinstance(said, outcome.Error) or said.value is True:
            waiter.on_tokens = None
            if output.generation is None:
                self._abort(output.id)

    def fail(self, cause: BaseException | None) -> None:
        for waiter in self._waiters.values():
            if not waiter.done.is_set():
                error = AcceleratorError(
                    "the accelerator was closed" if cause is None else f"the inference engine crashed: {cause}"
                )
                error.__cause__ = cause
                waiter.end(outcome.Error(error))

    def busy(self) -> bool:
        return bool(self._ended) or self._engine.busy()

    def gather_s(self) -> float:
        if not self._gather_s or self._ended:
            return 0.0
        load = self._engine.capacity()
        return self._gather_s if load.running + load.waiting < self._gather_below else 0.0

    def step(self) -> Batch | None:
        outputs = self._engine.step() if self._engine.busy() else []
        ended, self._ended = self._ended, []
        return (outputs, ended) if outputs or ended else None

    def _add(self, request: StepRequest) -> None:
        try:
            self._engine.add(request)
        except ValueError as problem:
            self._ended.append((request.id, outcome.Error(problem)))

    def _take_out(self, id: int) -> None:
        generation = self._engine.abort(id)
        if generation is not None:
            self._ended.append((id, outcome.Value(generation)))
