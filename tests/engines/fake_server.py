"""An inference server on loopback: streamed ``/v1/completions`` with token ids, and faults on demand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from attrs import define, field

ANSWER = [(7 * n + 1) % 150 for n in range(80)]


@define(eq=False)
class FakeServer:
    """Every answer is ANSWER. ``faults`` are used up one a request: a status, or ``("break", n)``: the connection is
    closed after n tokens; or ``"unfinished"``: it is closed after the last token, before it was told to be the last.
    ``hold``: answers wait for it after their first token."""

    key: str = ""
    ids: bool = True  # gives token ids
    raw: bool = False  # logprobs of the model, not of what was sampled from
    cached: int | None = None  # tells so many cached tokens
    context: int = 96
    faults: list[Any] = field(factory=list)
    hold: trio.Event | None = None
    url: str = ""
    bodies: list[dict[str, Any]] = field(factory=list)  # of all completions asked for
    most: int = 0  # answered at once
    left: int = 0  # clients that closed before the end
    _running: int = 0

    async def connection(self, stream: trio.SocketStream) -> None:
        data = b""
        while True:
            while b"\r\n\r\n" not in data:
                if not (more := await stream.receive_some()):
                    return
                data += more
            head, data = data.split(b"\r\n\r\n", 1)
            lines = head.decode().split("\r\n")
            fields = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines[1:])}
            length = int(fields.get("content-length", 0))
            while len(data) < length:
                data += await stream.receive_some()
            body, data = data[:length], data[length:]
            self._running += 1
            self.most = max(self.most, self._running)
            try:
                await self._answer(stream, lines[0].split(" ")[1], fields, body)
            except _Break:
                return
            except trio.BrokenResourceError:
                self.left += 1
                return
            finally:
                self._running -= 1

    async def _answer(self, stream: trio.SocketStream, path: str, fields: dict[str, str], body: bytes) -> None:
        if self.key and fields.get("authorization") != f"Bearer {self.key}":
            return await _reply(stream, 401, {"error": {"message": "who are you"}})
        if path == "/v1/models":
            return await _reply(stream, 200, {"data": [{"id": "fake", "max_model_len": self.context}]})
        asked = json.loads(body)
        self.bodies.append(asked)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return await _reply(stream, fault, {"error": {"message": f"fault {fault}"}})
        await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for n in range(asked["max_tokens"]):
            if isinstance(fault, tuple) and n == fault[1]:
                raise _Break
            token = ANSWER[n % len(ANSWER)]
            stops = token in asked["stop_token_ids"]
            finish = "stop" if stops else "length" if n + 1 == asked["max_tokens"] else None
            told = None if fault == "unfinished" else finish
            await _event(stream, {"choices": [self._choice(token, asked, told)]})
            if finish and not told:
                raise _Break
            if finish:
                break
            if self.hold is not None:
                await self._wait(stream)
        usage: dict[str, Any] = {"prompt_tokens": len(asked["prompt"])}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        await _event(stream, {"choices": [], "usage": usage})
        await _chunk(stream, b"data: [DONE]\n\n")
        await _chunk(stream, b"")

    def _choice(self, token: int, asked: dict[str, Any], finish: str | None) -> dict[str, Any]:
        sure = asked["top_k"] == 1 and not self.raw
        choice: dict[str, Any] = {"text": "", "finish_reason": finish}
        choice["logprobs"] = {"token_logprobs": [0.0 if sure else -0.5]}
        return {**choice, "token_ids": [token]} if self.ids else choice

    async def _wait(self, stream: trio.SocketStream) -> None:
        """For ``hold``; BrokenResourceError when the client goes away."""
        assert self.hold is not None
        hold = self.hold
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                try:
                    more = await stream.receive_some()
                except trio.BrokenResourceError:
                    more = b""
                assert not more
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await hold.wait()
            nursery.cancel_scope.cancel()
        if not hold.is_set():
            raise trio.BrokenResourceError("the client left")


class _Break(Exception):
    """The connection breaks."""


async def _event(stream: trio.SocketStream, said: dict[str, Any]) -> None:
    await _chunk(stream, f"data: {json.dumps(said)}\n\n".encode())


async def _chunk(stream: trio.SocketStream, data: bytes) -> None:
    await stream.send_all(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def _reply(stream: trio.SocketStream, status: int, said: dict[str, Any]) -> None:
    data = json.dumps(said).encode()
    await stream.send_all(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[FakeServer]:
    """It listens on loopback inside the block; ``server.url`` is where."""

    async def connection(stream: trio.SocketStream) -> None:
        async with stream:
            await server.connection(stream)

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        server.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.start_soon(trio.serve_listeners, connection, [listener])
        try:
            yield server
        finally:
            nursery.cancel_scope.cancel()
