"""vLLM's scheduler, which also notes in which epoch each token's K/V was written; named in ``scheduler_cls``.

An epoch lasts from one resumption after a pause to the next, so that whoever updates weights between the two knows the
policy version of each. Every output carries the spans of its request as ``kv_transfer_params``, a field that an engine
without K/V transfer leaves empty: it also reaches a driver in another process. Invariants: a request that goes on over
K/V of an earlier epoch never takes K/V from the prefix cache again (what it finds there may be older than its spans
would say); what a request finds in the prefix cache otherwise was written in the current epoch, since an update either
clears the cache or changes the salt of new requests.

Runs in the engine's process; knows no weights and no versions.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from uniagent.adapters.engines.vllm_requests import SPANS, written


class VersionedScheduler(Scheduler):  # type: ignore[misc]
    """``wrote``: request -> [epoch, end] runs over the tokens whose K/V it has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = 0
        self.wrote: dict[str, list[list[int]]] = {}
        self._cleared = False

    def set_pause_state(self, pause_state: PauseState) -> None:
        if pause_state is PauseState.UNPAUSED and self.pause_state is not PauseState.UNPAUSED:
            self.epoch += 1
            if not self._cleared:
                for request in self.requests.values():
                    request.skip_reading_prefix_cache = True
            self._cleared = False
        super().set_pause_state(pause_state)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._cleared = bool(super().reset_prefix_cache(*args, **kwargs))
        return self._cleared

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        for name, count in scheduler_output.num_scheduled_tokens.items():
            if (request := self.requests.get(name)) is not None:
                computed = request.num_computed_tokens
                self.wrote[name] = written(self.wrote.get(name, []), computed - count, computed, self.epoch)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for batch in outputs.values():
            for output in batch.outputs:
                output.kv_transfer_params = {SPANS: [list(run) for run in self.wrote.get(output.request_id, [])]}
        for name in [name for name in self.wrote if name not in self.requests]:
            del self.wrote[name]
        return outputs

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.wrote.pop(request.request_id, None)
