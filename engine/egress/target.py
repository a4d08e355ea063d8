"""A URL as one canonical thing: two spellings of an address are one target, or the second is refused.

Hosts: case, a final dot, percent signs, Unicode forms and punycode are resolved; every way of writing an IP address
(decimal, hexadecimal, octal, IPv6, IPv4 in IPv6) gives that address. Paths: escapes that need not be are undone, dot
segments resolved. A user name, a backslash, white space or a control character is refused. What is judged is what is
sent on. Knows no rule.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import unquote

import idna
from attrs import frozen

PORTS = {"http": 80, "https": 443}
UNRESERVED = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
BAD = re.compile(r"[\x00-\x20\x7f-\uffff\\]")
HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
LAYERS = 4  # of percent-encoding that are looked through


class Malformed(ValueError):
    """An address that could be understood in two ways, and so is in none. ``evasion``: nobody writes it by accident."""

    def __init__(self, message: str, *, evasion: bool = True) -> None:
        super().__init__(message)
        self.evasion = evasion


@frozen
class Target:
    """``path`` begins with a slash and is canonical; ``query`` is as it was written, without the question mark."""

    scheme: str
    host: str
    port: int
    path: str = "/"
    query: str = ""

    @property
    def address(self) -> bool:
        """Whether the host is an IP address."""
        return is_address(self.host)

    @property
    def origin_form(self) -> str:
        """What a request line to the server itself says."""
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS.get(self.scheme) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.origin_form}"

    @property
    def meaning(self) -> str:
        """Host, path and query as one lower-case text with every escape undone and slashes single: what rules that
        refuse look at, so that no way of writing gets past them."""
        text = f"{self.host}{self.path}?{self.query}"
        for _ in range(LAYERS):
            text = unquote(text)
        text = text.replace("\\", "/").replace("+", " ").lower()
        return re.sub(r"/(\./)*/*", "/", re.sub(r"[\x00-\x1f]", "", text))


def parse(url: str) -> Target:
    """An absolute http or https URL; a fragment is cut off. Raises Malformed."""
    scheme, mark, rest = url.partition("://")
    scheme = scheme.lower()
    if not mark or scheme not in PORTS:
        raise Malformed(f"{url[:200]!r} is no http or https URL", evasion=False)
    rest = rest.partition("#")[0]
    end = min((i for i in (rest.find("/"), rest.find("?")) if i >= 0), default=len(rest))
    host, port = authority(rest[:end], PORTS[scheme])
    path, _, query = rest[end:].partition("?")
    return Target(scheme, host, port, canonical_path(path or "/"), checked(query))


def authority(text: str, default: int) -> tuple[str, int]:
    """host[:port]. Raises Malformed."""
    if "@" in text or "@" in unquote(text):
        raise Malformed(f"{text[:200]!r} has a user name before the host")
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:
        host, port = text, ""
    if port and (not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536):
        raise Malformed(f"{text[:200]!r} has no port that there is")
    return canonical_host(host), int(port) if port else default


def canonical_host(text: str) -> str:
    """One spelling of a host. Raises Malformed."""
    host = text
    if "%" in host:
        host = unquote(host, errors="strict") if host.isascii() else host
    if host.startswith("[") and host.endswith("]"):
        return _address(host[1:-1], text)
    host = host.replace("\u3002", ".").replace("\uff0e", ".").replace("\uff61", ".")
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True, transitional=False).decode()
        except idna.IDNAError as problem:
            raise Malformed(f"{text[:200]!r} is no host name: {problem}") from None
    host = host.lower().removesuffix(".")
    if ":" in host:
        return _address(host, text)
    if numeric := _numeric(host):
        return numeric
    if not HOST.fullmatch(host) or len(host) > 253:
        raise Malformed(f"{text[:200]!r} is no host name")
    for label in host.split("."):
        if label.startswith("xn--"):
            try:
                if idna.encode(idna.decode(label)).decode() != label:
                    raise Malformed(f"{text[:200]!r} is no host name in its canonical form")
            except idna.IDNAError as problem:
                raise Malformed(f"{text[:200]!r} is no host name: {problem}") from None
    return host


def _numeric(host: str) -> str | None:
    """The IPv4 address that a host of numbers stands for, as every resolver would take it."""
    last = host.rpartition(".")[2]
    if not re.fullmatch(r"\d+|0x[0-9a-f]*", last):
        return None
    try:
        return str(ipaddress.IPv4Address(socket.inet_aton(host)))
    except OSError:
        raise Malformed(f"{host[:200]!r} is neither a name nor an address") from None


def _address(text: str, whole: str) -> str:
    try:
        found = ipaddress.IPv6Address(text.partition("%")[0])
    except ValueError:
        raise Malformed(f"{whole[:200]!r} is no IPv6 address") from None
    return str(found.ipv4_mapped or found)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def canonical_path(path: str) -> str:
    """Raises Malformed."""
    path = ESCAPE.sub(_unescape, checked(path))
    if path.count("%") != len(ESCAPE.findall(path)):
        raise Malformed(f"{path[:200]!r} has a percent sign that begins no escape")
    kept: list[str] = []
    parts = path.split("/")[1:]
    for number, part in enumerate(parts):
        if part in (".", ".."):
            if part == ".." and kept:
                kept.pop()
            if number == len(parts) - 1:
                kept.append("")
        else:
            kept.append(part)
    return "/" + "/".join(kept)


def checked(text: str) -> str:
    """Raises Malformed for what no URL has in it."""
    if found := BAD.search(text):
        raise Malformed(f"a URL with {found.group()!r} in it")
    return text


def _unescape(escape: re.Match[str]) -> str:
    character = chr(int(escape[1], 16))
    return character if character in UNRESERVED else escape[0].upper()
