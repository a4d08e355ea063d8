"""HTTP/1.1 on trio streams: h11 speaks the protocol, this module moves the bytes.

Each connection is one handler task and one reader task; the reader notices a client that leaves while its answer is
being made. Invariants: a request's body is within its limit before a handler sees it; one answer a request; an
answer counts as written only when its last byte was handed to the kernel and the client was still there. Limits: head
size and time, body size and the time between two of its pieces, idle time, time to take an answer. Knows no routes.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

import h11
import trio
from attrs import define, field, frozen

from uniagent.engine.ports import Json

HIGH_WATER = 1 << 20  # unread input beyond which a connection stops reading
RECEIVE = 1 << 16
MAX_HEAD = 1 << 16
DRAIN_POLL_S = 0.05
LINGER_S = 2.0
log = logging.getLogger("uniagent.gateway")
JSON_TYPE = "application/json"
EVENT_TYPE = "text/event-stream; charset=utf-8"


@frozen
class Limits:
    max_body: int = 64 << 20  # bytes
    header_timeout_s: float = 10.0  # for a whole head, and between two pieces of a body
    idle_timeout_s: float = 600.0  # between two requests
    write_timeout_s: float = 60.0  # for a client to take the next piece of an answer


class ClientGone(Exception):
    """The client left, or did not take its answer in time."""


class BadRequest(Exception):
    """A request that ends its connection: status and what to say."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@define(eq=False)
class Exchange:
    """One request and the way to answer it. ``path`` is without the query; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    connection: Connection = field(repr=False)
    status: int | None = None  # of the answer, once it is begun

    @property
    def gone(self) -> bool:
        """Whether the client left."""
        return self.connection.ended

    def on_gone(self, then: Callable[[], None] | None) -> None:
        """What to do when the client leaves; at once when it has."""
        self.connection.when_ended = then
        if then is not None and self.gone:
            then()

    async def reply(
        self, status: int, body: bytes, content_type: str = JSON_TYPE, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        """The whole answer; ClientGone when it could not be written."""
        self.status = status
        await self.connection.answer(status, body, content_type, headers, head_only=self.method == "HEAD")

    async def reply_json(self, status: int, value: Json, headers: Sequence[tuple[str, str]] = ()) -> None:
        await self.reply(status, json.dumps(value, separators=(",", ":")).encode(), headers=headers)

    async def begin(self, content_type: str = EVENT_TYPE, headers: Sequence[tuple[str, str]] = ()) -> None:
        """The head of a streamed answer; ``send`` and ``end`` follow."""
        self.status = 200
        await self.connection.begin(content_type, headers)

    async def send(self, data: bytes) -> None:
        await self.connection.send(h11.Data(data=data))

    async def end(self, data: bytes = b"") -> None:
        """The last bytes of a streamed answer."""
        await self.connection.end(data)


Handler = Callable[[Exchange], Awaitable[None]]


@define(eq=False)
class Connection:
    stream: trio.SocketStream
    limits: Limits
    handler: Handler
    draining: Callable[[], bool]
    ended: bool = False
    when_ended: Callable[[], None] | None = None
    idle: bool = True
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    _http: h11.Connection = field(factory=lambda: h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD))
    _input: deque[bytes] = field(factory=deque)
    _unread: int = 0
    _news: trio.Event = field(factory=trio.Event)
    _room: trio.Event | None = None

    async def serve(self) -> None:
        """Until the client leaves, a limit is passed, or the server drains."""
        with self.scope:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read)
                    await self._requests()
                    nursery.cancel_scope.cancel()
            finally:
                await trio.aclose_forcefully(self.stream)

    # ------------------------------------------------------------ input

    async def _read(self) -> None:
        try:
            while data := await self.stream.receive_some(RECEIVE):
                self._input.append(data)
                self._unread += len(data)
                self._news.set()
                if self._unread > HIGH_WATER:
                    self._room = trio.Event()
                    await self._room.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.ended = True
        self._news.set()
        if self.when_ended is not None:
            self.when_ended()

    async def _receive(self, deadline: float) -> bool:
        """Feeds h11 with what came; False at the deadline."""
        if not self._input and not self.ended:
            self._news = trio.Event()
            with trio.move_on_at(deadline) as limit:
                await self._news.wait()
            if limit.cancelled_caught:
                return False
        if self._input:
            data = self._input.popleft()
            self._unread -= len(data)
            if self._room is not None and self._unread <= HIGH_WATER:
                self._room.set()
                self._room = None
            self._http.receive_data(data)
        elif self.ended:
            self._http.receive_data(b"")
        return True

    # ------------------------------------------------------------ requests

    async def _requests(self) -> None:
        try:
            while exchange := await self._next():
                self.idle = False
                await self.handler(exchange)
                self.when_ended = None
                if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE or self.draining():
                    break
                self._http.start_next_cycle()
                self.idle = True
        except ClientGone:
            return
        except BadRequest as problem:
            await self._refuse(problem.status, problem.message)
        except h11.RemoteProtocolError as problem:
            await self._refuse(problem.error_status_hint, f"this is not HTTP/1.1 as the server knows it: {problem}")

    async def _refuse(self, status: int, message: str) -> None:
        error = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": "bad_http"}}
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            try:
                await self.answer(status, json.dumps(error).encode(), JSON_TYPE, [("connection", "close")])
                await self._linger()
            except ClientGone:
                return

    async def _linger(self) -> None:
        """Takes what the client still sends, for a while: closing under it would cost it the answer."""
        try:
            await self.stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        with trio.move_on_after(LINGER_S):
            while not self.ended:
                self._input.clear()
                self._unread = 0
                if self._room is not None:
                    self._room.set()
                    self._room = None
                self._news = trio.Event()
                await self._news.wait()

    async def _next(self) -> Exchange | None:
        """The next whole request; None when the client is done."""
        head = await self._head()
        if head is None:
            return None
        headers: dict[str, str] = {}
        for name, value in head.headers:
            headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        body = await self._body(headers)
        target = head.target.decode("latin-1")
        return Exchange(head.method.decode("latin-1"), target.partition("?")[0], headers, body, self)

    async def _head(self) -> h11.Request | None:
        deadline, begun = trio.current_time() + self.limits.idle_timeout_s, False
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None  # ConnectionClosed
            if not begun and (self._input or self._http.trailing_data[0]):
                begun = True
                deadline = trio.current_time() + self.limits.header_timeout_s
            if not await self._receive(deadline):
                if not begun:
                    return None
                raise BadRequest(408, f"no complete request head within {self.limits.header_timeout_s:g} s")

    async def _body(self, headers: Mapping[str, str]) -> bytes:
        most = self.limits.max_body
        size = headers.get("content-length", "0")
        if int(size) > most:  # h11 has checked that it is a number
            raise BadRequest(413, _too_large(most))
        pieces: list[bytes] = []
        length = 0
        while True:
            if self._http.they_are_waiting_for_100_continue:
                go_on = self._http.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
                await self._write(go_on or b"")
            event = self._http.next_event()
            if isinstance(event, h11.Data):
                length += len(event.data)
                if length > most:
                    raise BadRequest(413, _too_large(most))
                pieces.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return b"".join(pieces)
            elif event is h11.NEED_DATA:
                if not await self._receive(trio.current_time() + self.limits.header_timeout_s):
                    raise BadRequest(408, f"no piece of the body within {self.limits.header_timeout_s:g} s")
            else:
                raise ClientGone

    # ------------------------------------------------------------ answers

    async def answer(
        self, status: int, body: bytes, content_type: str, headers: Sequence[tuple[str, str]], head_only: bool = False
    ) -> None:
        fields = [("content-type", content_type), ("content-length", str(len(body))), *headers, *self._closing()]
        out = self._http.send(h11.Response(status_code=status, headers=fields)) or b""
        if body and not head_only:
            out += self._http.send(h11.Data(data=body)) or b""
        out += self._http.send(h11.EndOfMessage()) or b""
        await self._write(out)

    async def begin(self, content_type: str, headers: Sequence[tuple[str, str]]) -> None:
        fields = [("content-type", content_type), ("cache-control", "no-cache"), *headers, *self._closing()]
        await self.send(h11.Response(status_code=200, headers=fields))

    async def send(self, event: h11.Response | h11.Data) -> None:
        await self._write(self._http.send(event) or b"")

    async def end(self, data: bytes) -> None:
        out = (self._http.send(h11.Data(data=data)) or b"") if data else b""
        await self._write(out + (self._http.send(h11.EndOfMessage()) or b""))

    def _closing(self) -> Sequence[tuple[str, str]]:
        return [("connection", "close")] if self.draining() else []

    async def _write(self, data: bytes) -> None:
        """ClientGone unless the kernel took all of it while the client was there."""
        try:
            sent = os.write(self.stream.socket.fileno(), data)  # most answers fit at once: no scope, no checkpoint
        except BlockingIOError:
            sent = 0
        except OSError as problem:
            raise ClientGone from problem
        if sent < len(data):
            try:
                with trio.fail_after(self.limits.write_timeout_s):
                    await self.stream.send_all(data[sent:])
            except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError) as problem:
                raise ClientGone from problem
        if self.ended:
            raise ClientGone


def _too_large(most: int) -> str:
    return f"the body is larger than {most} bytes: shorten the conversation, or raise gateway.max_body_mib"


@define(eq=False)
class HttpServer:
    """Accepts connections and keeps count of them."""

    handler: Handler
    limits: Limits = field(factory=Limits)
    connections: set[Connection] = field(factory=set)
    draining: bool = False
    _accepting: set[trio.CancelScope] = field(factory=set)

    async def serve(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Runs until cancelled, or until a drain has ended the last connection. May run several times at once, each
        with listeners of its own."""
        async with trio.open_nursery() as connections:
            with trio.CancelScope() as accepting:
                self._accepting.add(accepting)
                try:
                    await trio.serve_listeners(self._one, list(listeners), handler_nursery=connections)
                finally:
                    self._accepting.discard(accepting)

    async def _one(self, stream: trio.SocketStream) -> None:
        connection = Connection(stream, self.limits, self.handler, lambda: self.draining)
        self.connections.add(connection)
        try:
            await connection.serve()
        except Exception:  # one connection's trouble is not the others'
            log.exception("a connection failed")
        finally:
            self.connections.discard(connection)

    async def drain(self, within_s: float = math.inf) -> None:
        """Accepts no more; closes idle connections at once, each other one after its answer, and those that are left
        when the time is over by force."""
        self.draining = True
        for accepting in self._accepting:
            accepting.cancel()
        with trio.move_on_after(within_s):
            while self.connections:
                for connection in self.connections:
                    if connection.idle:
                        connection.scope.cancel()
                await trio.sleep(DRAIN_POLL_S)
        for connection in self.connections:
            connection.scope.cancel()
