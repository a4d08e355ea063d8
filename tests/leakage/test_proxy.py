"""The proxy over real sockets, the world a stand-in on loopback."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import stage
import trio
from attrs import define
from world import NOW, World, text

from uniagent.engine.egress.authority import Authority
from uniagent.engine.egress.client_hello import server_name
from uniagent.engine.egress.proxy import EgressProxy, ProxyLimits
from uniagent.engine.egress.record import KEPT, Egress
from uniagent.engine.egress.rules import Listed, Verdict
from uniagent.tasks.guards.network import Guarded
from uniagent.tasks.guards.origin import origin

AUTHORITY = Authority(NOW)
ORIGIN = origin({"repo": "acme/splitter", "distribution": "splitter", "base_date": "2024-05-01", "package": "splitter"})


@define
class Place:
    world: World
    egress: Egress
    url: str

    def client(self, *, trusts: Authority | None = AUTHORITY, **options: Any) -> httpx.AsyncClient:
        context = ssl.create_default_context(cadata=(trusts or AUTHORITY).certificate.decode())
        return httpx.AsyncClient(proxy=self.url, verify=context, trust_env=False, **options)

    async def get(self, url: str, **options: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.get(url, **options)

    async def raw(self, data: bytes) -> bytes:
        """What the proxy says to these bytes."""
        stream = await trio.open_tcp_stream("127.0.0.1", int(self.url.rpartition(":")[2]))
        async with stream:
            await stream.send_all(data)
            with trio.fail_after(10):
                said = b""
                while piece := await stream.receive_some():
                    said += bytes(piece)
                return said

    @property
    def verdicts(self) -> list[tuple[str, bool, bool]]:
        return [(a.url, a.allowed, a.leak) for a in self.egress.accesses]


@asynccontextmanager
async def place(policy: str = "guarded", listed: tuple[str, ...] = (), rules: bool = True) -> AsyncIterator[Place]:
    world = stage.a_world()
    egress = Egress(policy, Listed(listed), rules=Guarded.of(ORIGIN, stage.PROBLEM) if rules else None)
    async with world.open(), trio.open_nursery() as nursery:
        proxy = EgressProxy(egress, world.outside, AUTHORITY, ProxyLimits(head_s=5, idle_s=5))
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(proxy.serve, listener)
        yield Place(world, egress, f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
        nursery.cancel_scope.cancel()


async def test_whole_urls_are_seen_inside_tls_and_recorded() -> None:
    async with place() as here:
        here.egress.actor = lambda: ("session-3", 7)
        assert (await here.get(stage.ISSUE)).text == "the last chunk is lost"
        refused = await here.get("https://github.com/acme/splitter/pull/13.diff")
        assert refused.status_code == 403
        assert "the upstream repository" in refused.text
        assert here.world.seen == [("github.com", "/acme/splitter/issues/12")], "nothing went out for the other"
        first, second = here.egress.accesses
        assert (first.url, first.status, first.received) == (stage.ISSUE, 200, len("the last chunk is lost"))
        assert (second.allowed, second.leak, second.session, second.turn) == (False, True, "session-3", 7)


async def test_without_a_tasks_rules_only_the_list_may_be_reached() -> None:
    async with place(rules=False, listed=("docs.python.org",)) as here:
        assert (await here.get("https://docs.python.org/3/library/itertools.html")).text == "batched"
        assert (await here.get("https://pypi.org/simple/helper-lib/")).status_code == 403


async def test_a_redirect_is_judged_where_it_leads() -> None:
    async with place() as here, here.client(follow_redirects=True) as client:
        assert (await client.get("https://docs.python.org/moved")).status_code == 403
        assert here.verdicts[-1] == (f"https://{stage.RAW}", False, True)
        assert [host for host, _ in here.world.seen] == ["docs.python.org"]


async def test_plain_http_and_several_requests_on_one_connection() -> None:
    async with place() as here, here.client() as client:
        for _ in range(3):
            assert (await client.get("http://docs.python.org/3/library/itertools.html")).text == "batched"
        assert (await client.head("https://docs.python.org/3/library/itertools.html")).headers["content-length"] == "7"
        assert (await client.post("https://pypi.org/legacy/", content=b"x" * 100_000)).status_code == 403


async def test_another_host_inside_an_allowed_connection_is_refused() -> None:
    async with place() as here:
        got = await here.get(f"https://docs.python.org/{stage.RAW}", headers={"host": "raw.githubusercontent.com"})
        assert got.status_code == 403
        assert here.egress.accesses[-1].leak
        assert here.world.seen == []


async def test_headers_that_steer_servers_do_not_pass() -> None:
    asked: dict[str, str] = {}

    def page(path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        asked.update(headers)
        return 200, {}, b""

    async with place() as here:
        here.world.put("docs.python.org/echo", page)
        steer = {"X-Original-URL": "/x", "X-Forwarded-Host": "y", "X-HTTP-Method-Override": "PUT", "X-Mine": "1"}
        await here.get("https://docs.python.org/echo", headers=steer)
        assert {n for n in asked if n.startswith("x-")} == {"x-mine"}
        assert asked["host"] == "docs.python.org"


async def test_a_name_that_stands_for_a_private_address_is_refused_unless_a_person_listed_it() -> None:
    async with place(listed=("intern.example",)) as here:
        here.world.private = {"docs.python.org": "169.254.169.254", "intern.example": "10.0.0.7"}
        here.world.put("intern.example/x", "mine")
        assert (await here.get("https://docs.python.org/3/library/itertools.html")).status_code == 403
        assert (await here.get("https://intern.example/x")).text == "mine"
        assert here.world.dialled == ["10.0.0.7"], "the address that was checked is the one that is dialled"


async def test_what_cannot_be_reached_says_so() -> None:
    async with place(listed=("gone.example",)) as here:
        said = await here.get("http://gone.example/")
        assert said.status_code == 502
        assert "not known" in said.text


async def test_odd_requests_are_refused_in_words() -> None:
    async with place() as here:
        for request in (
            b"GET http://docs.python.org@github.com/ HTTP/1.1\r\nHost: github.com\r\n\r\n",
            b"GET http://docs.python.org/ HTTP/1.1\r\nHost: github.com\r\n\r\n",
            b"CONNECT 140.82.112.3:443 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"CONNECT github.com:22 HTTP/1.1\r\nHost: github.com:22\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: docs.python.org\r\n\r\n",
            b"GET https://docs.python.org/ HTTP/1.1\r\nHost: docs.python.org\r\n\r\n",
        ):
            assert (await here.raw(request)).startswith(b"HTTP/1.1 403"), request
        assert here.world.dialled == []
        assert [leak for _, _, leak in here.verdicts] == [True, True, True, False, False, False]


async def test_garbage_and_early_data_end_the_connection() -> None:
    async with place() as here:
        assert await here.raw(b"\x16\x03\x01\x02\x00garbage\r\n\r\n") == b""
        assert await here.raw(b"CONNECT docs.python.org:443 HTTP/1.1\r\nHost: docs.python.org\r\n\r\nGET /") in (
            b"", b"HTTP/1.1 200 Connection established\r\n\r\n",
        )  # fmt: skip
        assert (await here.get("https://docs.python.org/3/library/itertools.html")).text == "batched", "and no other"


async def test_an_allowlist_passes_tls_through_to_the_listed_host_alone() -> None:
    async with place("allowlist", ("docs.python.org",), rules=False) as here:
        async with here.client(trusts=here.world.authority) as client:
            assert (await client.get("https://docs.python.org/3/library/itertools.html")).text == "batched"
            with pytest.raises(httpx.ProxyError, match="403"):
                await client.get("https://github.com/acme/splitter")
        assert here.egress.accesses[0].received > 1000


async def test_a_tunnel_carries_no_other_server_name() -> None:
    async with place("allowlist", ("docs.python.org",), rules=False) as here:
        context = ssl.create_default_context(cadata=here.world.authority.certificate.decode())
        plain = await trio.open_tcp_stream("127.0.0.1", int(here.url.rpartition(":")[2]))
        await plain.send_all(b"CONNECT docs.python.org:443 HTTP/1.1\r\nHost: docs.python.org:443\r\n\r\n")
        assert (await plain.receive_some()).startswith(b"HTTP/1.1 200")
        stream = trio.SSLStream(plain, context, server_hostname="github.com")
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()
        assert here.egress.accesses[-1].leak
        assert here.world.seen == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # httpx leaves its socket behind
@pytest.mark.parametrize(
    ("url", "reached"),
    [("https://docs.python.org/3/library/itertools.html", True), ("https://pypi.org/simple/splitter/", False)],
)
async def test_a_client_that_pins_falls_back_to_the_host_alone_where_no_url_matters(url: str, reached: bool) -> None:
    async with place() as here, here.client(trusts=here.world.authority) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
        with trio.fail_after(10):
            while not here.egress.accesses:
                await trio.sleep(0.001)
        if reached:
            assert (await client.get(url)).text == "batched"
        else:
            with pytest.raises(httpx.ConnectError):
                await client.get(url)
            assert here.world.seen == []


async def test_an_index_is_cut_on_its_way() -> None:
    async with place() as here:
        page = await here.get("https://pypi.org/simple/splitter/", headers={"accept": "text/html"})
        assert "splitter-1.0" in page.text
        assert "splitter-1.1" not in page.text
        files = "https://files.pythonhosted.org/packages/aa/bb"
        assert (await here.get(f"{files}/splitter-1.0-py3-none-any.whl")).status_code == 200
        assert (await here.get(f"{files}/splitter-1.1-py3-none-any.whl")).status_code == 403


async def test_a_closed_way_out_refuses_everything() -> None:
    async with place() as here:
        here.egress.closed = True
        assert (await here.get(stage.ISSUE)).status_code == 403


async def test_long_answers_stream_and_are_counted() -> None:
    async with place() as here:
        here.world.put("docs.python.org/big", text(b"x" * 3_000_000))
        assert len((await here.get("https://docs.python.org/big")).content) == 3_000_000
        assert here.egress.accesses[0].received == 3_000_000


def test_the_record_keeps_what_matters_of_a_session_that_asks_without_end() -> None:
    egress = Egress("guarded")
    for number in range(KEPT + 10):
        egress.note(0.0, "GET", f"https://x/{number}", "x", Verdict(True, "r"))
    egress.note(0.0, "GET", "https://leak", "x", Verdict(False, "r", leak=True))
    assert len(egress.accesses) == KEPT + 1
    assert egress.accesses[-1].url == "https://leak"
    assert egress.as_json()["dropped"] == 10


def test_server_names() -> None:
    context = ssl.create_default_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(incoming, outgoing, server_hostname="Docs.Python.org")
    try:
        connection.do_handshake()
    except ssl.SSLWantReadError:
        hello = outgoing.read()
    assert server_name(hello) == "docs.python.org"
    assert all(server_name(hello[:cut]) is None for cut in range(len(hello)))
    assert server_name(b"GET / HTTP/1.1\r\n") == ""
    assert server_name(hello[:5] + b"\x01" + b"\xff" * (len(hello) - 6)) in ("", None)
