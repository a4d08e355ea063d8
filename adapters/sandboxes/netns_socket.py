"""A program of its own: opens a listening socket inside another process's network namespace and hands it out.

``python netns_socket.py PID PORT`` sends one listening TCP socket on 127.0.0.1 (port 0: chosen by the kernel) over the
Unix socket that is its stdin. It joins the user namespace that owns the network namespace first, which a program may do
only before it has a second thread: hence no function of the node. Uses the standard library alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import sys

NS_GET_USERNS = 0xB701  # linux/nsfs.h: the user namespace that owns this one
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
BACKLOG = 128


def join(namespace: int, kind: int) -> None:
    """setns(2), which Python has from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, kind):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main(pid: str, port: str) -> None:
    """Raises OSError where the namespaces of the process cannot be joined."""
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    owner = fcntl.ioctl(network, NS_GET_USERNS)
    if os.fstat(owner).st_ino != os.stat("/proc/self/ns/user").st_ino:
        join(owner, CLONE_NEWUSER)
    join(network, CLONE_NEWNET)
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=BACKLOG)
    with socket.socket(fileno=0) as out:
        socket.send_fds(out, [b"."], [listener.fileno()])


if __name__ == "__main__":
    main(*sys.argv[1:])
