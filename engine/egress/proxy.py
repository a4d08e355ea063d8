"""The egress proxy: an HTTP proxy on a listener of one sandbox, whose every request is judged and recorded.

One listener is one identity: what comes in on it is that sandbox's. Plain requests and, under ``guarded``, those inside
TLS (ended here, with a certificate of the run's own authority) are judged by their whole URL and sent on as they were
judged; a ``Host`` other than the one connected to is refused. Redirects are answers like any other: the client
asks again, and is judged again. Under ``allowlist``, and for hosts that a client pins, TLS passes through unread to the
host that was judged, and its server name must be that host.

Invariants: nothing is sent out before it was allowed and noted; the address dialled is the one that was checked; one
sandbox's connections are bounded. Knows no rule of its own.
"""

from __future__ import annotations

import logging
import re

import h11
import trio
from attrs import define, evolve, field, frozen

from uniagent.engine.egress.authority import Authority
from uniagent.engine.egress.client_hello import server_name
from uniagent.engine.egress.outside import Outside, PrivateAddress, Unreachable
from uniagent.engine.egress.record import Egress
from uniagent.engine.egress.rules import Rewrite, Verdict, Withheld
from uniagent.engine.egress.target import Malformed, Target, authority, is_address, parse
from uniagent.engine.egress.wire import Broken, Wire, end_to_end

log = logging.getLogger(__name__)
LARGEST_REWRITTEN = 64 << 20  # bytes
HELLO = 1 << 14  # a TLS record
# headers by which a request may ask some servers for something else than its URL says
STEERING = re.compile(
    rb"host|expect|forwarded|x-(forwarded|original|rewrite|real|host|http-method|method|proxy).*|x-[a-z-]*override"
)


@frozen
class ProxyLimits:
    connections: int = 64  # of one sandbox at once
    head_s: float = 30.0
    idle_s: float = 60.0


@define(eq=False)
class EgressProxy:
    """``authority`` is needed for ``guarded`` alone."""

    egress: Egress
    outside: Outside
    authority: Authority | None = None
    limits: ProxyLimits = field(factory=ProxyLimits)

    async def serve(self, listener: trio.SocketListener) -> None:
        """Until cancelled."""
        room = trio.CapacityLimiter(self.limits.connections)

        async def one(stream: trio.SocketStream) -> None:
            async with room:
                await self.handle(stream)

        await trio.serve_listeners(one, [listener])

    async def handle(self, stream: trio.abc.Stream) -> None:
        """One connection from inside."""
        wire = Wire.server(stream, self.limits.idle_s)
        try:
            await self._requests(wire, None)
        except Broken:
            return
        except Exception:  # one connection's trouble is not the others'
            log.exception("a connection of the egress proxy failed")
        finally:
            await wire.close()

    async def _requests(self, wire: Wire, tunnel: Target | None) -> None:
        """The requests of one connection; ``tunnel``: the host that they are for, inside TLS."""
        while True:
            event = await wire.event(within_s=self.limits.head_s)
            if not isinstance(event, h11.Request):
                return
            if event.method == b"CONNECT":
                await self._connect(wire, event, nested=tunnel is not None)
                return
            await self._forward(wire, event, tunnel)
            if wire.http.our_state is not h11.DONE or wire.http.their_state is not h11.DONE:
                return
            wire.http.start_next_cycle()

    # ------------------------------------------------------------ verdicts

    def _judged(self, method: str, url: str, host: str, verdict: Verdict) -> int:
        return self.egress.note(trio.current_time(), method, url, host, verdict)

    async def _refuse(self, wire: Wire, method: str, url: str, host: str, verdict: Verdict) -> None:
        self._judged(method, url, host, verdict)
        await self._say_no(wire, verdict)

    async def _say_no(self, wire: Wire, verdict: Verdict, status: int = 403) -> None:
        text = f"refused by the network policy of this sandbox: {verdict.rule}\n"
        await wire.answer(status, text, [("x-egress-rule", verdict.rule.encode("ascii", "replace").decode())])

    # ------------------------------------------------------------ requests with a URL

    def _target(self, request: h11.Request, tunnel: Target | None) -> Target:
        """What is asked for. Raises Malformed."""
        text = request.target.decode("latin-1")
        named = [value.decode("latin-1") for name, value in request.headers if name == b"host"]
        if tunnel is None:
            target = parse(text)
            if target.scheme == "https":
                raise Malformed("an https URL asked for in the clear", evasion=False)
        else:
            target = parse(tunnel.url.rstrip("/") + text) if text.startswith("/") else parse(text)
            if (target.scheme, target.host, target.port) != (tunnel.scheme, tunnel.host, tunnel.port):
                raise Malformed(f"{target.url[:200]!r} asked for inside a connection to {tunnel.host}")
        if request.method in (b"GET", b"HEAD") and _brings_a_body(request):
            raise Malformed("a request to read that brings a body")
        for name in named:
            if authority(name, target.port) != (target.host, target.port):
                raise Malformed(f"the Host {name[:200]!r} in a request to {target.host}")
        return target

    async def _forward(self, wire: Wire, request: h11.Request, tunnel: Target | None) -> None:
        method = request.method.decode("latin-1").upper()
        try:
            target = self._target(request, tunnel)
        except Malformed as problem:
            url = request.target.decode("latin-1")
            host = tunnel.host if tunnel else ""
            await self._refuse(wire, method, url, host, Verdict(False, f"malformed: {problem}", leak=problem.evasion))
            return
        verdict = self.egress.active.judge(method, target)
        number = self._judged(method, target.url, target.host, verdict)
        if not verdict.allowed:
            await self._say_no(wire, verdict)
            return
        connect = self.outside.connect_tls if target.scheme == "https" else self.outside.connect
        try:
            stream = await connect(target.host, target.port, private=verdict.private)
        except PrivateAddress as problem:
            self._judged(method, target.url, target.host, Verdict(False, str(problem)))
            await self._say_no(wire, Verdict(False, str(problem)))
            return
        except Unreachable as problem:
            await wire.answer(502, f"{problem}\n")
            return
        server = Wire.client(stream, self.limits.idle_s)
        try:
            await self._exchange(wire, request, server, target, number)
        finally:
            await server.close()

    async def _exchange(self, wire: Wire, request: h11.Request, server: Wire, target: Target, number: int) -> None:
        """Send the request on and bring the answer back."""
        rewrite = self.egress.active.rewrite(target)
        headers = [(name, value) for name, value in end_to_end(request.headers) if not STEERING.fullmatch(name)]
        if rewrite is not None:
            headers = list(rewrite.request(dict(headers)).items())
        framing = [(n, v) for n, v in request.headers if n == b"transfer-encoding"]
        fields = [(b"host", target.authority.encode()), *headers, *framing, (b"connection", b"close")]
        begun = False
        try:
            await server.send(h11.Request(method=request.method, target=target.origin_form.encode(), headers=fields))
            async for piece in wire.body():
                await server.send(h11.Data(data=piece))
            await server.send(h11.EndOfMessage())
            event = await server.event()
            while isinstance(event, h11.InformationalResponse):
                event = await server.event()
            if not isinstance(event, h11.Response):
                raise Broken("no answer")
            begun = True
            await self._answer(wire, request, server, event, target, rewrite, number)
        except Broken as problem:
            if begun or wire.http.our_state is not h11.SEND_RESPONSE:
                raise
            await wire.answer(502, f"{target.host} broke off: {problem}\n")

    async def _answer(
        self, wire: Wire, request: h11.Request, server: Wire, response: h11.Response, target: Target,
        rewrite: Rewrite | None, number: int,
    ) -> None:  # fmt: skip
        headers = end_to_end(response.headers)
        received = 0
        size = next((int(v) for n, v in response.headers if n == b"content-length"), 0)
        if rewrite is not None and rewrite.optional and size > LARGEST_REWRITTEN:
            rewrite = None
        self.egress.answered(number, response.status_code, 0)
        if rewrite is not None:
            body = b""
            async for piece in server.body():
                body += piece
                if len(body) > LARGEST_REWRITTEN:
                    raise Broken("an index larger than can be rewritten")
            if response.status_code == 200:
                fields = {n.lower(): v for n, v in headers}
                try:  # unpacking and parsing may take long
                    kind, body = await trio.to_thread.run_sync(rewrite.answer, target, fields, body)
                except Withheld as reason:
                    await self._refuse(wire, "GET", target.url, target.host, Verdict(False, str(reason)))
                    return
                headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
            headers = [(n, v) for n, v in headers if n.lower() not in (b"content-length", b"etag", b"last-modified")]
            length = (b"content-length", str(len(body)).encode())
            await wire.send(h11.Response(status_code=response.status_code, headers=[*headers, length]))
            if request.method != b"HEAD":
                await wire.send(h11.Data(data=body))
            await wire.send(h11.EndOfMessage())
            self.egress.answered(number, response.status_code, len(body))
            return
        await wire.send(h11.Response(status_code=response.status_code, headers=headers, reason=response.reason))
        async for piece in server.body():
            received += len(piece)
            await wire.send(h11.Data(data=piece))
        await wire.send(h11.EndOfMessage())
        self.egress.answered(number, response.status_code, received)

    # ------------------------------------------------------------ CONNECT

    async def _connect(self, wire: Wire, request: h11.Request, *, nested: bool) -> None:
        text = request.target.decode("latin-1")
        try:
            if nested:
                raise Malformed("a tunnel inside a tunnel")
            host, port = authority(text, 443)
        except Malformed as problem:
            await self._refuse(wire, "CONNECT", text, "", Verdict(False, f"malformed: {problem}", leak=problem.evasion))
            return
        whole = self.egress.active.tunnel(host, port)
        through = self.egress.policy == "allowlist" or (host, port) in self.egress.pinned
        if through:
            await self._tunnel(wire, host, port, text, whole)
        elif self._hopeless(host, port, whole):
            verdict = self.egress.active.judge("CONNECT", Target("https", host, port))
            await self._refuse(wire, "CONNECT", text, host, evolve(verdict, allowed=False))
        else:
            await self._look_inside(wire, host, port, whole)

    def _hopeless(self, host: str, port: int, whole: Verdict) -> bool:
        """Nothing a client could ask for there would be allowed, or it is no port of the web."""
        return not whole.allowed and (is_address(host) or port not in (80, 443))

    async def _established(self, wire: Wire) -> None:
        await wire.send(h11.Response(status_code=200, headers=[], reason=b"Connection established"))
        if wire.http.trailing_data[0]:
            raise Broken("data before the tunnel was there")

    async def _look_inside(self, wire: Wire, host: str, port: int, whole: Verdict) -> None:
        """End TLS here, and judge what is asked inside."""
        assert self.authority is not None, "guarded needs an authority"
        context = await trio.to_thread.run_sync(self.authority.context, host)
        await self._established(wire)
        stream = trio.SSLStream(wire.stream, context, server_side=True, https_compatible=True)
        try:
            with trio.fail_after(self.limits.head_s):
                await stream.do_handshake()
        except (trio.BrokenResourceError, trio.TooSlowError):
            said = "no TLS here, or a client that takes no certificate but the host's own"
            if whole.allowed:  # some clients only hang up: whatever the cause, nothing is given away
                self.egress.pinned.add((host, port))
                said += "; from now on judged by the host alone"
            self._judged("CONNECT", f"{host}:{port}", host, Verdict(False, said))
            return
        inner = Wire.server(stream, self.limits.idle_s)
        await self._requests(inner, Target("https", host, port))
        with trio.move_on_after(1.0):
            try:
                await stream.aclose()
            except trio.BrokenResourceError:
                return

    async def _tunnel(self, wire: Wire, host: str, port: int, text: str, verdict: Verdict) -> None:
        """Bytes both ways, unread but for the server name."""
        number = self._judged("CONNECT", text, host, verdict)
        if not verdict.allowed:
            await self._say_no(wire, verdict)
            return
        try:
            server = await self.outside.connect(host, port, private=verdict.private)
        except PrivateAddress as problem:
            await self._refuse(wire, "CONNECT", text, host, Verdict(False, str(problem)))
            return
        except Unreachable as problem:
            await wire.answer(502, f"{problem}\n")
            return
        try:
            await self._established(wire)
            with trio.fail_after(self.limits.head_s):
                hello = b""
                while (named := server_name(hello)) is None and len(hello) < HELLO:
                    piece = await wire.stream.receive_some(HELLO)
                    if not piece:
                        return
                    hello += bytes(piece)
            if named != host:
                what = "no TLS" if not named else f"the server name {named[:200]!r}"
                refused = Verdict(False, f"{what} inside a connection to {host}", leak=bool(named))
                self._judged("CONNECT", text, host, refused)
                return
            await server.send_all(hello)
            received = await _both_ways(wire.stream, server)
            self.egress.answered(number, 200, received)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            return
        finally:
            await trio.aclose_forcefully(server)


def _brings_a_body(request: h11.Request) -> bool:
    framing = {name: value for name, value in request.headers if name in (b"content-length", b"transfer-encoding")}
    return framing.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in framing


async def _both_ways(inside: trio.abc.Stream, outside: trio.abc.Stream) -> int:
    """Until either side ends; bytes that came in."""
    received = 0

    async def copy(source: trio.abc.Stream, target: trio.abc.Stream, scope: trio.CancelScope, count: bool) -> None:
        nonlocal received
        try:
            while data := await source.receive_some(1 << 16):
                received += len(data) if count else 0
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(copy, inside, outside, nursery.cancel_scope, False)
        nursery.start_soon(copy, outside, inside, nursery.cancel_scope, True)
    return received
