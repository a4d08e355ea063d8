"""One generation of a gateway session: the engine runs, the decoder turns its tokens into text as they come.

Invariant: whatever ends it (a stop string, a client that left, a cancelled caller, the end of the session), the tokens
sampled by then come back with their logprobs, so that the ledger accounts for them. Knows nothing of trees, dialects
or sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import trio
from attrs import define, field

from uniagent.engine.messages import Delta
from uniagent.engine.ports import Generation, Ids, InferenceEngine, Sampling

if TYPE_CHECKING:
    from uniagent.engine.gateway.decoder import Decoder


class Listener(Protocol):
    """Who asked, while the answer is being made. Both methods run on the loop and must not block. ``left``: nobody
    listens any more."""

    left: bool

    def started(self, reply_id: str, prompt_tokens: int) -> None:
        """The request is admitted: the engine is called next. ``reply_id`` is the first reply's."""
        ...

    def delta(self, delta: Delta) -> None:
        """A piece of the answer."""
        ...


@define(eq=False)
class Attempt:
    """``cause`` says why we ended it: ``left`` (the asker is gone), ``aborted`` (we stopped it), None otherwise.
    ``incremental``: its text is needed token by token, because it is streamed or because a stop string may end it."""

    decoder: Decoder
    listener: Listener | None
    incremental: bool
    cause: str | None = None
    done: trio.Event = field(factory=trio.Event)
    text_ends: list[int] = field(factory=list)  # characters of text that were out with each token
    call_ends: list[int] = field(factory=list)  # tokens after which each call was out
    _text: int = 0
    _partial: Generation | None = None
    _scope: trio.CancelScope = field(factory=trio.CancelScope)

    async def run(
        self, engine: InferenceEngine, prompt: Ids, sampling: Sampling, session: str, emit: Callable[[Delta], None]
    ) -> Generation | None:
        """All that was sampled; None when it was ended and nothing came back. Raises what the engine raises. When the
        caller was cancelled this is swallowed here, and delivered again at its next checkpoint."""

        def on_tokens(ids: Ids) -> bool:
            self._feed(ids, emit)
            return self.decoder.stopped

        generation: Generation | None = None
        try:
            with self._scope:
                generation = await engine.generate(
                    prompt,
                    sampling,
                    session=session,
                    on_tokens=on_tokens if self.incremental else None,
                    on_abort=self._keep,
                )
        except trio.Cancelled:
            self.cause = self.cause or "aborted"
            if self._partial is None:
                raise
        finally:
            self.done.set()
        generation = generation or self._partial
        if generation is not None and len(generation.token_ids) > len(self.text_ends):
            self._feed(generation.token_ids[len(self.text_ends) :], emit)
        return generation

    def end(self, cause: str) -> None:
        """Stop it now."""
        self.cause = self.cause or cause
        self._scope.cancel()

    def _keep(self, generation: Generation) -> None:
        self._partial = generation

    def _feed(self, ids: Ids, emit: Callable[[Delta], None]) -> None:
        if not self.incremental:
            for delta in self.decoder.feed(ids):
                emit(delta)
            return
        for i in range(len(ids)):
            for delta in self.decoder.feed(ids[i : i + 1]):
                self._text += len(delta.text)
                if delta.call_name is not None:
                    self.call_ends.append(len(self.text_ends) + 1)
                emit(delta)
            self.text_ends.append(self._text)
