"""Limits of a whole sandbox by control groups, version 1 and 2, where this user may make them.

A sandbox's group is a child of the node's own group, so that limits above it go on counting. Where a controller cannot
be used (no delegation, a container without write access) ``limits`` leaves it to the resource limits of single
processes; ``uniagent sandbox doctor`` says which it is. Knows nothing of sandboxes but a label and a process id.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from uniagent.adapters.sandboxes.processes import send

CONTROLLERS = ("memory", "pids")


@frozen
class Hierarchy:
    """Where child groups with a controller can be made."""

    controller: str
    folder: Path
    version: int


def hierarchies(proc: Path = Path("/proc/self")) -> Mapping[str, Hierarchy]:
    """The usable controllers by name."""
    found: dict[str, Hierarchy] = {}
    own = _own_groups(proc)
    for root, mount, kind, controllers in _mounts(proc):
        version = 2 if kind == "cgroup2" else 1
        for controller in CONTROLLERS if version == 2 else controllers & set(CONTROLLERS):
            path = own.get("" if version == 2 else controller)
            if path is None or controller in found:
                continue
            folder = Path(mount, os.path.relpath(path, root)) if path.startswith(root) else Path(mount)
            if os.access(folder, os.W_OK) and (version == 1 or _delegated(folder, controller)):
                found[controller] = Hierarchy(controller, folder, version)
    return found


def _own_groups(proc: Path) -> dict[str, str]:
    """This process's group by controller; "" is version 2's."""
    groups: dict[str, str] = {}
    with suppress(OSError):
        for line in (proc / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _mounts(proc: Path) -> list[tuple[str, str, str, set[str]]]:
    """(root, mount point, file system, options) of every mounted hierarchy."""
    found = []
    with suppress(OSError):
        for line in (proc / "mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            kind, _, options = rest.split(" ", 2)
            if kind in ("cgroup", "cgroup2"):
                root, mount = fields.split(" ")[3:5]
                found.append((root, mount, kind, set(options.split(","))))
    return found


def _delegated(folder: Path, controller: str) -> bool:
    """Whether children of a version 2 group have the controller, after asking for it."""
    control = folder / "cgroup.subtree_control"
    with suppress(OSError):  # a group with processes of its own may not hand controllers on
        if controller not in control.read_text().split():
            control.write_text(f"+{controller}")
        return controller in control.read_text().split()
    return False


class Group:
    """The limits of one sandbox."""

    def __init__(self, usable: Mapping[str, Hierarchy], label: str, memory_mib: int | None, pids: int | None) -> None:
        """Raises OSError when a group cannot be made."""
        self.folders: list[Path] = []
        asked = {"memory": memory_mib, "pids": pids}
        try:
            for controller, hierarchy in usable.items():
                if (value := asked[controller]) is not None:
                    self._make(hierarchy, label, value)
        except OSError:
            self.close()
            raise

    def _make(self, hierarchy: Hierarchy, label: str, value: int) -> None:
        folder = hierarchy.folder / f"uniagent-{label}"
        if folder not in self.folders:
            folder.mkdir()
            self.folders.append(folder)
        if hierarchy.controller == "pids":
            (folder / "pids.max").write_text(str(value))
            return
        size = str(value << 20)
        (folder / ("memory.max" if hierarchy.version == 2 else "memory.limit_in_bytes")).write_text(size)
        swap = ("memory.swap.max", "0") if hierarchy.version == 2 else ("memory.memsw.limit_in_bytes", size)
        with suppress(OSError):  # a kernel without swap accounting has no such file
            (folder / swap[0]).write_text(swap[1])

    def enter(self, pid: int) -> None:
        """Put a process in; what it starts from then on is in too."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """End what is left in the groups and remove them. Blocks up to a second for what is slow to die; a group that
        stays is removed at the next start."""
        for folder in self.folders:
            for _ in range(100):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    with suppress(OSError):
                        send(map(int, (folder / "cgroup.procs").read_text().split()), signal.SIGKILL)
                    time.sleep(0.01)
        self.folders = []


def remove_left(usable: Mapping[str, Hierarchy], node: str) -> None:
    """Remove the groups of a node that is dead."""
    for hierarchy in usable.values():
        for folder in hierarchy.folder.glob(f"uniagent-{node}-*"):
            with suppress(OSError):
                folder.rmdir()
