"""Where the sandboxes of one node keep their files, and what a node that crashed left behind.

A node's folder is labelled by an exclusive lock that the node holds while it lives: whoever can take the lock knows
that the node is dead, whatever happened to its process id since.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import tempfile
from pathlib import Path

from uniagent.adapters.sandboxes.hostfiles import remove
from uniagent.adapters.sandboxes.processes import holding, marked, send

MARK = "UNIAGENT_SANDBOX"  # environment variable of every process of a sandbox: its folder


def root_folder(root: str | None = None, *, fast: bool = False) -> Path:
    """The folder above all nodes of this user, made private to it. ``fast``: on memory where there is some, for pipes
    (a disk takes up to half a millisecond to make one)."""
    shm = Path("/dev/shm")
    above = shm if fast and os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    path = Path(root) if root else above / f"uniagent-sandboxes-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{path} belongs to another user; set root in [sandbox.options.local] to a folder of yours"
        )
    return path


class NodeFolder:
    """One node's folder, locked while the node lives."""

    def __init__(self, root: Path) -> None:
        self.path = root / f"{os.getpid()}-{secrets.token_hex(4)}"
        # locked under another name first: a reaper must not take a folder between its making and its locking
        making = root / f".{self.path.name}"
        making.mkdir(mode=0o700)
        self.lock = os.open(making / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        making.rename(self.path)

    def close(self) -> None:
        remove(str(self.path))
        os.close(self.lock)


def living(root: Path, label: str) -> bool:
    """Whether the node with this label holds its lock."""
    try:
        lock = os.open(root / label / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def reap(root: Path) -> list[str]:
    """Remove what dead nodes left: processes without a namespace of their own, and folders. Gives their labels."""
    reaped = []
    for path in sorted(root.iterdir()):
        label = path.name
        if label.startswith("."):
            continue
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            # by its pipes: a sandbox whose confinement died while it started; by its mark: one without confinement. The
            # lock is open in whoever else is reaping
            pids = [*holding(f"{path}/", but=f"{path}/lock"), *marked(f"{MARK}={path}/".encode())]
            send(pids, signal.SIGKILL)
            remove(str(path))
            reaped.append(label)
        finally:
            os.close(lock)
    return reaped
