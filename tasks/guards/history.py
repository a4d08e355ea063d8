"""A repository whose future is gone: rebuilt from what the base commit reaches, not cleaned of what it must not have.

Everything under ``.git`` is replaced by a fresh repository into which only the base commit's objects were fetched, so
there is nothing to forget: no reference, reflog, pack, stash, alternate, replacement, note, worktree, hook or remote of
the old one is left. Working files are untouched; tags that the base commit reaches stay (version numbers are made of
them). Needs git inside.
"""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

from uniagent.engine.errors import InfraError
from uniagent.engine.ports import Sandbox

BRANCH = "main"
TIMEOUT_S = 600.0
REBUILD = r"""
set -eu
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_NO_REPLACE_OBJECTS=1 GIT_TERMINAL_PROMPT=0
cd -- {root}
old=$(git rev-parse --absolute-git-dir)
base=$(git rev-parse --verify --quiet {base}'^{{commit}}')
rm -f "$old/info/grafts" "$old/shallow.lock"
fresh=$(mktemp -d "${{TMPDIR:-/tmp}}/history-XXXXXXXX")
git init -q -b {branch} "$fresh"
git update-ref refs/uniagent/base "$base"
set -- refs/uniagent/base:refs/heads/{branch}
for tag in $(git tag --merged "$base"); do set -- "$@" "refs/tags/$tag:refs/tags/$tag"; done
if [ -f "$old/shallow" ]; then cp "$old/shallow" "$fresh/.git/shallow"; fi
git -C "$fresh" -c protocol.version=2 fetch -q --no-tags --update-head-ok --no-write-fetch-head "file://$old" "$@"
name=$(git config user.name || true) email=$(git config user.email || true)
rm -rf -- "$old" .git
mv "$fresh/.git" .git
rm -rf -- "$fresh" .git/hooks .git/logs
git config core.logAllRefUpdates true
if [ -n "$name" ]; then git config user.name "$name"; fi
if [ -n "$email" ]; then git config user.email "$email"; fi
git reset -q
rm -rf .git/ORIG_HEAD .git/FETCH_HEAD .git/logs
echo "$base"
"""
LEFT = r"""
set -eu
cd -- {root}
git cat-file --batch-all-objects --batch-check='%(objectname) %(objecttype)' | sort > "${{TMPDIR:-/tmp}}/all-objects"
git rev-list --objects --no-object-names {base} > "${{TMPDIR:-/tmp}}/reached"
git for-each-ref --format='%(objectname)' refs/tags >> "${{TMPDIR:-/tmp}}/reached"
sort -u "${{TMPDIR:-/tmp}}/reached" | join -v 1 "${{TMPDIR:-/tmp}}/all-objects" -
rm -f "${{TMPDIR:-/tmp}}/all-objects" "${{TMPDIR:-/tmp}}/reached"
find .git/objects/info -name alternates -size +0 -printf 'alternates %p\n' 2>/dev/null || true
find .git -maxdepth 1 \( -name '*_HEAD' -o -name worktrees -o -name modules \) -printf 'left %p\n'
"""


async def rebuild(sandbox: Sandbox, root: PurePosixPath, base: str) -> str:
    """Replace the repository at ``root`` by one that ends at ``base`` (a commit, or HEAD); gives the full id. Raises
    InfraError when git cannot, or when anything that the base commit does not reach is still there."""
    said = await _shell(sandbox, REBUILD.format(root=shlex.quote(str(root)), base=shlex.quote(base), branch=BRANCH))
    commit = said.split()[-1]
    if left := await leftovers(sandbox, root, commit):
        raise InfraError(f"the repository {root} still holds what is younger than {commit[:12]}: {left[:3]}")
    return commit


async def leftovers(sandbox: Sandbox, root: PurePosixPath, base: str) -> list[str]:
    """Objects that ``base`` does not reach, and other ways to some."""
    return (await _shell(sandbox, LEFT.format(root=shlex.quote(str(root)), base=shlex.quote(base)))).splitlines()


async def _shell(sandbox: Sandbox, script: str) -> str:
    done = await sandbox.exec(["sh", "-c", script], timeout_s=TIMEOUT_S)
    if done.code != 0:
        said = (done.errors or done.output).decode(errors="replace").strip()
        raise InfraError(f"the repository could not be cut off at its base commit: {said[-500:] or done.code}")
    return done.output.decode(errors="replace")
