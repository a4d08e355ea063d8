"""A lane onto the event loop: so many requests may begin their work in one round of the scheduler, the rest wait.

The loop runs every task that is ready before it looks at anything else. A burst of thousands of requests, each with
half a millisecond of parsing and encoding, would hold up the engine's results and every other session for seconds; in
single file it costs them nothing, and the requests wait no longer than they would anyway. Knows nothing of requests.
"""

from __future__ import annotations

import trio
from attrs import define, field

WIDTH = 8  # at about half a millisecond each, a round stays within a few milliseconds


@define(eq=False)
class Lane:
    width: int = WIDTH
    _line: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _news: trio.Event = field(factory=trio.Event)

    async def turn(self) -> None:
        """Waits in line; first come, first served."""
        self._news.set()
        await self._line.park()

    async def run(self) -> None:
        """Lets ``width`` waiters on in each round, until cancelled."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while len(self._line):
                self._line.unpark(count=self.width)
                await trio.lowlevel.checkpoint()
