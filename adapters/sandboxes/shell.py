"""The persistent shell of a local sandbox: one interactive bash, fed over pipes.

Every command is a here-document that the shell sources: cwd, variables, functions and background processes stay.
Interactive, because then SIGINT brings bash back to its prompt from anywhere, as Ctrl-C does; its prompts and job
notices go nowhere. The exit status comes with a nonce on a pipe that commands do not have. A command that ignores the
interrupt is killed with its whole tree; a shell that cannot be brought back is replaced, and the result says so.
"""

from __future__ import annotations

import secrets
import signal

import trio

from uniagent.adapters.sandboxes.init import Init, Started
from uniagent.adapters.sandboxes.pipes import Capped, Collector, read_now, write_all
from uniagent.adapters.sandboxes.processes import children, descendants, kill_trees, send
from uniagent.engine.errors import InfraError
from uniagent.engine.ports import Completed

# descriptors 11, 12, 13: commands, output, status. The status pipe becomes 63, closed for every command.
PROGRAM = "exec bash --norc --noprofile --noediting -i +m +H <&11 >&12 2>/dev/null 63>&13 10<&- 11<&- 12>&- 13>&-"
SETUP = "PS1= PS2=; unset HISTFILE MAILCHECK; set +o history; shopt -s execfail; shopt -u checkwinsize\n"
# The shell says "begin" when it has read all of the command and parsed nothing of it yet.
COMMAND = (
    "{{ \\builtin printf '%s begin\\n' {nonce} >&63; \\. /dev/fd/9 63>&-; }} 9<<'{nonce}' </dev/null 2>&1\n"
    "{body}\n{nonce}\n"
    "\\builtin printf '%s %d\\n' {nonce} $? >&63\n"
)
BEGIN_S = 10.0
POLITE_ROUNDS, ROUNDS, ROUND_S = 3, 20, 0.1  # of interrupting; killing starts after the polite ones


class LocalShell:
    """``engine.ports.Shell`` over an ``Init``. Commands of concurrent callers run one after another."""

    def __init__(self, init: Init, output_bytes: int) -> None:
        self.init, self.output_bytes = init, output_bytes
        self.lock = trio.Lock()
        self.started: Started | None = None
        self.collector: Collector | None = None
        self.pid: int | None = None
        self.nonce = self.told = b""
        self.begun = False  # the shell has read the command: an interrupt before that would hit what it reads
        self.code: int | None = None
        self.unknown = False  # the last command's caller was cancelled: it may still run
        self.before: set[int] = set()

    async def start(self) -> None:
        self.started = await self.init.spawn(PROGRAM, ("in", "out", "status"))
        self.pid = self.started.pid
        self.collector = Collector(self.started.fds[2], [self.started.fds[1]])
        await write_all(self.started.fds[0], SETUP.encode())

    def close(self) -> None:
        if self.collector is not None:
            self.collector.close()
            self.collector = None
        if self.started is not None:
            self.started.close()
            self.started = None

    async def run(self, command: str, *, timeout_s: float) -> Completed:
        """One command. At the time limit its process tree ends and ``code`` is None. ``restarted`` is set when the
        shell itself ended or could not be brought back: the next command finds a fresh one in the same sandbox. A
        NUL byte cannot be sent and is removed. Raises InfraError when the sandbox is gone."""
        async with self.lock:
            if self.unknown and (self.collector is None or not await self._interrupt(Capped(0))):
                await self._replace()
            self.unknown = True
            try:
                if self.started is None:
                    await self.start()
                completed = await self._run(command, timeout_s)
            except trio.Cancelled:
                self._end_command()
                raise
            except trio.ClosedResourceError:
                raise InfraError("the sandbox is gone: it was closed under a running command") from None
            self.unknown = False
            return completed

    async def _run(self, command: str, timeout_s: float) -> Completed:
        assert self.started is not None
        began = trio.current_time()
        kept = Capped(self.output_bytes)
        nonce = secrets.token_hex(8)
        self.nonce, self.told, self.begun, self.code = nonce.encode(), b"", False, None
        self.before = self._alive()
        body = command.replace("\0", "")
        text = COMMAND.format(nonce=nonce, body=body)
        code: int | None = None
        with trio.move_on_after(timeout_s) as limit:
            await write_all(self.started.fds[0], text.encode(errors="surrogateescape"))
            code = await self._status(kept)
        if limit.cancelled_caught:
            restarted = not await self._interrupt(kept)
        else:
            restarted = code is None
            code = await self._ended(kept) if restarted else code
        if restarted:
            await self._replace()
        output, dropped = kept.finish()
        return Completed(code, output, b"", dropped, trio.current_time() - began, restarted)

    async def _status(self, kept: Capped) -> int | None:
        """The exit status of the command with the current nonce; None when the shell ended."""
        while self.code is None:
            if not await self._listen(kept):
                return None
        return self.code

    async def _listen(self, kept: Capped) -> bool:
        """Wait for the status pipe and take in what it says; False when the shell ended."""
        assert self.started is not None
        assert self.collector is not None
        piece = await self.collector.collect({self.started.fds[1]: kept})
        *lines, rest = (self.told + piece).split(b"\n")
        self.told = rest[-4096:]
        for line in lines:
            nonce, _, word = line.partition(b" ")
            if nonce == self.nonce and word == b"begin":
                self.begun = True
            elif nonce == self.nonce and word.isdigit():
                self.code = int(word)
        return bool(piece)

    # ------------------------------------------------------------ ending a command

    def _alive(self) -> set[int]:
        """Host ids of what could be the root of a process tree of the shell's: its children, and orphans."""
        return {*children(self.pid), *self.init.strays()} if self.pid else set()

    def _end_command(self) -> None:
        """Kill what the running command started. Without waiting; earlier background processes stay."""
        kill_trees(self._alive() - self.before)

    async def _interrupt(self, kept: Capped) -> bool:
        """Stop the running command, first as Ctrl-C would; whether the shell is at its prompt again."""
        if self.pid is None or not await self._reads(kept):
            return False
        seen: set[int] = set()  # a process whose parent ends before it would not be found again
        for attempt in range(ROUNDS):
            tree = list(descendants(self._alive() - self.before))
            seen.update(tree)
            # the shell first: it believes in an interrupt only if it got one before its child died of one
            send([self.pid], signal.SIGINT)
            if attempt < POLITE_ROUNDS:
                send(tree, signal.SIGINT)
            else:
                kill_trees(seen)
            with trio.move_on_after(ROUND_S):
                back = await self._status(kept) is not None
                self._end_command()
                kill_trees(seen)
                return back
        return False

    async def _reads(self, kept: Capped) -> bool:
        """Whether the shell has begun with the command, or does so soon."""
        with trio.move_on_after(BEGIN_S):
            while not self.begun:
                if not await self._listen(kept):
                    return False
        return self.begun

    async def _ended(self, kept: Capped) -> int:
        """The shell is gone (exit, exec, a signal): its last output and its exit status."""
        assert self.started is not None
        while data := read_now(self.started.fds[1]):
            kept.add(data)
        return await self.init.exit_code(self.started)

    async def _replace(self) -> None:
        """End the shell, its command and what that started; the next command starts another."""
        roots = self._alive() - self.before | ({self.pid} if self.pid else set())
        kill_trees(roots)
        self.close()
        self.pid = None
