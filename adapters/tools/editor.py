"""``str_replace_editor``: view, create, str_replace, insert, undo_edit, with the error texts that agents know from it.

Files are read and written by programs inside the sandbox, so the agent's links, permissions and mounts count and
nothing outside can be reached. A file is edited whole or not at all. The undo history is this session's and lives here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from attrs import frozen

from uniagent.adapters.options import options
from uniagent.adapters.tools.text import shorten
from uniagent.engine.config import key
from uniagent.engine.ports import Json, Observation, Sandbox, ToolSchema

DESCRIPTION = (
    "View, create and edit files. `view` shows a file with line numbers, or lists a directory two levels deep. "
    "`create` makes a new file. `str_replace` replaces old_str, which must occur exactly once, by new_str. "
    "`insert` puts new_str after line insert_line. `undo_edit` takes back the last edit of a file."
)
COMMANDS = ("view", "create", "str_replace", "insert", "undo_edit")
CONTEXT = 4  # lines shown around an edit
READ = '[ -d "$1" ] && exit 21; [ -e "$1" ] || exit 44; exec cat -- "$1"'
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
LIST = r"""find "$1" -maxdepth 2 -not -path '*/.*' | sort"""


@frozen
class EditorOptions:
    """Keys of this tool in ``agent.tools``."""

    as_: str = key("str_replace_editor", "the name the model sees")
    description: str = key(DESCRIPTION, "what the model is told")
    max_chars: int = key(16000, "of an observation: the rest is cut out of its middle", at_least=16)
    timeout_s: float = key(30.0, "of one access to the sandbox", at_least=0.01)


class Refused(Exception):
    """Why an edit was not made, as the model is told."""


class Missing(Refused):
    """There is no such file."""

    def __init__(self, path: str) -> None:
        super().__init__(f"The path {path} does not exist. Please provide a valid path.")


class StrReplaceEditor:
    """``engine.ports.Tool``."""

    def __init__(self, sandbox: Sandbox, given: Mapping[str, Json]) -> None:
        self.sandbox = sandbox
        self.options = options(EditorOptions, given, "tool str_replace_editor")
        self.history: dict[str, list[str]] = {}
        text = {"type": "string"}
        parameters = {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": list(COMMANDS)},
                "path": {**text, "description": "absolute path"},
                "file_text": {**text, "description": "content of the new file (create)"},
                "old_str": {**text, "description": "text to replace (str_replace)"},
                "new_str": {**text, "description": "what comes in its place (str_replace, insert)"},
                "insert_line": {"type": "integer", "description": "line after which to insert; 0: at the top"},
                "view_range": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "description": "[first, last] line to view; last -1: to the end",
                },
            },
            "required": ["command", "path"],
        }
        self.schema = ToolSchema(self.options.as_, self.options.description, parameters)

    async def __call__(self, arguments: Mapping[str, Json]) -> Observation:
        try:
            text = await self._act(**arguments)
        except Refused as refusal:
            return Observation(str(refusal), problem="tool_error")
        return Observation(shorten(text, self.options.max_chars))

    async def _act(
        self,
        command: str,
        path: str,
        file_text: str | None = None,
        old_str: str | None = None,
        new_str: str | None = None,
        insert_line: int | None = None,
        view_range: list[int] | None = None,
        **_: Json,
    ) -> str:
        if not PurePosixPath(path).is_absolute():
            raise Refused(
                f"The path {path} is not an absolute path, it should start with `/`. "
                f"Maybe you meant {self.sandbox.workdir / path}?"
            )
        match command:
            case "view":
                return await self._view(path, view_range)
            case "create":
                return await self._create(path, _given("file_text", file_text, command))
            case "str_replace":
                return await self._replace(path, _given("old_str", old_str, command), new_str or "")
            case "insert":
                where = _given("insert_line", insert_line, command)
                return await self._insert(path, where, _given("new_str", new_str, command))
            case _:
                return await self._undo(path)

    # ------------------------------------------------------------ commands

    async def _view(self, path: str, lines: list[int] | None) -> str:
        text = await self._read(path)
        if text is None:
            if lines:
                raise Refused("The `view_range` parameter is not allowed when `path` points to a directory.")
            done = await self._run(LIST, path)
            listing = done.decode(errors="replace")
            return f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden items:\n{listing}"
        if lines is None:
            return _numbered(text, path)
        count = len(text.split("\n"))
        if len(lines) != 2:
            raise Refused("Invalid `view_range`. It should be a list of two integers.")
        first, last = lines
        if not 1 <= first <= count:
            raise Refused(
                f"Invalid `view_range`: {lines}. Its first element `{first}` should be within the range of lines of "
                f"the file: [1, {count}]"
            )
        if last > count:
            raise Refused(
                f"Invalid `view_range`: {lines}. Its second element `{last}` should be smaller than the number of "
                f"lines in the file: `{count}`"
            )
        if last != -1 and last < first:
            raise Refused(
                f"Invalid `view_range`: {lines}. Its second element `{last}` should be larger or equal than its first "
                f"`{first}`"
            )
        chosen = text.split("\n")[first - 1 : None if last == -1 else last]
        return _numbered("\n".join(chosen), path, first)

    async def _create(self, path: str, text: str) -> str:
        try:
            found = await self._read(path)
        except Missing:
            await self._write(path, text)
            self.history.setdefault(path, [])
            return f"File created successfully at: {path}"
        if found is None:
            raise Refused(_is_directory(path))
        raise Refused(f"File already exists at: {path}. Cannot overwrite files using command `create`.")

    async def _replace(self, path: str, old: str, new: str) -> str:
        text = await self._text(path)
        count = text.count(old) if old else 0
        if count == 0:
            raise Refused(f"No replacement was performed, old_str `{old}` did not appear verbatim in {path}.")
        if count > 1:
            lines = [text.count("\n", 0, m.start()) + 1 for m in re.finditer(re.escape(old), text)]
            raise Refused(
                f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines {lines}. "
                "Please ensure it is unique"
            )
        await self._edit(path, text, text.replace(old, new))
        line = text.count("\n", 0, text.index(old))
        return _edited(path, text.replace(old, new), line, new.count("\n"))

    async def _insert(self, path: str, line: int, new: str) -> str:
        text = await self._text(path)
        lines = text.split("\n")
        if not 0 <= line <= len(lines):
            raise Refused(
                f"Invalid `insert_line` parameter: {line}. It should be within the range of lines of the file: "
                f"[0, {len(lines)}]"
            )
        added = new.split("\n")
        changed = "\n".join([*lines[:line], *added, *lines[line:]])
        await self._edit(path, text, changed)
        return _edited(path, changed, line, len(added) - 1)

    async def _undo(self, path: str) -> str:
        if not self.history.get(path):
            raise Refused(f"No edit history found for {path}.")
        before = self.history[path][-1]
        await self._write(path, before)
        self.history[path].pop()
        return f"Last edit to {path} undone successfully. {_numbered(before, path)}"

    # ------------------------------------------------------------ the sandbox

    async def _edit(self, path: str, before: str, after: str) -> None:
        await self._write(path, after)
        self.history.setdefault(path, []).append(before)

    async def _text(self, path: str) -> str:
        text = await self._read(path)
        if text is None:
            raise Refused(_is_directory(path))
        return text

    async def _read(self, path: str) -> str | None:
        """The text of a file, None for a directory."""
        done = await self.sandbox.exec(["sh", "-c", READ, "sh", path], timeout_s=self.options.timeout_s)
        if done.code == 21:
            return None
        if done.code == 44:
            raise Missing(path)
        if done.code != 0:
            raise Refused(f"Cannot read {path}: {done.errors.decode(errors='replace').strip()}")
        if done.dropped:
            raise Refused(f"{path} is too large to be viewed or edited whole: use the shell.")
        try:
            return done.output.decode()
        except UnicodeDecodeError:
            raise Refused(f"{path} is not a text file in UTF-8.") from None

    async def _write(self, path: str, text: str) -> None:
        await self._run(WRITE, path, text.encode(errors="surrogateescape"))

    async def _run(self, script: str, path: str, stdin: bytes = b"") -> bytes:
        done = await self.sandbox.exec(
            ["sh", "-c", script, "sh", path], stdin=stdin, timeout_s=self.options.timeout_s
        )  # fmt: skip
        if done.code != 0:
            raise Refused(f"Cannot access {path}: {done.errors.decode(errors='replace').strip()}")
        return done.output


def _given(name: str, value: Json, command: str) -> Json:
    if value is None:
        raise Refused(f"Parameter `{name}` is required for command: {command}")
    return value


def _is_directory(path: str) -> str:
    return f"The path {path} is a directory and only the `view` command can be used on directories"


def _numbered(text: str, what: str, first: int = 1) -> str:
    lines = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(text.split("\n"), start=first))
    return f"Here's the result of running `cat -n` on {what}:\n{lines}\n"


def _edited(path: str, text: str, line: int, more: int) -> str:
    """The account of an edit that begins at ``line`` (from 0) and spans ``more`` lines after it."""
    start = max(0, line - CONTEXT)
    snippet = "\n".join(text.split("\n")[start : line + more + CONTEXT + 1])
    return (
        f"The file {path} has been edited. {_numbered(snippet, f'a snippet of {path}', start + 1)}"
        "Review the changes and make sure they are as expected. Edit the file again if necessary."
    )
