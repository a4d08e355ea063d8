"""The embedded engine: continuous batching over a Hugging Face causal LM, the learner's own module or a copy.

A ``StepEngine`` with a static K/V cache of ``slots`` requests x ``context`` tokens. Each step is one forward over the
next token of every decoding request and over pieces of prompts, at most ``prefill_tokens`` of them; what starts where
and what is reused is the slot table's business (``slots``), attention that of ``slot_attention``.

Invariants
 - a token depends on its prompt, weights and (seed, session, turn, position) alone, not on the batch (up to rounding of
   the logits); logprobs are those of the distribution drawn from, within 3e-5 of a full fp32 forward;
 - every token carries the version of the weights that made it; K/V of older weights is never reused by a new request;
 - admission is first come, first served; an abort ends a request in any phase;
 - the module's mode, gradients, parameters and attention are as before after every step: a learner may share it.

Sharing: with ``shared`` the learner changes the module in place and ``update(None, …)`` only makes that known, so the
change and the update must happen without a step in between (in one call on the accelerator's thread).
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from uniagent.adapters.engines import fit
from uniagent.adapters.engines.categorical import draw
from uniagent.adapters.engines.requests import check
from uniagent.adapters.engines.sampling import uniforms
from uniagent.adapters.engines.slot_attention import SlotKv
from uniagent.adapters.engines.slots import Rows, Slots
from uniagent.adapters.engines.weights import load
from uniagent.engine import config
from uniagent.engine.errors import UserError, nearest
from uniagent.engine.ports import (
    Capacity,
    Finish,
    Generation,
    Ids,
    KvPolicy,
    StepOutput,
    StepRequest,
    Weights,
)


def build(settings: config.Engine, model: torch.nn.Module, *, shared: bool) -> SlotEngine:
    """The registry's factory. shared: use this module itself; otherwise a copy of it. Raises UserError for a model that
    it cannot serve and for K/V that does not fit."""
    if settings.options:
        raise UserError(f"engine.options {sorted(settings.options)[0]!r} is unknown here: {nearest('', ())}")
    if not shared:
        model = copy.deepcopy(model).requires_grad_(False)
    return SlotEngine(
        model, slots=settings.slots, context=settings.context, prefill_tokens=settings.prefill_tokens, shared=shared
    )


class SlotEngine:
    """A ``StepEngine``."""

    def __init__(self, model: Any, *, slots: int, context: int, prefill_tokens: int, shared: bool) -> None:
        fit.check_config(model, context)
        with _evaluating(model):
            layers = fit.shapes(model)
            fit.check_memory(layers, slots, context, model.dtype, model.device)
            fit.probe(model, layers)
        self._model, self._shared = model, shared
        self._kv = SlotKv(layers, slots, context, model.dtype, model.device)
        self._arguments = {fit.cache_argument(model): self._kv, "attention_mask": fit.mask(model.device)}
        self._table = Slots(slots, context)
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._budget = prefill_tokens
        self._waiting: OrderedDict[int, StepRequest] = OrderedDict()  # first come, first served
        self._slots: dict[int, int] = {}  # of running requests
        self._steps = 0
        self._broken: str | None = None

    # ------------------------------------------------------------ requests

    def add(self, request: StepRequest) -> None:
        check(request, context=self._table.context, vocabulary=self._vocabulary)
        self._waiting[request.id] = request

    def abort(self, id: int) -> Generation | None:
        if id in self._slots:
            return self._table.release(self._slots.pop(id), Finish.ABORTED)
        if self._waiting.pop(id, None) is None:
            return None
        nothing = np.zeros(0, np.int32)
        return Generation(nothing, nothing.astype(np.float32), (), (), Finish.ABORTED, 0)

    def busy(self) -> bool:
        return bool(self._slots or self._waiting)

    def capacity(self) -> Capacity:
        table, running = self._table, len(self._slots)
        total = table.count * table.context
        return Capacity(total, total - running * table.context, running, len(self._waiting), table.context)

    def resident(self, prompt: Ids) -> int:
        return self._table.resident(prompt)

    # ------------------------------------------------------------ weights

    def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        if self._shared != (weights is None):
            raise ValueError(
                "the engine shares the learner's module: update with weights None"
                if self._shared
                else "the engine has its own copy of the model: update with (name, tensor) pairs"
            )
        if weights is not None:
            self._broken = f"the update to version {version} failed half-way: its weights are a mixture"
            load(self._model, weights)
            self._broken = None
        self._table.renew(version, kv)

    def weights(self) -> Weights:
        return self._model.named_parameters(remove_duplicate=False)

    # ------------------------------------------------------------ steps

    def step(self) -> list[StepOutput]:
        """Admission, one forward, one token for every request whose K/V is complete."""
        if self._broken is not None:
            raise RuntimeError(self._broken)
        self._admit()
        table = self._table
        self._steps += 1
        plan = table.plan(self._budget, self._steps)
        if not (plan.pieces or plan.decode.size):
            return []
        self._kv.copy(plan.copies)
        rows, columns = self._kv.lay_out(plan.decode, table.have[plan.decode] + 1, plan.pieces)
        ready = np.flatnonzero(columns + 1 == table.total[rows])
        ids = torch.from_numpy(table.ids[rows, columns]).to(self._model.device, torch.long)
        with _evaluating(self._model):
            logits = self._kv.forward(self._model, self._arguments, ids, torch.from_numpy(ready).to(ids.device))
        table.advance(plan)
        return self._sample(rows[ready], logits) if ready.size else []

    def _admit(self) -> None:
        while self._waiting:
            request = next(iter(self._waiting.values()))
            slot = self._table.admit(request)
            if slot is None:
                return
            del self._waiting[request.id]
            self._slots[request.id] = slot

    def _sample(self, rows: Rows, logits: torch.Tensor) -> list[StepOutput]:
        """A token for each of rows from its logits [B, V]."""
        table = self._table
        positions = (table.total[rows] - table.start[rows]).astype(np.uint64)
        drawn = draw(
            logits, table.temperature[rows], table.top_p[rows], table.top_k[rows], uniforms(table.key[rows], positions)
        )
        if not np.isfinite(drawn.logprobs).all():
            raise RuntimeError(
                f"the logits are not finite under policy version {table.version}: its weights are broken"
            )
        for row, ids in drawn.kept.items():
            live = table.live[rows[row]]
            assert live is not None
            live.kept[int(positions[row])] = ids
        stopped, full = table.append(rows, drawn.tokens, drawn.logprobs)
        return self._outputs(rows, drawn.tokens, stopped, full)

    def _outputs(
        self, rows: Rows, tokens: Ids, stopped: npt.NDArray[np.bool_], full: npt.NDArray[np.bool_]
    ) -> list[StepOutput]:
        outputs = []
        for place, (slot, stop, end) in enumerate(zip(rows.tolist(), stopped.tolist(), full.tolist(), strict=True)):
            live = self._table.live[slot]
            assert live is not None
            generation = None
            if stop or end:
                generation = self._table.release(slot, Finish.STOP if stop else Finish.LENGTH)
                del self._slots[live.request.id]
            if generation is not None or live.request.stream:
                outputs.append(StepOutput(live.request.id, tokens[place : place + 1], generation))
        return outputs


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside; each submodule's own mode afterwards."""
    training = [m for m in model.modules() if m.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
