"""The process that starts sandboxes: one bash outside of them, so that the node only writes a line.

Starting a program from the node itself would hold its interpreter and its event loop for as long as the kernel takes,
many times a second. Each kind of sandbox becomes a function here once; a sandbox is then a call of it with its two
folders. What it starts dies with it, and it ends when the node does, however that happens.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

import trio

from uniagent.adapters.sandboxes.pipes import write_all
from uniagent.engine.errors import InfraError, UserError

FOLDER, PIPES = "@FOLDER@", "@PIPES@"  # stand for a sandbox's folders in the words of a kind
BASH = ("bash", "--norc", "--noprofile")


class Starter:
    """Start and stop with the provider; ``start`` may be called by many tasks."""

    def __init__(self) -> None:
        """Raises UserError where there is no bash."""
        if shutil.which("bash") is None:
            raise UserError("the local sandbox needs bash, and there is none on the PATH: install it")
        environment = {"PATH": os.environ.get("PATH", os.defpath)}
        self.process = subprocess.Popen(
            BASH, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=environment, start_new_session=True, bufsize=0, cwd="/",
        )  # fmt: skip
        assert self.process.stdin is not None
        self.requests = self.process.stdin.fileno()
        os.set_blocking(self.requests, False)
        self.kinds: dict[tuple[str, ...], str] = {}
        self.lock = trio.Lock()

    async def start(self, words: Sequence[str], folder: str, pipes: str) -> None:
        """Start a program whose stdin is the FIFO pipes/requests and whose output goes to pipes/replies; its process id
        is in pipes/pid before it runs. Raises InfraError when the starter is gone."""
        kind = tuple(words)
        text = ""
        if kind not in self.kinds:
            self.kinds[kind] = f"kind_{len(self.kinds)}"
            call = shlex.join(words).replace(FOLDER, '"$1"').replace(PIPES, '"$2"')
            text = f'{self.kinds[kind]}() {{ echo $BASHPID >"$2"/pid; exec {call}; }}\n'
        paths = shlex.join((folder, pipes))
        ends = f"<{shlex.quote(pipes + '/requests')} >{shlex.quote(pipes + '/replies')} 2>&1"
        text += f"{self.kinds[kind]} {paths} {ends} &\n"
        try:
            async with self.lock:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
                    await write_all(self.requests, text.encode(errors="surrogateescape"))
                    return
        except BrokenPipeError:
            pass
        raise InfraError("the process that starts sandboxes is gone: was it killed?")

    def close(self) -> None:
        """End it, and with it whatever it started that still runs."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.kill()
        self.process.wait()
