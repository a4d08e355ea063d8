"""Token counts that pass for token arrays, so that ten thousand long sessions cost no memory.

The router and the engines ask a prompt for its length and for its identity alone. A ``Prompt`` is the first ``length``
tokens of a session's one conversation, whose first ``shared`` tokens are the same for its whole group.
"""

from __future__ import annotations

from typing import Any

from attrs import field, frozen


@frozen
class Tokens:
    """So many tokens."""

    count: int

    def __len__(self) -> int:
        return self.count


@frozen
class Prompt:
    """What a generation continues. Equal prompts have equal ``tobytes``."""

    group: str
    session: str
    shared: int
    length: int
    _key: bytes = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        owner = self.group if self.length <= self.shared else self.session
        object.__setattr__(self, "_key", f"{owner}:{self.length}".encode())

    def __len__(self) -> int:
        return self.length

    def tobytes(self) -> bytes:
        return self._key

    @property
    def common(self) -> int:
        """Tokens that the whole group has."""
        return min(self.shared, self.length)


def as_ids(tokens: Tokens | Prompt) -> Any:
    """Where a port asks for an array and only its length and identity are looked at."""
    return tokens
