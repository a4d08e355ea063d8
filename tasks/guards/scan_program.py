"""A program of its own, run inside a sandbox: what stands where, as one line of JSON. The standard library alone.

stdin: ``{"deep": [roots], "flat": [directories], "keep": [paths not to enter], "out": path}``. The answer goes to the
file ``out``. ``files``: every path -> ``[kind, mode, size, mtime_ns, ctime_ns, sha256 or link target]``, where kind is
file, link, dir or other; ``site``: the interpreter's package directories; ``path``: the directories of PATH;
``processes``: the command lines that run; ``bytecode``: compiled files that are not what their source compiles to;
``taken``: the time, in ns. Under ``flat`` directories one level is listed, and only files that an interpreter runs by
itself are hashed; directories on a read-only file system are passed over.
"""

import hashlib
import json
import marshal
import os
import re
import site
import stat
import sys
import time
from importlib.util import find_spec
from typing import Any

LARGEST = 8 << 20
JUDGES = re.compile(r"_?pytest(_\w+)?|pluggy|xdist|_hypothesis\w*|hypothesis|nose2?|unittest2?|jest|mocha")
STARTED = (".pth", "sitecustomize.py", "usercustomize.py")


def digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(LARGEST)).hexdigest()


def entry(path: str, hashed: bool) -> list[Any]:
    status = os.lstat(path)
    mode = status.st_mode
    row = [stat.S_IMODE(mode), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    if stat.S_ISLNK(mode):
        return ["link", *row, os.readlink(path)]
    if stat.S_ISREG(mode):
        return ["file", *row, digest(path) if hashed else ""]
    return ["dir" if stat.S_ISDIR(mode) else "other", *row, ""]


def walk(root: str, keep: set[str], files: dict[str, list[Any]]) -> None:
    for here, directories, names in os.walk(root):
        directories[:] = [d for d in directories if os.path.join(here, d) not in keep]
        for name in [*directories, *names]:
            path = os.path.join(here, name)
            try:
                files[path] = entry(path, True)
            except OSError as problem:
                files[path] = ["other", 0, 0, 0, 0, str(problem)]


def flat(root: str, files: dict[str, list[Any]]) -> None:
    try:
        names = os.listdir(root)
    except OSError:
        return
    for name in names:
        path = os.path.join(root, name)
        try:
            files.setdefault(path, entry(path, name.endswith(STARTED)))
        except OSError:
            continue


def read_only(root: str) -> bool:
    try:
        return bool(os.statvfs(root).f_flag & os.ST_RDONLY)
    except OSError:
        return True


def judges(sites: list[str]) -> list[str]:
    """The packages that run tests, where they can be written to."""
    spec = find_spec("unittest")
    found = {os.path.dirname(spec.origin)} if spec is not None and spec.origin else set()
    for folder in sites:
        if os.path.isdir(folder):
            found |= {os.path.join(folder, n) for n in os.listdir(folder) if JUDGES.fullmatch(n)}
    return [folder for folder in sorted(found) if os.path.isdir(folder) and not read_only(folder)]


def processes() -> list[str]:
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) not in (1, os.getpid()):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if words:
                found.append(words[:500])
    return found


def forged(path: str) -> str | None:
    """Whether a compiled file is other than what its source gives; None: no longer used, or as it should be."""
    folder, name = os.path.split(path)
    in_cache = os.path.basename(folder) == "__pycache__"
    if in_cache and f".{sys.implementation.cache_tag}." not in name:
        return None
    source = os.path.join(os.path.dirname(folder), name.split(".")[0] + ".py") if in_cache else path[:-1]
    with open(path, "rb") as file:
        data = file.read(LARGEST)
    if not os.path.exists(source):
        return None if in_cache else "compiled code without a source"
    if not in_cache:
        return None
    with open(source, "rb") as file:
        text = file.read()
    flags = int.from_bytes(data[4:8], "little")
    if not flags:
        status = os.stat(source)
        stamp = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
        if stamp != (int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")):
            return None  # stale: never loaded
    try:
        levels = {1: ".opt-1.", 2: ".opt-2."}
        level = next((n for n, mark in levels.items() if mark in name), 0)
        same = marshal.loads(data[16:]) == compile(text, source, "exec", dont_inherit=True, optimize=level)
    except (ValueError, EOFError, TypeError, SyntaxError):
        same = False
    return None if same else "not what its source compiles to"


def main() -> None:
    asked = json.load(sys.stdin)
    files: dict[str, list[Any]] = {}
    for root in asked["deep"]:
        walk(root, set(asked["keep"]), files)
    here = [*site.getsitepackages(), site.getusersitepackages()]
    path = [d for d in os.environ.get("PATH", "").split(":") if d]
    for root in judges([*asked["flat"], *here]):
        walk(root, set(), files)
    for root in [*asked["flat"], *here, *path, os.path.expanduser("~")]:
        if not read_only(root):
            flat(root, files)
    bytecode = {}
    for name, row in files.items():
        if name.endswith(".pyc") and row[0] == "file":
            try:
                problem = forged(name)
            except OSError:
                continue
            if problem:
                bytecode[name] = problem
    answer: dict[str, Any] = {
        "files": files,
        "site": here,
        "path": path,
        "processes": processes(),
        "bytecode": bytecode,
    }
    answer["taken"] = time.time_ns()
    with open(asked["out"], "x") as out:
        json.dump(answer, out)


if __name__ == "__main__":
    main()
