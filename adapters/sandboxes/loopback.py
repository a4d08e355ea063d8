"""A way into a sandbox whose network is a loopback of its own: sockets that listen in there and are answered out here.

The socket is made inside the sandbox's network namespace and belongs to this process, so nothing is forwarded and no
program of ours runs inside; the namespace keeps no other way in or out.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import trio
from attrs import evolve

from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import ModelEndpoint

PROGRAM = Path(__file__).with_name("netns_socket.py")
TIMEOUT_S = 30.0


async def listen_inside(pid: int, port: int = 0) -> trio.SocketListener:
    """A socket on 127.0.0.1, at a port (0: a free one), in the network namespace of a process. Raises InfraError."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-I", "-S", str(PROGRAM), str(pid), str(port)]
        with trio.move_on_after(TIMEOUT_S):
            done = await trio.run_process(command, stdin=theirs, capture_stderr=True, check=False)
            if done.returncode == 0:
                return trio.SocketListener(trio.socket.from_stdlib_socket(_received(ours)))
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise InfraError(f"no socket could be opened inside the sandbox: {said[-1] if said else done.returncode}")
    raise InfraError(f"no socket could be opened inside the sandbox within {TIMEOUT_S:g} s")


def _received(sent_by: socket.socket) -> socket.socket:
    sent_by.setblocking(False)
    _, (fd,), _, _ = socket.recv_fds(sent_by, 1, 1)
    return socket.socket(fileno=fd)


@asynccontextmanager
async def inside(model: ModelEndpoint, pid: int) -> AsyncIterator[ModelEndpoint]:
    """The endpoint on the loopback of a process's network namespace, for as long as the block lasts. Raises UserError
    for an endpoint that this process does not serve, InfraError where the namespace cannot be joined."""
    if model.serve is None:
        raise UserError(
            f"{model.base_url!r} cannot be reached from a sandbox without a network, because another process serves "
            "it: set network = 'host' in the sandbox section"
        )
    listener = await listen_inside(pid)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model.serve, listener)
        port = listener.socket.getsockname()[1]
        try:
            yield evolve(model, base_url=urlunsplit(urlsplit(model.base_url)._replace(netloc=f"127.0.0.1:{port}")))
        finally:
            nursery.cancel_scope.cancel()
            with suppress(trio.ClosedResourceError):
                listener.socket.close()
