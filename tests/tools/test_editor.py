"""str_replace_editor on a real sandbox: what it does to files, and the texts agents know it by."""

from __future__ import annotations

from typing import Any

import pytest

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.adapters.sandboxes.local_sandbox import LocalSandbox
from uniagent.adapters.tools.editor import StrReplaceEditor
from uniagent.engine.ports import Observation

TEXT = "one\ntwo\nthree\nfour\nfive\nsix\nseven\n"


class Bench:
    """The tool on a sandbox; paths may start with ./ for the working directory."""

    def __init__(self, box: LocalSandbox, **options: Any) -> None:
        self.box, self.tool = box, StrReplaceEditor(box, options)

    async def __call__(self, command: str, path: str, **arguments: Any) -> Observation:
        return await self.tool({"command": command, "path": self.path(path), **arguments})

    def path(self, path: str) -> str:
        return path.replace("./", f"{self.box.workdir}/", 1) if path.startswith("./") else path

    async def text(self, path: str) -> str:
        return (await self.box.read(self.box.workdir / path)).decode()


async def test_a_working_day(isolation: str) -> None:
    provider = LocalProvider({"warm": 0, "isolation": isolation})
    async with provider, provider.open({"files": {"a.txt": TEXT, ".hidden": "", "d/e/f/deep": ""}}) as box:
        edit = Bench(box)
        a = edit.path("./a.txt")
        assert (await edit("create", "./new/b.txt", file_text="x\ny")).text == (
            f"File created successfully at: {box.workdir}/new/b.txt"
        )
        assert await edit.text("new/b.txt") == "x\ny"

        seen = await edit("view", "./a.txt", view_range=[2, 3])
        assert seen.text == f"Here's the result of running `cat -n` on {a}:\n     2\ttwo\n     3\tthree\n"
        assert (await edit("view", "./a.txt", view_range=[7, -1])).text.endswith("     7\tseven\n     8\t\n")
        listing = (await edit("view", "./")).text
        assert f"{box.workdir}/d/e\n" in listing
        assert "d/e/f" not in listing
        assert ".hidden" not in listing

        seen = await edit("str_replace", "./a.txt", old_str="four\n", new_str="4\n4.5\n")
        assert seen.text == (
            f"The file {a} has been edited. Here's the result of running `cat -n` on a snippet of {a}:\n"
            "     1\tone\n     2\ttwo\n     3\tthree\n     4\t4\n     5\t4.5\n     6\tfive\n     7\tsix\n"
            "     8\tseven\n     9\t\n"
            "Review the changes and make sure they are as expected. Edit the file again if necessary."
        )
        assert await edit.text("a.txt") == TEXT.replace("four\n", "4\n4.5\n")

        await edit("insert", "./a.txt", insert_line=0, new_str="zero")
        assert (await edit.text("a.txt")).startswith("zero\none\n")
        await edit("insert", "./a.txt", insert_line=2, new_str="a\nb")
        assert (await edit.text("a.txt")).startswith("zero\none\na\nb\ntwo\n")

        for _ in range(3):
            assert (await edit("undo_edit", "./a.txt")).text.startswith(f"Last edit to {a} undone successfully.")
        assert await edit.text("a.txt") == TEXT
        assert (await edit("undo_edit", "./a.txt")).text == f"No edit history found for {a}."


REFUSALS = [
    ({"command": "view", "path": "a.txt"}, "The path a.txt is not an absolute path, it should start with `/`. Maybe"),
    ({"command": "view", "path": "./no"}, "The path {w}/no does not exist. Please provide a valid path."),
    ({"command": "view", "path": "./d", "view_range": [1, 2]}, "The `view_range` parameter is not allowed when `path`"),
    ({"command": "view", "path": "./a.txt", "view_range": [9, 10]},
     "Invalid `view_range`: [9, 10]. Its first element `9` should be within the range of lines of the file: [1, 8]"),
    ({"command": "view", "path": "./a.txt", "view_range": [3, 2]},
     "Invalid `view_range`: [3, 2]. Its second element `2` should be larger or equal than its first `3`"),
    ({"command": "view", "path": "./a.txt", "view_range": [1, 99]},
     "Invalid `view_range`: [1, 99]. Its second element `99` should be smaller than the number of lines"),
    ({"command": "create", "path": "./a.txt", "file_text": ""},
     "File already exists at: {w}/a.txt. Cannot overwrite files using command `create`."),
    ({"command": "create", "path": "./b.txt"}, "Parameter `file_text` is required for command: create"),
    ({"command": "str_replace", "path": "./d", "old_str": "x"},
     "The path {w}/d is a directory and only the `view` command can be used on directories"),
    ({"command": "str_replace", "path": "./a.txt", "old_str": "eight"},
     "No replacement was performed, old_str `eight` did not appear verbatim in {w}/a.txt."),
    ({"command": "str_replace", "path": "./a.txt", "old_str": "e\n"},
     "No replacement was performed. Multiple occurrences of old_str `e\n` in lines [1, 3, 5]. Please ensure"),
    ({"command": "insert", "path": "./a.txt", "insert_line": 9, "new_str": "x"},
     "Invalid `insert_line` parameter: 9. It should be within the range of lines of the file: [0, 8]"),
    ({"command": "view", "path": "./binary"}, "{w}/binary is not a text file in UTF-8."),
    ({"command": "view", "path": "./big"}, "{w}/big is too large to be viewed or edited whole: use the shell."),
    ({"command": "create", "path": "/usr/x", "file_text": ""}, "Cannot access /usr/x:"),
]  # fmt: skip


async def test_refusals(confined: None) -> None:
    section = {"files": {"a.txt": TEXT, "d/": ""}, "output_mib": 0.01}
    async with LocalProvider({"warm": 0}) as provider, provider.open(section) as box:
        await box.write(box.workdir / "binary", b"\xff\x00")
        await box.write(box.workdir / "big", b"x" * 20000)
        edit = Bench(box)
        for arguments, text in REFUSALS:
            seen = await edit(**arguments)  # type: ignore[arg-type]
            assert seen.text.startswith(text.replace("{w}", str(box.workdir))), arguments
            assert seen.problem == "tool_error", arguments
        assert await edit.text("a.txt") == TEXT, "nothing was changed"


async def test_edits_through_the_agents_own_links_stay_inside(confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({"files": {"real": "old"}}) as box:
        await (await box.shell()).run("ln -s real link; ln -s /etc/passwd out", timeout_s=10)
        edit = Bench(box)
        await edit("str_replace", "./link", old_str="old", new_str="new")
        assert await edit.text("real") == "new"
        assert "agent:x:1000" in (await edit("view", "./out")).text, "the sandbox's own /etc"
        assert (await edit("str_replace", "./out", old_str="agent:x:1000", new_str="x")).text.startswith(
            "Cannot access"
        )


@pytest.mark.parametrize("text", ["no newline at end", "\n", "windows\r\nlines\r\n", "ü 🐚\n"])
async def test_content_is_kept_as_it_is(text: str, confined: None) -> None:
    async with LocalProvider({"warm": 0}) as provider, provider.open({}) as box:
        edit = Bench(box)
        await edit("create", "./f", file_text=text)
        assert (await box.read(box.workdir / "f")).decode() == text
        await edit("insert", "./f", insert_line=0, new_str="top")
        assert (await box.read(box.workdir / "f")).decode() == f"top\n{text}"
        await edit("undo_edit", "./f")
        assert (await box.read(box.workdir / "f")).decode() == text
