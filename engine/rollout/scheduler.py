"""One scheduler for every mode: keeps groups of sessions running as far as admission and ``limit`` allow, and hands out
batches of complete groups.

Invariants
 - every group that starts ends in exactly one place: a batch, given back (no session counts, or refused by ``wanted``),
   or, after ``close``, ``leftover``;
 - at most ``limit`` sessions run, and no more than ``memory`` has room for where more than one group runs; groups start
   whole, in the order of the data;
 - a batch is made of the groups that were complete first; no group waits for another;
 - when a batch is asked for and nothing that runs or may start can fill it, ``Starved`` is raised: a deadlock is an
   error, not silence.

Synchronous training is this scheduler with a staleness threshold of 0 and one step a sync: then admission grants
exactly one batch between two syncs. Knows no policy, no engine and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import trio

from uniagent.engine.episode import Episode
from uniagent.engine.ports import Json
from uniagent.engine.rollout.admission import Admission
from uniagent.engine.rollout.memory import Memory

RunOne = Callable[[Mapping[str, Json], int, int], Awaitable[Episode]]  # (row, sample, replica) -> episode
Group = Sequence[Episode]


class Starved(RuntimeError):
    """A batch is wanted, and nothing under way can fill it. The message has the counters."""


class Scheduler:
    """``wanted`` says why a complete group fills no place in a batch (None: it does); ``returned`` sees those that do
    not."""

    def __init__(
        self,
        samples: Iterator[tuple[int, Mapping[str, Json]]],
        run_one: RunOne,
        admission: Admission,
        *,
        size: int,
        limit: int,
        wanted: Callable[[Group], str | None],
        returned: Callable[[Group, str], None],
        memory: Memory | None = None,
    ) -> None:
        if limit < size:
            raise ValueError(f"at most {limit} sessions, but a group has {size}: a group starts whole")
        self.admission = admission
        self.sessions = 0  # running
        self.leftover: list[Group] = []
        self._samples, self._run_one = samples, run_one
        self._size, self._limit = size, limit
        self._wanted, self._returned = wanted, returned
        self._memory = memory
        self._complete: deque[Group] = deque()
        self._changed = trio.Event()
        self._closed = self._dry = False
        self.ended = trio.Event()  # run() returned, or was cancelled

    async def run(self) -> None:
        """Start groups until closed and the last one ended, or cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                while not self._closed and not self._dry:
                    if self._may_start():
                        following = next(self._samples, None)
                        if following is None:
                            self._dry = True
                            self._notify()
                            break
                        self.admission.admit()
                        self.sessions += self._size
                        nursery.start_soon(self._group, *following)
                    else:
                        await self._changed.wait()
        finally:
            self.ended.set()

    async def batch(self, groups: int) -> list[Group]:
        """The next ``groups`` complete groups, ordered by sample. Fewer, or none, after ``close`` or at the end of the
        data."""
        while len(self._complete) < groups:
            if self._closed or (self._dry and not self.admission.running):
                break
            self._check_starved(groups)
            await self._changed.wait()
        taken = [self._complete.popleft() for _ in range(min(groups, len(self._complete)))]
        self.admission.consume(len(taken))
        return sorted(taken, key=lambda group: group[0].sample)

    def synced(self) -> None:
        """The engine has new weights: places of consumed groups are free."""
        self.admission.sync()
        self._notify()

    def close(self) -> None:
        """Start no group any more; what still ends, and what is buffered, goes to ``leftover``."""
        self._closed = True
        self.leftover.extend(self._complete)
        self._complete.clear()
        self._notify()

    def _may_start(self) -> bool:
        """Whether a group has room now, by admission, by number and by memory."""
        after = self.sessions + self._size
        if not self.admission.room or after > self._limit:
            return False
        return self._memory is None or not self.sessions or self._memory.fits(after)

    async def _group(self, sample: int, row: Mapping[str, Json]) -> None:
        episodes: dict[int, Episode] = {}

        async def one(replica: int) -> None:
            episodes[replica] = await self._run_one(row, sample, replica)
            if self._memory is not None:
                self._memory.note(episodes[replica])
            self.sessions -= 1
            self._notify()

        async with trio.open_nursery() as members:
            for replica in range(self._size):
                members.start_soon(one, replica)
        self._ended([episodes[replica] for replica in range(self._size)])

    def _ended(self, group: Group) -> None:
        if self._closed:
            self.leftover.append(group)
            self.admission.complete(fills=False)
        elif (cause := self._wanted(group)) is not None:
            self.admission.complete(fills=False)
            self._returned(group, cause)
        else:
            self.admission.complete(fills=True)
            self._complete.append(group)
        self._notify()

    def _check_starved(self, groups: int) -> None:
        a = self.admission
        if not a.running and not a.room:
            raise Starved(
                f"a batch needs {groups} groups, {len(self._complete)} are complete, none runs and none may start; "
                f"counters: {a.counters()}"
            )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
