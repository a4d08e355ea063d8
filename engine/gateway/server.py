"""The gateway over HTTP: which request goes to which session and dialect, and how answers are streamed.

Sessions are found by path (``/s/TOKEN/v1/…``, ``/sessions/ID/v1/…`` with their key) or by API key alone
(``/v1/…``). Invariants: a request that is refused changes no session, and is told so in its dialect's own error shape;
a reply is delivered when its last byte was written, not before; a client that leaves ends its generations at once.
Knows dialects only by their port.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import trio
from attrs import define, field, frozen

from uniagent.engine import config
from uniagent.engine.gateway import admin, metrics
from uniagent.engine.gateway.http import ClientGone, Exchange, HttpServer, Limits
from uniagent.engine.gateway.lane import Lane
from uniagent.engine.gateway.outbox import Asker, Outbox
from uniagent.engine.gateway.session import GatewaySession
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.gateway.wire import Bodies, Match
from uniagent.engine.messages import ModelCall, Problem, Reply
from uniagent.engine.ports import Dialect, SessionSampling
from uniagent.engine.registry import load as registered

OFFLOAD_BYTES = 1 << 17  # a body with more new bytes than this is parsed off the loop
PING_S = 15.0  # between signs of life while a streamed answer has no news
ROUTES = {"/chat/completions": "chat", "/responses": "responses", "/messages": "anthropic"}
COUNT_ROUTE = "/messages/count_tokens"
log = logging.getLogger("uniagent.gateway")


@define(eq=False)
class Wire:
    """What the requests of one session in one dialect have in common."""

    dialect: Dialect
    bodies: Bodies = field(factory=Bodies)
    memo: Any = field(init=False)
    lock: trio.Lock = field(factory=trio.Lock)

    def __attrs_post_init__(self) -> None:
        self.memo = self.dialect.memo()

    def parse(self, body: bytes, match: Match | None = None) -> ModelCall:
        return self.dialect.parse(self.bodies.read(body, self.dialect.items, match), self.memo)


@frozen
class Target:
    """Where a request goes: ``route`` is the path behind the session's base URL, without ``/v1``."""

    route: str
    dialect: Dialect
    session_id: str | None = None  # in the path
    token: str | None = None  # in the path


@define(eq=False)
class GatewayServer:
    """Handles exchanges. ``admin_token`` None: the sessions API is closed, sessions are opened in this process."""

    gateway: Gateway
    dialects: Mapping[str, Dialect]
    admin_token: str | None = None
    sampling: SessionSampling = field(factory=SessionSampling)  # of sessions that do not say
    limits: Limits = field(factory=Limits)
    ping_s: float = PING_S
    metrics: metrics.Metrics = field(factory=metrics.Metrics)
    lane: Lane = field(factory=Lane)
    http: HttpServer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.http = HttpServer(self.handle, self.limits)
        self.gateway.on_export = self.metrics.exported

    async def handle(self, exchange: Exchange) -> None:
        """One request, answered whatever is wrong with it."""
        await self.lane.turn()
        target = self._target(exchange.path)
        try:
            try:
                await self._route(exchange, target)
            except RecursionError:
                await self._refuse(
                    exchange, target.dialect, Problem(400, "invalid_json", "the JSON is nested too deeply")
                )
            except Problem as problem:
                await self._refuse(exchange, target.dialect, problem)
            except ClientGone:
                raise
            except Exception:
                log.exception("%s %s failed", exchange.method, exchange.path)
                if exchange.status is not None:
                    raise ClientGone from None  # half an answer is out: only closing the connection tells
                await self._refuse(
                    exchange, target.dialect, Problem(500, "internal", "the gateway failed: see its log")
                )
        except ClientGone:
            self.metrics.add("disconnects_total", route=self._label(target))
            raise
        self.metrics.add("requests_total", route=self._label(target), status=str(exchange.status))

    async def _refuse(self, exchange: Exchange, dialect: Dialect, problem: Problem) -> None:
        status, body = dialect.error(problem)
        headers = [("allow", "GET, HEAD, POST, DELETE")] if status == 405 else []
        await exchange.reply_json(status, body, headers)

    def _label(self, target: Target) -> str:
        known = target.route in ROUTES or target.route in (COUNT_ROUTE, "/models", "/healthz", "/metrics", "/sessions")
        return target.route if known else "/sessions/ID" if target.session_id else "other"

    # ------------------------------------------------------------ routes

    def _target(self, path: str) -> Target:
        """Never fails: what a path means before anyone asks whether it exists."""
        session_id = token = None
        rest = path.rstrip("/")
        if rest.startswith("/s/"):
            token, _, rest = rest[3:].partition("/")
            rest = "/" + rest if rest else ""
        elif rest.startswith("/sessions/"):
            session_id, slash, rest = rest[len("/sessions/") :].partition("/")
            session_id, rest = unquote(session_id), slash + rest
        while rest.startswith("/v1/") or rest == "/v1":
            rest = rest[3:]
        name = ROUTES.get(rest, "anthropic" if rest == COUNT_ROUTE else "chat")
        return Target(rest, self.dialects.get(name) or next(iter(self.dialects.values())), session_id, token)

    async def _route(self, exchange: Exchange, target: Target) -> None:
        method, route = exchange.method, target.route
        if method == "HEAD" or (method == "GET" and route == "" and target.session_id is None):
            await exchange.reply(200, b"")
        elif route in ROUTES or route == COUNT_ROUTE:
            _only(method, "POST")
            session = self._session(exchange, target)
            if route == COUNT_ROUTE:
                await self._count(exchange, session, target.dialect)
            else:
                await self._complete(exchange, session, target.dialect)
        elif route == "/models" or route.startswith("/models/"):
            _only(method, "GET")
            self._session(exchange, target)
            await exchange.reply_json(200, self._models(route.removeprefix("/models").strip("/")))
        elif target.session_id is not None:
            await self._manage(exchange, target.session_id, route)
        elif route == "/sessions":
            _only(method, "POST")
            self._check_admin(exchange)
            await exchange.reply_json(200, admin.open_session(self.gateway, exchange.body, self.sampling))
        elif route == "/healthz":
            state = "draining" if self.http.draining else "ok"
            await exchange.reply_json(200, {"status": state, "sessions": len(self.gateway)})
        elif route == "/metrics":
            text = self.metrics.text(self.gateway, len(self.http.connections))
            await exchange.reply(200, text.encode(), metrics.CONTENT_TYPE)
        else:
            raise Problem(
                404,
                "unknown_path",
                f"there is nothing at {exchange.path}: a base URL ends before /v1, which is followed by "
                "chat/completions, responses, messages, messages/count_tokens or models",
            )

    async def _manage(self, exchange: Exchange, session_id: str, action: str) -> None:
        self._check_admin(exchange)
        session, gateway, method = self.gateway.get(session_id), self.gateway, exchange.method
        if action == "" and method == "GET":
            await exchange.reply_json(200, admin.describe(session))
        elif action == "":
            _only(method, "DELETE")
            await exchange.reply_json(200, await admin.delete(gateway, session))
        elif action == "/reward":
            _only(method, "POST")
            await exchange.reply_json(200, admin.set_reward(session, exchange.body))
        elif action == "/finish":
            _only(method, "POST")
            value = await admin.finish(gateway, session, exchange.body)
            await exchange.reply(200, await gateway.parts.offload(_dumps, value))
        else:
            raise Problem(404, "unknown_path", f"a session has reward and finish, not {action.strip('/')!r}")

    def _models(self, name: str) -> dict[str, Any]:
        """One list in the form of both OpenAI and Anthropic."""
        model = name or self.gateway.model_name
        about = {"id": model, "object": "model", "type": "model", "display_name": model, "owned_by": "uniagent"}
        entry = {**about, "created": 0, "created_at": "1970-01-01T00:00:00Z"}
        if name:
            return entry
        return {"object": "list", "data": [entry], "has_more": False, "first_id": model, "last_id": model}

    # ------------------------------------------------------------ who asks

    def _session(self, exchange: Exchange, target: Target) -> GatewaySession:
        key = _key(exchange)
        if target.token is not None:
            session = self.gateway.by_key(target.token)
        elif target.session_id is not None:
            session = self.gateway.get(target.session_id)
            if not (_same(key, session.address.api_key) or _same(key, self.admin_token)):
                raise Problem(401, "wrong_key", f"session {session.id} needs its own api_key, from POST /sessions")
        else:
            session = self.gateway.by_key(key) if key else None
        if session is None:
            raise Problem(
                401,
                "unknown_session",
                "no session has this base URL or API key: use the base_url or the api_key that POST /sessions gave",
            )
        return session

    def _check_admin(self, exchange: Exchange) -> None:
        if not _same(_key(exchange), self.admin_token):
            raise Problem(401, "admin_token", "this needs the admin token, as Authorization: Bearer TOKEN")

    # ------------------------------------------------------------ the model

    async def _parse(self, exchange: Exchange, session: GatewaySession, dialect: Dialect) -> ModelCall:
        if session.memo is None:
            session.memo = {}
        wire = session.memo.get(dialect.name)
        if wire is None:
            wire = session.memo[dialect.name] = Wire(dialect)
        body = exchange.body
        match = wire.bodies.match(body)
        if match.fresh <= OFFLOAD_BYTES and not wire.lock.locked():
            return wire.parse(body, match)  # type: ignore[no-any-return]
        async with wire.lock:
            return await self.gateway.parts.offload(wire.parse, body)  # type: ignore[no-any-return]

    async def _count(self, exchange: Exchange, session: GatewaySession, dialect: Dialect) -> None:
        call = await self._parse(exchange, session, dialect)
        await exchange.reply_json(200, {"input_tokens": await session.count(call)})

    async def _complete(self, exchange: Exchange, session: GatewaySession, dialect: Dialect) -> None:
        call = await self._parse(exchange, session, dialect)
        headers = self._headers(session, call)
        if call.stream:
            replies = await self._stream(exchange, session, dialect, call, headers)
        else:
            asker = Asker()
            exchange.on_gone(lambda: session.leave(asker))
            replies = await session.complete(call, listener=asker)
            exchange.on_gone(None)
            self._sent(session, dialect, call, replies)
            await exchange.reply_json(200, dialect.reply(call, replies), headers)
        session.delivered(replies)
        self.metrics.replied(dialect.name, replies)

    def _headers(self, session: GatewaySession, call: ModelCall) -> list[tuple[str, str]]:
        """Tells a client which of its sampling parameters were recorded and not used."""
        trusted = self.gateway.parts.trust_client and not session.training
        used = ("temperature", "top_p", "top_k", "seed") if trusted else ()
        ignored = [k for k in call.asked if k not in used and k not in ("tool_choice", "parallel_tool_calls")]
        return [("x-uniagent-ignored", ", ".join(sorted(ignored)))] if ignored else []

    def _sent(self, session: GatewaySession, dialect: Dialect, call: ModelCall, replies: list[Reply]) -> None:
        if session.memo is not None:  # None: it was finished meanwhile
            dialect.sent(call, replies, session.memo[dialect.name].memo)

    async def _stream(
        self,
        exchange: Exchange,
        session: GatewaySession,
        dialect: Dialect,
        call: ModelCall,
        headers: list[tuple[str, str]],
    ) -> list[Reply]:
        """Nothing is sent before the first token, so that what goes wrong until then has its own status."""
        writer = dialect.events(call)
        outbox = Outbox(writer)
        exchange.on_gone(lambda: session.leave(outbox))
        gone: ClientGone | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.fill, session, call)
            try:
                await outbox.pump(exchange, headers, self.ping_s)
            except ClientGone as left:
                gone = left
                session.leave(outbox)
        exchange.on_gone(None)
        if gone is not None:
            raise gone
        if outbox.problem is not None:
            if exchange.status is None:
                raise outbox.problem
            await exchange.end(outbox.take() + writer.error(outbox.problem))
            return []
        if exchange.status is None:
            await exchange.begin(headers=headers)
        self._sent(session, dialect, call, outbox.replies)
        await exchange.end(outbox.take() + writer.finish(outbox.replies))
        return outbox.replies


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _only(method: str, allowed: str) -> None:
    if method != allowed:
        raise Problem(405, "wrong_method", f"use {allowed} here, not {method}")


def _key(exchange: Exchange) -> str:
    """The bearer token, or what Anthropic clients send."""
    scheme, _, token = exchange.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return exchange.headers.get("x-api-key", "").strip()


def _same(given: str, expected: str | None) -> bool:
    return bool(expected) and hmac.compare_digest(given.encode("latin-1", "replace"), (expected or "").encode())


def limits_of(settings: config.Gateway) -> Limits:
    return Limits(settings.max_body_mib << 20, settings.header_timeout_s, settings.idle_timeout_s)


def server_of(gateway: Gateway, settings: config.Gateway, *, admin_token: str | None = None) -> GatewayServer:
    """A server with every registered dialect."""
    dialects = {name: registered("dialects", name)() for name in ROUTES.values()}
    return GatewayServer(gateway, dialects, admin_token, limits=limits_of(settings))


async def listen(
    gateway: Gateway,
    settings: config.Gateway,
    *,
    server: GatewayServer | None = None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until cancelled; ``started`` with the origin, ``http://host:port``, which the gateway then knows too."""
    server = server or server_of(gateway, settings)
    listeners = await trio.open_tcp_listeners(settings.port, host=settings.host, backlog=4096)
    port = listeners[0].socket.getsockname()[1]
    host = "127.0.0.1" if settings.host in ("", "0.0.0.0", "::") else settings.host
    gateway.origin = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    gateway.serve = lambda listener: server.http.serve([listener])
    task_status.started(gateway.origin)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.lane.run)
        await server.http.serve(listeners)
        nursery.cancel_scope.cancel()
