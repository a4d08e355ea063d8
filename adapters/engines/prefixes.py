"""What a server elsewhere probably holds of a prompt, from what was sent to it and what its replies say was cached.

A belief, not a look into its memory. Invariants: only what was computed there is believed; least recently used blocks
go first, and when a reply shows that a block is gone, so is all that was used before it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from attrs import define, field

from uniagent.engine.ports import Ids

BLOCK = 32  # tokens
SLACK = 256  # a server may hold prefixes in blocks of up to this many tokens


@define
class Chain:
    """The digests of a sequence's whole blocks, each over all that comes before; the latest sequence's are kept, since
    every replica is asked about the same one."""

    _last: Ids | None = None
    _digests: tuple[bytes, ...] = ()

    def __call__(self, ids: Ids) -> tuple[bytes, ...]:
        if ids is not self._last:
            data, parent, found = ids.astype("<i4").tobytes(), b"", []
            for end in range(4 * BLOCK, len(data) + 1, 4 * BLOCK):
                parent = hashlib.blake2b(parent + data[end - 4 * BLOCK : end], digest_size=16).digest()
                found.append(parent)
            self._last, self._digests = ids, tuple(found)
        return self._digests


@define
class Prefixes:
    """Of one server, which has room for ``room`` tokens."""

    room: int
    chain: Chain = field(factory=Chain)
    _held: OrderedDict[bytes, int] = field(factory=OrderedDict)  # block -> when it was used last, oldest first
    _clock: int = 0

    def believed(self, prompt: Ids) -> list[int]:
        """When each block of the prompt that should be there was used last."""
        found = []
        for digest in self.chain(prompt):
            if (used := self._held.get(digest)) is None:
                break
            found.append(used)
        return found

    def resident(self, prompt: Ids) -> int:
        """Tokens."""
        return max(0, min(BLOCK * len(self.believed(prompt)), len(prompt) - 1))

    def hold(self, ids: Ids) -> None:
        """These were computed there just now."""
        self._clock += 1
        for digest in reversed(self.chain(ids)):  # a prefix is of more use than what follows it
            self._held[digest] = self._clock
            self._held.move_to_end(digest)
        while len(self._held) > self.room // BLOCK:
            self._held.popitem(last=False)

    def correct(self, believed: list[int], cached: int) -> None:
        """A reply said how many tokens of the prompt were cached, of what was ``believed`` when it was asked."""
        if cached + SLACK > BLOCK * len(believed):
            return
        gone = believed[cached // BLOCK]
        while self._held and next(iter(self._held.values())) <= gone:
            self._held.popitem(last=False)

    def clear(self) -> None:
        """The server was away, and may have begun anew."""
        self._held.clear()
