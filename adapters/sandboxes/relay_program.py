"""Runs inside a sandbox, under its python3 (3.8 or newer, standard library alone): programs and sockets over one pair
of streams of text lines. ``relay`` is the other end and sends this file's text; nothing of the package is imported.

A line is ``ID VERB [WORDS]``, bytes as base64. Towards here: ``open JSON`` (argv, env, cwd) a program, ``listen`` on
loopback, ``data B64``, ``eof``, ``ack STREAM N``, ``close``. From here: ``at PORT``, ``taken LISTENER`` for a new
connection, ``data STREAM B64``, ``end STREAM``, ``code N``, ``ack 0 N``. Each stream has at most WINDOW bytes on the
way that were not acknowledged, so one that nobody reads holds no other up. Ids of connections begin with t.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

WINDOW, PIECE = 1 << 18, 1 << 15
lock = threading.Lock()
channels: dict[str, Channel] = {}
numbers = itertools.count(1)


def say(*words: object) -> None:
    text = " ".join(str(word) for word in words) + "\n"
    with lock:
        sys.stdout.write(text)
        sys.stdout.flush()


class Sender:
    """One stream from here, within its window."""

    def __init__(self, name: str, stream: int, read: Callable[[int], bytes]) -> None:
        self.name, self.stream, self.read = name, stream, read
        self.room, self.changed = WINDOW, threading.Condition()
        self.closed = False

    def allow(self, count: int) -> None:
        with self.changed:
            self.room += count
            self.changed.notify()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify()

    def run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.room > 0 or self.closed)
                room = min(self.room, PIECE)
            if self.closed:
                return
            try:
                data = self.read(room)
            except OSError:
                data = b""
            if not data:
                say(self.name, "end", self.stream)
                return
            self.allow(-len(data))
            say(self.name, "data", self.stream, base64.b64encode(data).decode())


class Channel:
    """What is fed from the other end, and what is sent to it."""

    def __init__(
        self,
        name: str,
        write: Callable[[bytes], None],
        end_input: Callable[[], None],
        senders: dict[int, Sender],
        end: Callable[[], None],
    ) -> None:
        self.name, self.write, self.end_input, self.senders, self.end = name, write, end_input, senders, end
        self.input: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self.feed, daemon=True).start()
        for sender in senders.values():
            threading.Thread(target=sender.run, daemon=True).start()

    def feed(self) -> None:
        while True:
            data = self.input.get()
            try:
                if data is None:
                    self.end_input()
                    return
                self.write(data)
            except (OSError, ValueError):
                say(self.name, "broken")
                return
            say(self.name, "ack", 0, len(data))

    def close(self) -> None:
        self.input.put(None)
        for sender in self.senders.values():
            sender.close()
        self.end()


def write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def start(name: str, asked: dict[str, Any]) -> None:
    env = dict(os.environ)
    env.update(asked["env"])
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            asked["argv"],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=env,
            cwd=asked["cwd"],
            start_new_session=True,
            bufsize=0,
        )
    except OSError as problem:
        complaint = base64.b64encode(f"{problem}\n".encode()).decode()
        say(name, "data", 2, complaint)
        for stream in (1, 2):
            say(name, "end", stream)
        say(name, "code", 127)
        return

    def end() -> None:
        if process.poll() is None:
            process.kill()

    def watch() -> None:
        code = process.wait()
        say(name, "code", 128 - code if code < 0 else code)

    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = process.stdout.fileno(), process.stderr.fileno()
    senders = {
        1: Sender(name, 1, lambda room: os.read(out, room)),
        2: Sender(name, 2, lambda room: os.read(err, room)),
    }
    write = process.stdin.fileno()
    channel = Channel(name, lambda data: write_all(write, data), process.stdin.close, senders, end)
    channels[name] = channel
    threading.Thread(target=watch, daemon=True).start()


def listen(name: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listeners[name] = listener
    say(name, "at", listener.getsockname()[1])
    threading.Thread(target=accept, args=(name, listener), daemon=True).start()


def accept(name: str, listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        there = f"t{next(numbers)}"

        def end_input(connection: socket.socket = connection) -> None:
            connection.shutdown(socket.SHUT_WR)

        def end(connection: socket.socket = connection) -> None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

        senders = {1: Sender(there, 1, connection.recv)}
        say(there, "taken", name)
        channels[there] = Channel(there, connection.sendall, end_input, senders, end)


listeners: dict[str, socket.socket] = {}


def main() -> None:
    print("uniagent relay ready", flush=True)
    for line in sys.stdin:
        name, verb, *rest = line.split()
        if verb == "open":
            start(name, json.loads(base64.b64decode(rest[0])))
        elif verb == "listen":
            listen(name)
        elif verb == "close":
            channel, listener = channels.pop(name, None), listeners.pop(name, None)
            if channel is not None:
                channel.close()
            if listener is not None:
                listener.shutdown(socket.SHUT_RDWR)
                listener.close()
        elif name in channels:
            channel = channels[name]
            if verb == "data":
                channel.input.put(base64.b64decode(rest[0]))
            elif verb == "eof":
                channel.input.put(None)
            elif verb == "ack":
                channel.senders[int(rest[0])].allow(int(rest[1]))
    for channel in list(channels.values()):
        channel.close()
    os._exit(0)


if __name__ == "__main__":
    main()
