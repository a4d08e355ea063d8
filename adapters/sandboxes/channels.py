"""A sandbox behind channels: what ``docker exec`` and ssh give, a program with its stdin, stdout and stderr.

The persistent shell is one interactive bash on a channel; its exit status comes in the output, behind a nonce that no
command knows. A second bash, the keeper, runs nothing of the agent's: it ends process trees, by the ids inside.
Files travel as tar streams. Invariants: a command that hits its time limit is interrupted, then killed with its tree;
what earlier commands left in the background stays; closing ends everything that carries the sandbox's mark.

Knows neither docker nor ssh: an ``Opener`` makes the channels.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from uniagent.adapters.sandboxes.pipes import Capped
from uniagent.engine.errors import InfraError
from uniagent.engine.ports import Completed

MARK = "UNIAGENT_SANDBOX"  # environment variable of every process of a sandbox
CHUNK = 1 << 16


class Channel(Protocol):
    """One program's standard streams. ``read`` gives b"" at the end; ``code`` waits for the exit status."""

    async def write(self, data: bytes) -> None: ...
    async def close_stdin(self) -> None: ...
    async def read(self, *, errors: bool = False) -> bytes: ...
    async def code(self) -> int: ...
    async def close(self) -> None: ...


class Opener(Protocol):
    """Starts programs in one sandbox. Raises InfraError when it is gone."""

    async def open(self, argv: Sequence[str]) -> Channel: ...


@asynccontextmanager
async def opened(opener: Opener, argv: Sequence[str]) -> AsyncIterator[Channel]:
    """A channel for the length of a block; closing it is shielded and bounded."""
    channel = await opener.open(argv)
    try:
        yield channel
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            await channel.close()


# ---------------------------------------------------------------- the keeper

# kids PID: its children. tree PID…: them and all below, parents first, save the first process and the keeper. less A B:
# the words of A that are not in B. marked TEXT: who has the mark; judged by what grep prints, because its exit status
# is 0 for a file that cannot be read when nobody reads its complaint either.
KEEPER = r"""
exec 2>/dev/null
kids() { local f k; for f in /proc/$1/task/*/children; do k=; read -r k <"$f"; [ "$k" ] && printf '%s ' $k; done; }
tree() { local p; for p in "$@"; do [ "$p" -gt 1 ] && [ $p != $$ ] && printf '%s ' $p && tree $(kids $p); done; }
less() { local p; for p in $1; do case " $2 " in *" $p "*) ;; *) printf '%s ' $p;; esac; done; }
int() { kill -INT $1; kill -INT $(tree $(less "$(kids $1)" "$2")); }
end() { local t=$(tree "$@"); kill -STOP $t; kill -KILL $t $(tree "$@"); }
new() { end $(less "$(kids $1)" "$2"); }
marked() { local e p; for e in /proc/[0-9]*/environ; do p=${e#/proc/}; p=${p%/environ}
  case $(grep -cz "^UNIAGENT_SANDBOX=$1" $e) in [1-9]*) [ $p != $$ ] && printf '%s ' $p;; esac; done; }
"""


class Keeper:
    """Ends processes inside. Opened at its first use; requests one after another."""

    def __init__(self, opener: Opener) -> None:
        self.opener = opener
        self.channel: Channel | None = None
        self.lock = trio.Lock()
        self.received = b""

    async def ask(self, request: str) -> str:
        """Run a line of shell with the functions above; what it prints, in one line. A cancelled request closes the
        keeper; the next one opens another."""
        async with self.lock:
            channel, self.channel = self.channel, None
            if channel is None:
                channel = await self.opener.open(["bash", "--norc", "--noprofile"])
                self.received = b""
                await channel.write(KEEPER.encode())
            try:
                await channel.write(f"echo $({request}) </dev/null\n".encode())
                while b"\n" not in self.received:
                    data = await channel.read()
                    if not data:
                        raise InfraError("the sandbox is gone")
                    self.received += data
            except BaseException:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                    await channel.close()
                raise
            line, _, self.received = self.received.partition(b"\n")
            self.channel = channel
            return line.decode(errors="replace")

    async def close(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            await channel.close()


# ---------------------------------------------------------------- the persistent shell

SHELL = ("bash", "--norc", "--noprofile", "--noediting", "-i", "+m", "+H")
SETUP = (
    "exec 63>&1 2>/dev/null; PS1= PS2=; unset HISTFILE MAILCHECK; set +o history; shopt -s execfail; "
    "shopt -u checkwinsize; printf 'ready %d\\n' $$ >&63\n"
)
# as in ``shell``, with the id of the last background process behind the status
COMMAND = (
    "{{ \\builtin printf '%s begin\\n' {nonce} >&63; \\. /dev/fd/9 63>&-; }} 9<<'{nonce}' </dev/null 2>&1\n"
    "{body}\n{nonce}\n"
    "\\builtin printf '%s %d %s\\n' {nonce} $? \"${{!-}}\" >&63\n"
)
BEGIN_S = 10.0
POLITE_ROUNDS, ROUNDS, ROUND_S = 3, 20, 0.25
DRAIN_S = 0.1  # for the last output of a shell that ended


class ChannelShell:
    """``engine.ports.Shell`` on a channel. Commands of concurrent callers run one after another."""

    def __init__(self, opener: Opener, keeper: Keeper, output_bytes: int) -> None:
        self.opener, self.keeper, self.output_bytes = opener, keeper, output_bytes
        self.channel: Channel | None = None
        self.lock = trio.Lock()
        self.pid = ""  # inside
        self.nonce = b""
        self.received = b""
        self.unknown = False  # the last command's caller was cancelled: it may still run
        self.begun = False  # the shell has read the command: an interrupt before that would hit what it reads
        self.background = ""  # the shell's children that earlier commands left
        self.last_job = b""  # $! after the last command

    async def _start(self) -> None:
        channel = await self.opener.open(SHELL)
        try:
            await channel.write(SETUP.encode())
            text = b""
            while b"\n" not in text.partition(b"ready ")[2]:
                data = await channel.read()
                if not data:
                    raise InfraError(f"no shell starts in the sandbox: {text.decode(errors='replace').strip()}")
                text += data
        except BaseException:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                await channel.close()
            raise
        self.channel, self.pid = channel, text.partition(b"ready ")[2].split()[0].decode()
        self.received, self.background, self.last_job = b"", "", b""

    async def close(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            await channel.close()

    async def run(self, command: str, *, timeout_s: float) -> Completed:
        """As ``LocalShell.run``."""
        async with self.lock:
            if self.unknown and self.channel is not None and not await self._interrupt(Capped(0)):
                await self._replace()
            self.unknown = True
            if self.channel is None:
                await self._start()
            completed = await self._run(command, timeout_s)
            self.unknown = False
            return completed

    async def _run(self, command: str, timeout_s: float) -> Completed:
        assert self.channel is not None
        began = trio.current_time()
        kept = Capped(self.output_bytes)
        nonce = secrets.token_hex(8)
        self.nonce = nonce.encode()
        body = command.replace("\0", "")
        self.begun = False
        text = COMMAND.format(nonce=nonce, body=body)
        code: int | None = None
        with trio.move_on_after(timeout_s) as limit:
            await self.channel.write(text.encode(errors="surrogateescape"))
            code = await self._status_or_end(kept)
        if limit.cancelled_caught:
            restarted = not await self._interrupt(kept)
        else:
            restarted = code is None
            if restarted:
                code = await self.channel.code()
        if restarted:
            await self._replace()
        output, dropped = kept.finish()
        return Completed(code, output, b"", dropped, trio.current_time() - began, restarted)

    async def _status_or_end(self, kept: Capped) -> int | None:
        """As ``_status``; None also when the shell ended and a background process keeps its output open."""
        assert self.channel is not None
        channel, code = self.channel, None

        async def watch() -> None:
            await channel.code()
            await trio.sleep(DRAIN_S)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            code = await self._status(kept)
            nursery.cancel_scope.cancel()
        if code is None:
            kept.add(self.received)
            self.received = b""
        return code

    async def _status(self, kept: Capped, *, only_begin: bool = False) -> int | None:
        """The exit status of the command with the current nonce; None when the shell ended. Output before it is kept;
        what comes after it (from the background) belongs to the next command. ``only_begin``: until it has begun."""
        assert self.channel is not None
        mark = self.nonce + b" "
        while True:
            before, found, after = self.received.partition(mark)
            if found and after.startswith(b"begin\n"):
                kept.add(before)
                self.begun, self.received = True, after.removeprefix(b"begin\n")
                if only_begin:
                    return None
                continue
            if found and b"\n" in after:
                line, _, self.received = after.partition(b"\n")
                code, _, job = line.partition(b" ")
                kept.add(before)
                if job != self.last_job:
                    self.last_job, self.background = job, await self.keeper.ask(f"kids {self.pid}")
                return int(code)
            if not found:  # all but what may be the beginning of the mark
                keep = len(mark) - 1
                kept.add(self.received[:-keep] if len(self.received) > keep else b"")
                self.received = self.received[-keep:]
            data = await self.channel.read()
            if not data:
                return None
            self.received += data

    async def _interrupt(self, kept: Capped) -> bool:
        """Stop the running command, first as Ctrl-C would; whether the shell is at its prompt again."""
        with trio.move_on_after(0 if self.begun else BEGIN_S):
            if not self.begun:
                await self._status(kept, only_begin=True)
        if not self.begun:
            return False
        before = shlex.quote(self.background)
        whole = await self.keeper.ask(f'tree $(less "$(kids {self.pid})" {before})')
        for attempt in range(ROUNDS):
            if attempt < POLITE_ROUNDS:
                await self.keeper.ask(f"int {self.pid} {before}")
            else:
                await self.keeper.ask(f"kill -INT {self.pid}; new {self.pid} {before}")
            with trio.move_on_after(ROUND_S):
                back = await self._status(kept) is not None
                await self.keeper.ask(f"new {self.pid} {before}; end {whole}" if back else f"end {whole}")
                return back
        return False

    async def _replace(self) -> None:
        """End the shell and its last command's processes; the next command starts another."""
        await self.keeper.ask(f"new {self.pid} {shlex.quote(self.background)}; end {self.pid}")
        await self.close()


# ---------------------------------------------------------------- single programs

WRAPPER = 'printf "%s\\n" $$; cd -- "$1" || exit 1; shift; exec "$@"'


async def run_program(
    opener: Opener,
    keeper: Keeper,
    argv: Sequence[str],
    *,
    cwd: str,
    stdin: bytes,
    timeout_s: float,
    output_bytes: int,
    env: Mapping[str, str] | None = None,
) -> Completed:
    """One program to its end; at the time limit its tree is killed and ``code`` is None."""
    began = trio.current_time()
    words = [*(["env", *(f"{k}={v}" for k, v in env.items())] if env else []), *argv]
    out, err = Capped(output_bytes), Capped(output_bytes)
    code: int | None = None
    pid = b""
    with trio.move_on_after(timeout_s):
        async with opened(opener, ["sh", "-c", WRAPPER, "sh", cwd, *words]) as channel:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_feed, channel, stdin)
                    nursery.start_soon(_drain, channel, err)
                    while not pid.endswith(b"\n"):
                        data = await channel.read()
                        if not data:
                            break
                        line, found, rest = data.partition(b"\n")
                        pid += line + found
                        out.add(rest)
                    while data := await channel.read():
                        out.add(data)
                code = await channel.code()
            finally:
                if code is None and pid.strip().isdigit():
                    with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
                        await keeper.ask(f"end {int(pid)}")
    (output, dropped), (errors, dropped_errors) = out.finish(), err.finish()
    return Completed(code, output, errors, dropped + dropped_errors, trio.current_time() - began)


async def _feed(channel: Channel, data: bytes) -> None:
    """A program that ends without reading all of its stdin is no error."""
    try:
        for start in range(0, len(data), CHUNK):
            await channel.write(data[start : start + CHUNK])
        await channel.close_stdin()
    except (BrokenPipeError, trio.BrokenResourceError):
        pass


async def _drain(channel: Channel, kept: Capped) -> None:
    while data := await channel.read(errors=True):
        kept.add(data)
