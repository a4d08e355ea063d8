"""Parts of verifiers: pure functions of what an episode left behind. Knows no task."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

from uniagent.engine.ports import AgentResult


def tree_differences(
    found: Mapping[PurePosixPath, bytes], expected: Mapping[str, str], *, trimmed: Collection[str] = ()
) -> dict[str, str]:
    """What keeps a tree of files from being the expected one, by path: ``missing``, ``unexpected`` or ``differs``. The
    files in ``trimmed`` are compared without white space at their ends."""

    def same(path: str, content: bytes) -> bool:
        wanted = expected[path].encode()
        return content.strip() == wanted.strip() if path in trimmed else content == wanted

    there = {str(path).encode("utf-8", "backslashreplace").decode(): content for path, content in found.items()}
    differences = dict.fromkeys(expected.keys() - there.keys(), "missing")
    differences |= dict.fromkeys(there.keys() - expected.keys(), "unexpected")
    differences |= {path: "differs" for path in there.keys() & expected.keys() if not same(path, there[path])}
    return dict(sorted(differences.items()))


def last_words(acted: AgentResult) -> str:
    """The text of the agent's last message; empty when it said none."""
    for message in reversed(acted.transcript):
        if message.get("role") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text", "") for part in content)
    return ""
