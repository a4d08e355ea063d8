"""One generation of a gateway session: the engine runs, the decoder turns its tokens into text as they come.

Invariants: whatever ends it (a stop string, a client that left, a cancelled caller, the end of the session), the
tokens sampled by then come back with their logprobs, so that the ledger can account for them; only an engine that
does not answer within ``GRACE_S`` of being told to stop loses them, and then ``lost`` counts what was seen.
Knows nothing of trees, dialects or sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import outcome
import trio
from attrs import define, field

from uniagent.engine.messages import Delta
from uniagent.engine.ports import Generation, Ids, InferenceEngine, Sampling

if TYPE_CHECKING:
    from uniagent.engine.gateway.codec import Decoder

GRACE_S = 5.0  # how long an engine may take to end a generation and give back what it sampled


class Listener(Protocol):
    """Who asked, while the answer is being made. All three run on the loop and must not block."""

    def started(self, prompt_tokens: int) -> None:
        """The request is admitted: the engine is called next."""
        ...

    def delta(self, delta: Delta) -> None:
        """A piece of the answer."""
        ...

    def gone(self) -> bool:
        """Whether the asker left, so that nobody reads the answer."""
        ...


@define(eq=False)
class Attempt:
    """``cause`` says why we ended it: ``left`` (the asker is gone), ``aborted`` (we stopped it), None otherwise."""

    decoder: Decoder
    listener: Listener | None
    incremental: bool  # text is needed token by token: it is streamed, or stop strings end it
    choice: int = 0
    cause: str | None = None
    lost: int = 0
    _seen: int = 0
    _scope: trio.CancelScope = field(factory=lambda: trio.CancelScope(shield=True))
    done: trio.Event = field(factory=trio.Event)

    async def run(
        self, engine: InferenceEngine, prompt: Ids, sampling: Sampling, session: str, emit: Callable[[Delta], None]
    ) -> Generation | None:
        """All that was sampled; None when nothing came back. Raises what the engine raises."""

        def on_tokens(ids: Ids) -> bool:
            if self.incremental:
                for delta in self.decoder.feed(ids):
                    emit(delta)
            self._seen += len(ids)
            if self.cause is None and self.listener is not None and self.listener.gone():
                self.cause = "left"
            return self.cause is not None or self.decoder.stopped

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_cancellation)
            with self._scope:
                result = await outcome.acapture(
                    lambda: engine.generate(prompt, sampling, session=session, on_tokens=on_tokens)
                )
            self.done.set()
            nursery.cancel_scope.cancel()
        if isinstance(result, outcome.Error):
            if not isinstance(result.error, trio.Cancelled):
                result.unwrap()
            self.lost = self._seen
            return None
        generation = result.value
        fed = self._seen if self.incremental else 0
        if len(generation.token_ids) > fed:
            for delta in self.decoder.feed(generation.token_ids[fed:]):
                emit(delta)
        return generation

    def end(self, cause: str) -> None:
        """Stop it at the next token; at once when none was sampled yet."""
        if self.cause is None:
            self.cause = cause
        if self._seen == 0:
            self._scope.cancel()
        else:
            self._scope.deadline = min(self._scope.deadline, trio.current_time() + GRACE_S)

    async def _follow_cancellation(self) -> None:
        """The caller's cancellation, which the shield keeps off the engine. It is swallowed here and delivered again
        at the caller's next checkpoint, after what was sampled is committed."""
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            if not self.done.is_set():
                self.end("aborted")
