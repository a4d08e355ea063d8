"""The first process inside a sandbox: a bash that runs only what we send it, and starts everything else.

It stays clean because no command of an agent runs in it; shells and single programs are its children, so they share
the sandbox's namespaces and its /tmp, and outlive each other. Requests are lines of shell on its stdin; it answers on
its stdout, one line each, in order. The pipes of what it starts are FIFOs in a directory that the sandbox sees
read-only, gone as soon as both ends are open.

Invariants: killing it ends every process of a sandbox with its own pid namespace; a request is answered or InfraError
is raised within its deadline. Knows nothing of confinement: it is handed the argv that starts it.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import trio

from uniagent.adapters.sandboxes.pipes import close_all, read_now, write_all
from uniagent.adapters.sandboxes.processes import children, inner_pid, kill_trees
from uniagent.engine.errors import InfraError

# -m: children get a process group and default signals of their own; the traps keep a stray signal from ending it
ANSWER = b"uniagent:"
START = "exec 2>/dev/null; set -m; trap : HUP INT QUIT TERM PIPE ALRM USR1 USR2 XCPU XFSZ VTALRM ABRT; ulimit -c 0\n"


class Started:
    """One process that init started: our ends of its pipes, its ids inside the sandbox and on the host."""

    def __init__(self, inner: int, pid: int | None, fds: list[int]) -> None:
        self.inner, self.pid, self.fds = inner, pid, fds

    def close(self) -> None:
        close_all(self.fds)


class Init:
    """A sandbox seen as its first process, from before it is started until it is gone."""

    def __init__(self, host_run: str, inner_run: str, *, confined: bool, limits: str) -> None:
        """``host_run`` is the directory of its pipes, which the sandbox sees as ``inner_run``; ``confined``: it is the
        first of a pid namespace, started by the confinement; ``limits`` is shell that sets resource limits."""
        self.host_run, self.inner_run, self.confined = host_run, inner_run, confined
        for name in ("requests", "replies"):
            os.mkfifo(f"{host_run}/{name}", 0o600)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self.requests = os.open(f"{host_run}/requests", flags | os.O_RDWR)  # O_RDWR does not wait for the reader
        self.replies = os.open(f"{host_run}/replies", flags | os.O_RDONLY)
        self.fds = [self.requests, self.replies]
        # keeps the replies from looking ended before their writer is there; closed at its first word
        self.placeholder = [os.open(f"{host_run}/replies", flags | os.O_WRONLY)]
        self.preamble = START + limits
        self.received = self.said = b""
        self.owed = 0  # answers not read yet, those of cancelled requests included
        self.lock = trio.Lock()
        self.count = 0
        self.pid: int | None = None  # host id, once it has answered; valid while ``alive``
        self.pidfd: int | None = None
        self.spawned: set[int] = set()  # host ids of what it started
        self.enter: Callable[[int], None] | None = None  # called with its host id before anything is started
        self.closed = False

    async def ask(self, request: str, answer: str, *, timeout_s: float = 30.0) -> str:
        """Run one line of shell in it, and give the value that the word ``answer`` (such as $?) then has."""
        async with self.lock:
            self.check_open()
            try:
                with trio.move_on_after(timeout_s):
                    await self._send(f"{self.preamble}{request}; echo {ANSWER.decode()}{answer}\n")
                    self.preamble = ""
                    while True:
                        line = await self._line()
                        self.owed -= 1
                        if self.owed == 0:
                            return line
            except (BrokenPipeError, trio.ClosedResourceError):
                raise InfraError(f"the sandbox is gone: {self._last_words()}") from None
            raise InfraError(f"the sandbox did not answer within {timeout_s:g} s")

    def check_open(self) -> None:
        """Raises InfraError when it was closed: its descriptors may be someone else's by now."""
        if self.closed:
            raise InfraError("the sandbox is gone: it was closed")

    async def _send(self, text: str) -> None:
        """All or nothing: half a request would garble the next one."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            await write_all(self.requests, text.encode(errors="surrogateescape"))
            self.owed += 1
            return
        self.kill()
        raise BrokenPipeError  # it has stopped reading

    async def _line(self) -> str:
        """The next answer; any other line is the confinement's and kept for ``_last_words``."""
        while True:
            while b"\n" not in self.received:
                data = read_now(self.replies)
                if data is None:
                    await trio.lowlevel.wait_readable(self.replies)
                elif not data:
                    raise BrokenPipeError
                else:
                    close_all(self.placeholder)
                    self.received += data
            line, _, self.received = self.received.partition(b"\n")
            if line.startswith(ANSWER):
                if self.pid is None:
                    self._found()
                return line[len(ANSWER) :].decode(errors="replace")
            self.said += line + b"\n"

    def _last_words(self) -> str:
        """What the sandbox said before it went away: the confinement's error when it never started."""
        while not self.closed and (data := read_now(self.replies)):
            self.received += data
        return (self.said + self.received).decode(errors="replace").strip() or "its first process ended"

    async def spawn(
        self, program: str, pipes: Sequence[str], *, feed: bytes | None = None, timeout_s: float = 30.0
    ) -> Started:
        """Start a program (shell text) with one pipe a name: ``in`` is written by us, all others are read by us. Inside
        they are the descriptors 11, 12, … in that order; 10 is a file with the bytes ``feed``, or /dev/null."""
        self.check_open()
        if self.enter is not None:
            await self.ask("true", "ready", timeout_s=timeout_s)
            if self.pid is not None and self.enter is not None:
                self.enter(self.pid)
            self.enter = None
        self.count += 1
        names = [f"{self.count}-{pipe}" for pipe in pipes]
        feed_name = f"{self.count}-feed"
        ours: list[int] = []
        opened = [f"10<{self._inside(feed_name)}" if feed else "10</dev/null"]
        try:
            if feed:
                Path(self.host_run, feed_name).write_bytes(feed)
            for number, (name, pipe) in enumerate(zip(names, pipes, strict=True), start=11):
                os.mkfifo(f"{self.host_run}/{name}", 0o600)
                # the writing end is opened O_RDWR, which does not wait for the reader
                mode = os.O_RDWR if pipe == "in" else os.O_RDONLY
                ours.append(os.open(f"{self.host_run}/{name}", mode | os.O_NONBLOCK | os.O_CLOEXEC))
                opened.append(f"{number}{'<' if pipe == 'in' else '>'}{self._inside(name)}")
            closing = " ".join(f"{number}>&-" for number in range(10, 11 + len(names)))
            answer = await self.ask(
                f"exec {' '.join(opened)}; {{ {program}; }} </dev/null >/dev/null & exec {closing}",
                "$!",
                timeout_s=timeout_s,
            )
            if not answer.isdigit():
                raise InfraError(f"the sandbox did not start: {answer} {self._last_words()}")
        except BaseException:
            close_all(ours)
            raise
        finally:
            for name in (*names, feed_name):
                with suppress(FileNotFoundError):
                    os.unlink(f"{self.host_run}/{name}")
        pid = next((p for p in self.strays() if inner_pid(p) == int(answer)), None)
        if pid is not None:
            self.spawned.add(pid)
        return Started(int(answer), pid, ours)

    def _inside(self, name: str) -> str:
        return shlex.quote(f"{self.inner_run}/{name}")

    async def first(self) -> int:
        """Host id of the first process inside. Raises InfraError when there is none."""
        await self.ask("true", "$?")
        if self.pid is None:
            raise InfraError("the sandbox is gone: its first process ended")
        return self.pid

    def strays(self) -> list[int]:
        """Host ids of init's children that it did not start itself: processes whose parents ended."""
        return [pid for pid in children(self.pid) if pid not in self.spawned] if self.pid and self.alive() else []

    def _found(self) -> None:
        """It has answered, so it is there: take hold of its process."""
        with suppress(OSError):
            with open(f"{self.host_run}/pid") as file:
                started = int(file.read())
            self.pid = next(iter(children(started)), None) if self.confined else started
            for name in ("requests", "replies", "pid"):
                os.unlink(f"{self.host_run}/{name}")
            if self.pid is not None:
                self.pidfd = os.pidfd_open(self.pid)

    def alive(self) -> bool:
        """Whether it runs, as far as is known."""
        if self.pidfd is None:
            return not self.closed
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    async def exit_code(self, started: Started) -> int:
        """Exit status of something that has ended."""
        return int(await self.ask(f"wait {started.inner}", "$?", timeout_s=5.0))

    def kill(self) -> None:
        """End every process of the sandbox. Does not wait; idempotent. One that has not answered yet is ended by
        ``wait``."""
        if not self.closed:
            self.closed = True
            self._signal()
            if self.pidfd is not None:
                close_all(self.fds)

    def _signal(self) -> None:
        if self.pidfd is not None and self.pid is not None and self.alive():
            if not self.confined:
                kill_trees([self.pid])
            with suppress(ProcessLookupError):  # it ended just now
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def wait(self, timeout_s: float) -> bool:
        """After ``kill``: whether every process was gone in time."""
        with trio.move_on_after(timeout_s):
            if self.pidfd is None:
                await self._settle()
            if self.pidfd is not None:
                self._signal()
                await trio.lowlevel.wait_readable(self.pidfd)
                close_all([self.pidfd])
                self.pidfd = self.pid = None
        close_all(self.placeholder)
        close_all(self.fds)
        return self.pidfd is None

    async def _settle(self) -> None:
        """Wait until one that was killed while it started is there or has failed to."""
        with suppress(BrokenPipeError, trio.ClosedResourceError):
            if self.fds and not self.owed:
                await self._send(f"{self.preamble}echo {ANSWER.decode()}\n")
            if self.fds:
                await self._line()
