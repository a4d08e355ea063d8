"""Listeners of the HTTP side: one that waits for the whole answer, one that turns deltas into events as they come.

Invariant: events leave in the order in which the session made them, and nothing leaves before the first token or the
first sign of life. Knows no dialect but its event writer.
"""

from __future__ import annotations

import trio
from attrs import define, field

from uniagent.engine.gateway.http import Exchange
from uniagent.engine.gateway.session import GatewaySession
from uniagent.engine.messages import Delta, ModelCall, Problem, Reply
from uniagent.engine.ports import EventWriter


@define(eq=False)
class Asker:
    """A listener that waits for the whole answer."""

    left: bool = False

    def started(self, reply_id: str, prompt_tokens: int) -> None: ...
    def delta(self, delta: Delta) -> None: ...


@define(eq=False)
class Outbox:
    """Events between the session that makes them and the connection that sends them."""

    writer: EventWriter
    left: bool = False
    replies: list[Reply] = field(factory=list)
    problem: Problem | None = None
    _data: list[bytes] = field(factory=list)
    _begun: bool = False
    _done: bool = False
    _news: trio.Event = field(factory=trio.Event)

    def started(self, reply_id: str, prompt_tokens: int) -> None:
        self._data.append(self.writer.start(reply_id, prompt_tokens))
        self._begun = True

    def delta(self, delta: Delta) -> None:
        data = self.writer.delta(delta)
        if data:
            self._data.append(data)
            self._news.set()

    def take(self) -> bytes:
        data = b"".join(self._data)
        self._data.clear()
        return data

    async def fill(self, session: GatewaySession, call: ModelCall) -> None:
        try:
            self.replies = await session.complete(call, listener=self)
        except Problem as problem:
            self.problem = problem
        finally:
            self._done = True
            self._news.set()

    async def pump(self, exchange: Exchange, headers: list[tuple[str, str]], ping_s: float) -> None:
        """Sends what comes, until the answer is made; the closing events are not sent here."""
        while True:
            with trio.move_on_after(ping_s) as quiet:
                await self._news.wait()
            if self._done:
                return
            if not self._begun:
                continue
            self._news = trio.Event()
            if exchange.status is None:
                await exchange.begin(headers=headers)
            await exchange.send(self.take() + (self.writer.ping() if quiet.cancelled_caught else b""))
