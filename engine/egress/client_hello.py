"""The server name in the first message of a TLS connection (RFC 8446 4.1.2, RFC 6066 3). Pure."""

from __future__ import annotations

import struct

HANDSHAKE, CLIENT_HELLO, SERVER_NAME = 22, 1, 0
ENCRYPTED_HELLO = 0xFE0D  # its true server name cannot be seen


def server_name(data: bytes) -> str | None:
    """The name, in lower case; empty when there is none, when it is hidden, or when this is no TLS; None while more of
    the message is needed."""
    if data[:1] and data[0] != HANDSHAKE:
        return ""
    message = b""
    rest = data
    while len(rest) >= 5:
        size = struct.unpack(">H", rest[3:5])[0]
        if rest[0] != HANDSHAKE:
            return ""
        message += rest[5 : 5 + size]
        rest = rest[5 + size :]
    if len(message) < 4:
        return None
    if message[0] != CLIENT_HELLO:
        return ""
    length = int.from_bytes(message[1:4], "big")
    if len(message) < 4 + length:
        return None
    try:
        return _name(message[4 : 4 + length])
    except (IndexError, struct.error, UnicodeDecodeError):
        return ""


def _name(hello: bytes) -> str:
    place = 34  # version, random
    place += 1 + hello[place]  # session id
    place += 2 + struct.unpack(">H", hello[place : place + 2])[0]  # cipher suites
    place += 1 + hello[place]  # compression
    end = place + 2 + struct.unpack(">H", hello[place : place + 2])[0]
    place += 2
    found = ""
    while place + 4 <= end:
        kind, size = struct.unpack(">HH", hello[place : place + 4])
        value = hello[place + 4 : place + 4 + size]
        place += 4 + size
        if kind == ENCRYPTED_HELLO:
            return ""
        if kind == SERVER_NAME and len(value) > 5 and value[2] == 0:
            found = value[5 : 5 + struct.unpack(">H", value[3:5])[0]].decode("ascii").lower().removesuffix(".")
    return found
