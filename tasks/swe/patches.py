"""Which files a patch touches; pure."""

from __future__ import annotations

from attrs import frozen


@frozen
class Touched:
    """Paths relative to the repository, in the patch's order: those that exist ``before`` it, those that exist
    ``after`` it, and those it ``added``."""

    before: tuple[str, ...]
    added: tuple[str, ...]
    after: tuple[str, ...]


def touched(patch: str) -> Touched:
    """Of a patch as ``git diff`` writes it. Only file headers are read: a line of a hunk may look like one."""
    pairs: list[tuple[str | None, str | None]] = []
    old: str | None = None
    new: str | None = None
    header = False

    def close() -> None:
        if (old, new) != (None, None):
            pairs.append((old, new))

    for line in patch.splitlines():
        if line.startswith("diff --git "):
            close()
            old, new = _names(line)
            header = True
        elif line.startswith("@@"):
            header = False
        elif header and line.startswith("new file mode"):
            old = None
        elif header and line.startswith("deleted file mode"):
            new = None
        elif header and line.startswith("rename from "):
            old = line.removeprefix("rename from ")
        elif header and line.startswith("rename to "):
            new = line.removeprefix("rename to ")
    close()
    before = tuple(dict.fromkeys(old for old, _ in pairs if old is not None))
    after = tuple(dict.fromkeys(new for _, new in pairs if new is not None))
    return Touched(before, tuple(new for new in after if new not in before), after)


def _names(line: str) -> tuple[str, str]:
    """Both paths of ``diff --git a/x b/x``; without renames they are the same, which tells where a blank belongs."""
    rest = line.removeprefix("diff --git ")
    middle = len(rest) // 2
    if rest[middle : middle + 1] == " " and rest[:middle].partition("/")[2] == rest[middle + 1 :].partition("/")[2]:
        return rest[:middle].partition("/")[2], rest[middle + 1 :].partition("/")[2]
    old, _, new = rest.partition(" b/")
    return old.partition("/")[2], new
