"""How many sessions the engines' KV has room for: a limit that moves with the length of the sessions.

More sessions than that push each other's prefixes out while they wait for their tools, and every turn prefills its
whole conversation again: throughput falls where one more session should have raised it. A session holds half of its
final length on average over its life; the expected length is that of the latest sessions, a moving mean. Invariants:
one group always may run, so that the limit hangs nothing; until a session has ended there is no limit. Knows no engine
and no clock.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define

from uniagent.engine.episode import Episode

NEWEST = 0.02  # weight of the newest session in the expected length


@define
class Memory:
    """``total`` says how many tokens the engines hold, ``share`` how much of it running sessions are let hold,
    ``length`` how long an ended session has become, in tokens."""

    total: Callable[[], int]
    share: float
    length: Callable[[Episode], int]
    expected: float = 0.0  # tokens of a session at its end

    def note(self, episode: Episode) -> None:
        """A session ended."""
        if length := self.length(episode):
            self.expected += (length - self.expected) * (NEWEST if self.expected else 1.0)

    def fits(self, sessions: int) -> bool:
        """Whether so many sessions may run at once."""
        return sessions * self.expected / 2 <= self.share * self.total()


def longest(episode: Episode) -> int:
    """Tokens of its longest trajectory."""
    return max((len(t.token_ids) for t in episode.export.trajectories), default=0)
