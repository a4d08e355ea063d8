"""Makes Podman's image of the tests from programs of this machine, and says on one JSON line which words `podman run`
needs here. Exits with 1 and the reason where containers cannot run.

    UNIAGENT_PODMAN=$(python tests/sandboxes/podman_root.py) pytest -m slow tests/sandboxes/test_podman.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

IMAGE = "localhost/of-tests/root:1"
PROGRAMS = [
    *("bash", "basename", "cat", "chmod", "cp", "dirname", "echo", "env", "false", "grep", "head", "kill", "ln", "ls"),
    *("md5sum", "mkdir", "mkfifo", "printf", "pwd", "rm", "sed", "setsid", "sh", "sleep", "tail", "tar", "touch", "tr"),
    *("true", "wc", "yes"),
]
# as it is; where control groups are of both versions (crun refuses) and this user may not raise limits
ATTEMPTS = ([], ["--runtime=runc", "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"])


def make(root: Path) -> None:
    """A root file system with the programs and what they load."""
    root.mkdir(exist_ok=True)
    root.chmod(0o755)
    found = [path for name in PROGRAMS if (path := shutil.which(name, path="/usr/bin:/bin"))]
    listed = subprocess.run(["ldd", *found], capture_output=True, text=True, check=False).stdout
    libraries = {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    for source in {*found, *libraries}:
        target = root / source.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    (root / "bin").mkdir(exist_ok=True)
    for path in found:  # where /bin is a link on this machine
        if not (root / "bin" / Path(path).name).exists():
            shutil.copy(path, root / "bin" / Path(path).name)
    for name in ("tmp", "etc"):
        (root / name).mkdir()


def main() -> int:
    if shutil.which("podman") is None:
        print("podman is not installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        make(Path(temporary, "root"))
        archive = Path(temporary, "root.tar")
        with tarfile.open(archive, "w") as tar:
            tar.add(Path(temporary, "root"), arcname=".")
        done = subprocess.run(["podman", "import", archive, IMAGE], capture_output=True, text=True)
        said = done.stderr
        for words in ATTEMPTS if done.returncode == 0 else ():
            command = ["podman", "run", "--rm", "--init", "--network=none", "--memory=64m", *words, IMAGE, "true"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                print(json.dumps({"image": IMAGE, "arguments": words}))
                return 0
            said = done.stderr
    print(f"containers cannot run here: {said.strip()}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
