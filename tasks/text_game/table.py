"""Where one session's game is played: a process that answers over pipes.

Invariants: one question at a time; the process ends when the table is closed or forgotten (its input ends), and a
process that ends before is an InfraError with what it said. The last answer stays readable after the close.
"""

from __future__ import annotations

import json
import subprocess
import sys

import attrs
import trio
from attrs import define, field

from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import Json
from uniagent.tasks.text_game.game import GameSpec, Seen, package

MODULE = "uniagent.tasks.text_game.game"
CHUNK = 1 << 16
CLOSE_S = 5.0


@define(eq=False)
class Table:
    """Made by ``open``. ``moves`` counts commands, ``unknown`` those that the game did not take."""

    process: trio.Process
    opening: str = ""
    seen: Seen = field(factory=lambda: Seen("", 0.0, 0.0, False, False))
    moves: int = 0
    unknown: int = 0
    _rest: bytes = b""
    _turn: trio.Lock = field(factory=trio.Lock)
    _closed: bool = False

    @classmethod
    async def open(cls, spec: GameSpec) -> Table:
        """A new game. Takes about two seconds where it has to be compiled first, else half a second."""
        package()
        command = [sys.executable, "-m", MODULE, json.dumps(attrs.asdict(spec))]
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        table = cls(process)
        try:
            table.opening, seen = await table._answer()
            table.seen = Seen(**seen)
        except BaseException:
            with trio.CancelScope(shield=True):
                await table.close()
            raise
        return table

    async def say(self, command: str) -> Seen:
        """One command, and what the game says. Raises UserError once the table is closed."""
        async with self._turn:
            if self.seen.done:
                return attrs.evolve(self.seen, text="The game is over.")
            self.seen = Seen(**await self._ask(command))
            self.moves += 1
            self.unknown += not self.seen.known
            return self.seen

    async def solution(self) -> list[str]:
        """Commands that win from here."""
        async with self._turn:
            found: list[str] = await self._ask(None)
            return found

    async def close(self) -> None:
        """End the process; again: nothing."""
        if self._closed:
            return
        self._closed = True
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        await self.process.stdin.aclose()
        with trio.move_on_after(CLOSE_S) as limit:
            await self.process.wait()
        if limit.cancelled_caught:
            self.process.kill()
            await self.process.wait()
        await self.process.stdout.aclose()

    async def _ask(self, question: str | None) -> Json:
        if self._closed:
            raise UserError("this game was scored, and takes no more commands")
        assert self.process.stdin is not None
        try:
            await self.process.stdin.send_all(json.dumps(question).encode() + b"\n")
        except trio.BrokenResourceError:
            await self._ended()
        return await self._answer()

    async def _answer(self) -> Json:
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            chunk = await self.process.stdout.receive_some(CHUNK)
            if not chunk:
                await self._ended()
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    async def _ended(self) -> None:
        raise InfraError(f"text_game: the game's process ended by itself, status {await self.process.wait()}")
