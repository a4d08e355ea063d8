"""HTTP/1.1 over a trio stream, one side of it: h11 speaks, this moves bytes, piece by piece and never a whole body.

Knows no policy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

import h11
import trio
from attrs import define, field

from uniagent.engine.egress.rules import Headers

RECEIVE = 1 << 16
LINGER_S = 2.0
MAX_HEAD = 1 << 16
HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
              b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings"}  # fmt: skip


class Broken(Exception):
    """The other side left, was too slow, or does not speak HTTP/1.1."""


LOST = (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


@define(eq=False)
class Wire:
    """``idle_s``: between two pieces of a message."""

    stream: trio.abc.Stream
    http: h11.Connection
    idle_s: float
    _closed: bool = field(default=False)

    @classmethod
    def server(cls, stream: trio.abc.Stream, idle_s: float) -> Wire:
        return cls(stream, h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD), idle_s)

    @classmethod
    def client(cls, stream: trio.abc.Stream, idle_s: float) -> Wire:
        return cls(stream, h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD), idle_s)

    async def event(self, *, within_s: float | None = None) -> h11.Event | None:
        """The next event; None: nothing more will come on this connection. Raises Broken."""
        try:
            while True:
                event = self.http.next_event()
                if isinstance(event, h11.Event):
                    return event
                if event is not h11.NEED_DATA:
                    return None
                if self.http.they_are_waiting_for_100_continue:
                    await self.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
                with trio.fail_after(within_s or self.idle_s):
                    data = await self.stream.receive_some(RECEIVE)
                self.http.receive_data(bytes(data))
        except (
            h11.RemoteProtocolError,
            trio.BrokenResourceError,
            trio.ClosedResourceError,
            trio.TooSlowError,
        ) as problem:
            raise Broken(str(problem) or type(problem).__name__) from problem

    async def send(self, event: h11.Event) -> None:
        """Raises Broken."""
        try:
            data = self.http.send(event)
            if data:
                with trio.fail_after(self.idle_s):
                    await self.stream.send_all(data)
        except (
            h11.LocalProtocolError,
            trio.BrokenResourceError,
            trio.ClosedResourceError,
            trio.TooSlowError,
        ) as problem:
            raise Broken(str(problem) or type(problem).__name__) from problem

    async def body(self) -> AsyncIterator[bytes]:
        """The pieces of the message that is being received. Raises Broken."""
        while True:
            event = await self.event()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise Broken("the message was cut off")

    async def answer(self, status: int, text: str, headers: Iterable[tuple[str, str]] = ()) -> None:
        """A whole short answer, after which the connection ends. Raises Broken."""
        data = text.encode()
        fields = [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(data))),
                  ("connection", "close"), *headers]  # fmt: skip
        await self.send(h11.Response(status_code=status, headers=fields))
        await self.send(h11.Data(data=data))
        await self.send(h11.EndOfMessage())
        with trio.move_on_after(LINGER_S), suppress(Broken):  # closing under what is still sent would cost the answer
            while isinstance(await self.event(), h11.Data):
                pass

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await trio.aclose_forcefully(self.stream)


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Without what concerns one connection only, and without what ``Connection`` names."""
    named = {
        word.strip().lower() for name, value in headers if name.lower() == b"connection" for word in value.split(b",")
    }
    return [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP | named]
