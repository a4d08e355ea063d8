"""Running groups of sessions under a limit.

Invariants: a group starts whole or not at all; at most ``limit`` sessions run; every admitted group comes back once,
complete, in the order of admission; when one session raises, all are cancelled and the error goes on. Knows no
policy, no batch and no staleness.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

import trio

from uniagent.engine.episode import Episode
from uniagent.engine.ports import Json

RunOne = Callable[[Mapping[str, Json], int, int], Awaitable[Episode]]  # (row, sample, replica) -> episode


async def run_groups(
    rows: Iterable[tuple[int, Mapping[str, Json]]],
    run_one: RunOne,
    *,
    size: int,
    limit: int,
    stop: trio.Event | None = None,
) -> list[list[Episode]]:
    """Run ``size`` sessions of every (sample, row), at most ``limit`` at once; no group starts once ``stop`` is set."""
    places = trio.Semaphore(max(1, limit // size))
    groups: list[dict[int, Episode]] = []

    async def one(group: dict[int, Episode], row: Mapping[str, Json], sample: int, replica: int) -> None:
        group[replica] = await run_one(row, sample, replica)

    async def whole(group: dict[int, Episode], row: Mapping[str, Json], sample: int) -> None:
        async with trio.open_nursery() as members:
            for replica in range(size):
                members.start_soon(one, group, row, sample, replica)
        places.release()

    async with trio.open_nursery() as nursery:
        for sample, row in rows:
            await places.acquire()
            if stop is not None and stop.is_set():
                break
            group: dict[int, Episode] = {}
            groups.append(group)
            nursery.start_soon(whole, group, row, sample)
    return [[group[replica] for replica in range(size)] for group in groups]
