"""Connections to the world: names resolved once, addresses checked, and the checked address dialled.

A name is never resolved a second time between the check and the connection. Knows no policy and no HTTP. Tests bring
their own resolver and their own way to dial.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence

import trio
from attrs import field, frozen

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Dial = Callable[[str, int], Awaitable[trio.abc.Stream]]
CONNECT_S = 20.0
NAT64 = ipaddress.ip_network("64:ff9b::/96")
TRIED = 4  # addresses of one name


class Unreachable(Exception):
    """A host that could not be reached, or may not be: the message says why."""


class PrivateAddress(Unreachable):
    """A name that stands for an address of a private network."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Addresses by the machine's resolver. Raises OSError."""
    found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def dial(address: str, port: int) -> trio.abc.Stream:
    """Raises OSError."""
    return await trio.open_tcp_stream(address, port)


def upstream_tls() -> ssl.SSLContext:
    """What this machine trusts, and HTTP/1.1."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


@frozen
class Outside:
    """The world as the proxy reaches it."""

    resolve: Resolve = resolve
    dial: Dial = dial
    tls: ssl.SSLContext = field(factory=upstream_tls)

    async def connect(self, host: str, port: int, *, private: bool = False) -> trio.abc.Stream:
        """A connection to an address of ``host`` that was checked; ``private``: it may be any. Raises Unreachable."""
        problem: Exception | None = None
        with trio.move_on_after(CONNECT_S):
            try:
                addresses = await self.resolve(host, port)
            except OSError as cause:
                raise Unreachable(f"{host} is not known to the resolver: {cause}") from cause
            if not private and any(not public(address) for address in addresses):
                raise PrivateAddress(f"{host} stands for an address that is not a public one")
            for address in addresses[:TRIED]:
                try:
                    return await self.dial(address, port)
                except OSError as cause:
                    problem = cause
            raise Unreachable(f"{host} cannot be reached: {problem}")
        raise Unreachable(f"{host} could not be reached within {CONNECT_S:g} s")

    async def connect_tls(self, host: str, port: int, *, private: bool = False) -> trio.abc.Stream:
        """The same, encrypted, the certificate checked against the host. Raises Unreachable."""
        stream = await self.connect(host, port, private=private)
        wrapped = trio.SSLStream(stream, self.tls, server_hostname=host, https_compatible=True)
        try:
            with trio.fail_after(CONNECT_S):
                await wrapped.do_handshake()
        except (trio.BrokenResourceError, trio.TooSlowError, ssl.CertificateError) as problem:
            await trio.aclose_forcefully(wrapped)
            raise Unreachable(f"no secure connection to {host}: {problem.__cause__ or problem}") from problem
        except BaseException:
            await trio.aclose_forcefully(wrapped)
            raise
        return wrapped


def public(address: str) -> bool:
    """Whether an address belongs to the public internet."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.sixtofour or found.teredo or found in NAT64:
            return False  # stands for an IPv4 address
        found = found.ipv4_mapped or found
    return found.is_global and not found.is_multicast
