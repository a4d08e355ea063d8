"""A world on loopback: TLS servers that stand in for registries, forges and documentation, under the real names.
Names resolve to public addresses that nobody dials: the proxy's ``Outside`` leads every address to the one server.
"""

from __future__ import annotations

import datetime
import io
import json
import ssl
import zipfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import h11
import trio
from attrs import define, field

from uniagent.engine.egress.authority import Authority
from uniagent.engine.egress.outside import Outside

NOW = datetime.datetime.now(datetime.UTC)
Answer = tuple[int, dict[str, str], bytes]
Page = Callable[[str, dict[str, str]], Answer]


def text(body: str | bytes, status: int = 200, **headers: str) -> Page:
    data = body.encode() if isinstance(body, str) else body
    fields = {"content-type": "text/plain", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return lambda path, asked: (status, fields, data)


def wheel(name: str, version: str, files: dict[str, str]) -> bytes:
    """A wheel that pip installs."""
    out = io.BytesIO()
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(out, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        names = [*files, f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"]
        archive.writestr(f"{info}/RECORD", "".join(f"{n},,\n" for n in names))
    return out.getvalue()


def index(name: str, files: Sequence[tuple[str, str]]) -> Page:
    """PEP 691 where it is asked for, PEP 503 else; files are (name, upload time)."""
    urls = [(f"https://files.pythonhosted.org/packages/aa/bb/{file}", file, time) for file, time in files]

    def page(path: str, asked: dict[str, str]) -> Answer:
        if "application/vnd.pypi.simple.v1+json" in asked.get("accept", ""):
            listed = [{"url": u, "filename": f, "hashes": {}, "upload-time": t} for u, f, t in urls]
            body = {"meta": {"api-version": "1.1"}, "name": name, "files": listed, "versions": []}
            return 200, {"content-type": "application/vnd.pypi.simple.v1+json"}, json.dumps(body).encode()
        links = "".join(f'<a href="{u}">{f}</a>\n' for u, f, _ in urls)
        return 200, {"content-type": "text/html"}, links.encode()

    return page


@define(eq=False)
class World:
    """``pages``: host and path -> what is there. ``seen``: (host, path) of every request that came through."""

    pages: dict[tuple[str, str], Page] = field(factory=dict)
    seen: list[tuple[str, str]] = field(factory=list)
    dialled: list[str] = field(factory=list)
    private: dict[str, str] = field(factory=dict)  # host -> address, where it is not a public one
    authority: Authority = field(factory=lambda: Authority(NOW))
    _addresses: dict[str, str] = field(factory=dict)
    _ports: dict[bool, int] = field(factory=dict)

    def put(self, url: str, page: Page | str | bytes) -> None:
        host, slash, path = url.partition("/")
        self.pages[host, slash + path] = page if callable(page) else text(page)

    def address(self, host: str) -> str:
        return self.private.get(host) or self._addresses.setdefault(host, f"140.82.{len(self._addresses)}.1")

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        if not any(h == host for h, _ in self.pages):
            raise OSError("no such name")
        return [self.address(host)]

    async def dial(self, address: str, port: int) -> trio.abc.Stream:
        self.dialled.append(address)
        return await trio.open_tcp_stream("127.0.0.1", self._ports[port == 443])

    @property
    def outside(self) -> Outside:
        tls = ssl.create_default_context(cadata=self.authority.certificate.decode())
        return Outside(self.resolve, self.dial, tls)

    # ------------------------------------------------------------ the server

    @asynccontextmanager
    async def open(self) -> AsyncIterator[World]:
        async with trio.open_nursery() as nursery:
            for encrypted in (False, True):
                (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
                self._ports[encrypted] = listener.socket.getsockname()[1]
                serve = self._encrypted if encrypted else self._plain
                nursery.start_soon(trio.serve_listeners, serve, [listener])
            yield self
            nursery.cancel_scope.cancel()

    async def _encrypted(self, stream: trio.SocketStream) -> None:
        context = self.authority.context("default.example")

        def named(connection: ssl.SSLObject, name: str | None, old: ssl.SSLContext) -> None:
            connection.context = self.authority.context(name or "default.example")

        context.sni_callback = named  # type: ignore[assignment]
        try:
            await self._plain(trio.SSLStream(stream, context, server_side=True, https_compatible=True))
        except trio.BrokenResourceError:
            await trio.aclose_forcefully(stream)

    async def _plain(self, stream: trio.abc.Stream) -> None:
        http = h11.Connection(h11.SERVER)
        async with stream:
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    http.receive_data(bytes(await stream.receive_some()))
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.EndOfMessage):
                    break
                else:
                    return
            headers = {n.decode(): v.decode() for n, v in request.headers}
            host, path = headers["host"].partition(":")[0], request.target.decode()
            self.seen.append((host, path))
            page = self.pages.get((host, path)) or self.pages.get((host, path.partition("?")[0])) or text("gone", 404)
            status, fields, body = page(path, headers)
            fields = {**fields, "content-length": str(len(body)), "connection": "close"}
            await stream.send_all(http.send(h11.Response(status_code=status, headers=list(fields.items()))) or b"")
            if request.method != b"HEAD":
                await stream.send_all(http.send(h11.Data(data=body)) or b"")
