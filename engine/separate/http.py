"""The head over HTTP, and how nodes reach it: one JSON line a message, weights as safetensors in pieces.

``POST /v1/VERB`` is a message to the desk; ``GET /v1/config`` the run's config as TOML; ``GET /v1/weights`` says which
version there is and its pieces with their sha256, ``GET /v1/weights/VERSION/PIECE`` is one of them. Invariants: nothing
is answered without the token, which is compared in constant time; a client that leaves ends its request. The client
turns whatever may be mended by asking again into ``Unreachable``, and what may not into a UserError.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import httpx
import trio
from attrs import define, field, frozen

from uniagent.engine.errors import UserError
from uniagent.engine.gateway.http import ClientGone, Exchange, HttpServer, Limits
from uniagent.engine.messages import Problem
from uniagent.engine.ports import Json
from uniagent.engine.separate.worker import Unreachable

BODY = 1 << 30  # bytes of a push: a long session with its raw requests
OFFLOAD_BYTES = 1 << 17  # a larger message is parsed off the loop
ANSWER_S = 30.0  # beyond what a message may wait by itself


class Shelf(Protocol):
    """Weights for nodes that fetch them."""

    def manifest(self) -> dict[str, Json]: ...
    def piece(self, version: int, number: int) -> bytes:
        """KeyError when that version is not there any more."""
        ...


@define(eq=False)
class HeadServer:
    """``handle`` is the desk's; ``config`` the TOML that nodes start from; ``shelf`` None: no node may join."""

    handle: Callable[[str, Mapping[str, Json]], Awaitable[dict[str, Json]]]
    token: str = field(repr=False)
    config: str
    shelf: Shelf | None = None
    http: HttpServer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.http = HttpServer(self._exchange, Limits(max_body=BODY))

    async def serve(
        self, host: str, port: int, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Until cancelled; ``started`` with the port. UserError when it is taken."""
        try:
            listeners = await trio.open_tcp_listeners(port, host=host, backlog=1024)
        except OSError as problem:
            raise UserError(
                f"the head cannot listen on {host}:{port}: {problem.strerror or problem}; choose another address with "
                "rollout.head_url (and rollout.bind)"
            ) from problem
        task_status.started(listeners[0].socket.getsockname()[1])
        await self.http.serve(listeners)

    async def _exchange(self, exchange: Exchange) -> None:
        scheme, _, given = exchange.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            await exchange.reply_json(401, {"error": "the token is missing or wrong"})
            return
        with trio.CancelScope() as scope:
            exchange.on_gone(scope.cancel)
            status, answer = await self._answer(exchange)
            exchange.on_gone(None)
            if isinstance(answer, bytes):
                await exchange.reply(status, answer, "application/octet-stream")
            else:
                await exchange.reply(status, json.dumps(answer, separators=(",", ":")).encode() + b"\n")
        if scope.cancelled_caught:
            raise ClientGone

    async def _answer(self, exchange: Exchange) -> tuple[int, Any]:
        parts = exchange.path.strip("/").split("/")
        try:
            if parts[0] != "v1" or len(parts) < 2:
                raise Problem(404, "unknown_path", f"there is nothing at {exchange.path}")
            if exchange.method == "POST":
                large = len(exchange.body) > OFFLOAD_BYTES
                body = await trio.to_thread.run_sync(json.loads, exchange.body) if large else json.loads(exchange.body)
                return 200, await self.handle(parts[1], body)
            if parts[1:] == ["config"]:
                return 200, {"config": self.config}
            if parts[1] == "weights" and self.shelf is None:
                raise Problem(409, "not_joining", "this run takes no joining node: it needs placement.joining = true")
            if parts[1:] == ["weights"] and self.shelf is not None:
                return 200, self.shelf.manifest()
            if parts[1] == "weights" and len(parts) == 4 and self.shelf is not None:
                return 200, self.shelf.piece(int(parts[2]), int(parts[3]))
            raise Problem(404, "unknown_path", f"there is nothing at {exchange.path}")
        except Problem as problem:
            return problem.status, {"error": problem.message}
        except KeyError:
            return 410, {"error": "these weights are gone: there are newer ones"}
        except ValueError as problem:
            return 400, {"error": str(problem)}


@frozen(eq=False)
class HeadClient:
    """A node's way to the head. ``url`` is ``http://HOST:PORT``."""

    url: str
    client: httpx.AsyncClient

    @classmethod
    def to(cls, url: str, token: str) -> HeadClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        headers = {"authorization": f"Bearer {token}"}
        return cls(url, httpx.AsyncClient(base_url=url, headers=headers, limits=limits, trust_env=False))

    async def call(self, verb: str, body: Mapping[str, Json]) -> dict[str, Json]:
        """A message to the desk and its answer."""
        content = json.dumps(body, separators=(",", ":")).encode() + b"\n"
        answer = await self._ask("POST", f"/v1/{verb}", content, body.get("wait_s", 0.0))
        return dict(json.loads(answer))

    async def config(self) -> str:
        return str(json.loads(await self._ask("GET", "/v1/config"))["config"])

    async def manifest(self) -> dict[str, Json]:
        return dict(json.loads(await self._ask("GET", "/v1/weights")))

    async def piece(self, version: int, number: int) -> bytes:
        """KeyError when there are newer weights."""
        return await self._ask("GET", f"/v1/weights/{version}/{number}")

    async def _ask(self, method: str, path: str, content: bytes | None = None, wait_s: float = 0.0) -> bytes:
        try:
            answer = await self.client.request(method, path, content=content, timeout=ANSWER_S + wait_s)
        except httpx.TransportError as problem:
            raise Unreachable(f"{self.url}{path}: {type(problem).__name__}: {problem}") from problem
        if answer.status_code == 200:
            return answer.content
        if answer.status_code == 410:
            raise KeyError(path)
        if answer.status_code >= 500:
            raise Unreachable(f"{self.url}{path}: status {answer.status_code}")
        try:
            why = answer.json()["error"]
        except (ValueError, KeyError, TypeError):
            why = f"status {answer.status_code}"
        raise UserError(f"the head at {self.url} refused {path}: {why}")
