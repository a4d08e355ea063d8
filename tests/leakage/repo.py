"""A small repository to repair, with a history that holds the fix: the worked example of the leak guard."""

from __future__ import annotations

from pathlib import PurePosixPath

from uniagent.engine.ports import Sandbox

BROKEN = """\
def chunked(items, size):
    \"\"\"Lists of at most ``size`` items.\"\"\"
    return [items[i : i + size] for i in range(0, len(items) - size, size)]
"""
FIXED = BROKEN.replace("len(items) - size", "len(items)")
TESTS = """\
import unittest

from splitter.core import chunked


class Chunks(unittest.TestCase):
    def test_even(self):
        self.assertEqual(chunked([1, 2, 3, 4], 2), [[1, 2], [3, 4]])

    def test_rest(self):
        self.assertEqual(chunked([1, 2, 3], 2), [[1, 2], [3]])

    def test_empty(self):
        self.assertEqual(chunked([], 2), [])
"""
SETUP_CFG = "[metadata]\nname = splitter\n\n[tool:pytest]\naddopts = -q\n"
FILES = {
    "splitter/__init__.py": "",
    "splitter/core.py": BROKEN,
    "tests/__init__.py": "",
    "tests/test_core.py": TESTS,
    "setup.cfg": SETUP_CFG,
    "README.md": "splitter\n",
}
HISTORY = """
set -e
export GIT_AUTHOR_DATE='2024-05-01T12:00:00Z' GIT_COMMITTER_DATE='2024-05-01T12:00:00Z'
git init -q -b main . && git config user.name a && git config user.email a@example.org
git add -A && git commit -q -m 'Chunks' && git tag v1.0
git rev-parse HEAD > /tmp/base
git checkout -q -b fix && printf '%s' "$FIXED" > splitter/core.py
git commit -q -am 'Fix the last chunk' && git tag v1.1
git rev-parse HEAD > /tmp/fix
git update-ref refs/pull/7/head HEAD && git notes add -m 'see the fix' HEAD
git checkout -q main && printf '%s' "$FIXED" > splitter/core.py && git stash -q
printf '%s' "$FIXED" > splitter/core.py && git commit -q -am 'amended away' && git reset -q --hard v1.0
git remote add origin https://forge.example/acme/splitter.git
git gc -q
"""


async def plant(sandbox: Sandbox) -> tuple[str, str]:
    """The repository at its base, in the working directory; gives the ids of the base commit and of the fix."""
    for path, text in FILES.items():
        await sandbox.write(sandbox.workdir / path, text.encode())
    done = await sandbox.exec(["sh", "-c", HISTORY], env={"FIXED": FIXED}, timeout_s=60)
    assert done.code == 0, done.errors
    base = (await sandbox.read(PurePosixPath("/tmp/base"))).decode().strip()
    fix = (await sandbox.read(PurePosixPath("/tmp/fix"))).decode().strip()
    await sandbox.exec(["rm", "/tmp/base", "/tmp/fix"], timeout_s=10)
    return base, fix
