"""Faults between a harness and the gateway: refusals and broken connections, on a chosen request of a conversation."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import trio
from attrs import define, fields

from uniagent.engine.gateway.http import ClientGone, Exchange
from uniagent.engine.gateway.server import GatewayServer
from uniagent.engine.messages import Problem

Fault = Callable[[Exchange, GatewayServer], Awaitable[None]]


def strike(server: GatewayServer, nth: int, fault: Fault) -> list[bytes]:
    """From now on the nth request with tools meets the fault; the bodies of all of them, as they come."""
    bodies: list[bytes] = []

    async def handle(exchange: Exchange) -> None:
        if exchange.method == "POST" and json.loads(exchange.body).get("tools"):
            bodies.append(exchange.body)
            if len(bodies) == nth:
                return await fault(exchange, server)
        await server.handle(exchange)

    server.http.handler = handle
    return bodies


async def overloaded(exchange: Exchange, server: GatewayServer) -> None:
    """529, as an API under load says it."""
    dialect = server._target(exchange.path).dialect
    status, body = dialect.error(Problem(529, "overloaded_error", "Overloaded"))
    await exchange.reply_json(status, body)


def cut(after: int) -> Fault:
    """The connection breaks after so many bytes of a streamed answer, and before the first byte of a whole one. Bytes,
    not pieces: how much goes out in one piece depends on how fast the client reads, and a harness that got a whole
    call may run it."""

    async def fault(exchange: Exchange, server: GatewayServer) -> None:
        values = {f.name.lstrip("_"): getattr(exchange, f.name) for f in fields(Exchange) if f.init}
        await server.handle(Cutting(**values, left=after))

    return fault


@define(eq=False)
class Cutting(Exchange):
    """An exchange whose client is lost on the way."""

    left: int = 0  # bytes

    async def send(self, data: bytes) -> None:
        if data[: self.left]:
            await Exchange.send(self, data[: self.left])
        self.left -= len(data)
        if self.left < 0:
            await self._break()

    async def end(self, data: bytes = b"") -> None:
        if data[: self.left]:
            await Exchange.send(self, data[: self.left])
        await self._break()

    async def reply(self, *_: object, **__: object) -> None:
        await self._break()

    async def _break(self) -> None:
        await trio.aclose_forcefully(self.connection.stream)
        await trio.sleep(0)
        raise ClientGone
