"""Version spans from versions token by token."""

from __future__ import annotations

from collections.abc import Iterable

from uniagent.engine.ports import VersionSpan


def version_spans(versions: Iterable[int]) -> tuple[VersionSpan, ...]:
    """Runs of equal versions, covering all tokens in order."""
    spans: list[VersionSpan] = []
    version, start, end = -1, 0, 0
    for each in versions:
        if end > start and each != version:
            spans.append(VersionSpan(version, start, end))
            start = end
        version = each
        end += 1
    if end > start:
        spans.append(VersionSpan(version, start, end))
    return tuple(spans)
