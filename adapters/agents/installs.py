"""Installs the pinned programs of the named harnesses on this machine, with the registries' ordinary clients.

Each harness gets a folder of its own, ``DIR/NAME`` with its programs in ``bin``: what ``agent.options.programs`` takes.
A folder that holds the pinned version already is left as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from uniagent.adapters.agents.command import Harness
from uniagent.engine.errors import UserError
from uniagent.engine.registry import load, names

STAMP = ".uniagent-installed"
TIMEOUT_S = 1800


def harnesses() -> list[str]:
    """The names that can be installed."""
    return [name for name in names("agents") if isinstance(load("agents", name), Harness)]


def install(folder: Path, name: str) -> Path:
    """The folder with the harness's programs. Raises UserError with what the client said."""
    harness = load("agents", name)
    if not isinstance(harness, Harness):
        raise UserError(f"{name} is no external harness with pinned packages: {', '.join(harnesses())}")
    return install_packages(folder / name, harness.installer, harness.packages)


def install_packages(target: Path, installer: str, packages: Sequence[str]) -> Path:
    """Packages of npm or pip into a folder of their own. Raises UserError."""
    stamp = target / STAMP
    if stamp.exists() and stamp.read_text().split() == list(packages):
        return target
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    if installer == "npm":
        if shutil.which("npm") is None:
            raise UserError(f"installing {packages[0]} needs npm, and there is none: install Node.js")
        _run(["npm", "install", "--global", "--prefix", str(target), "--no-fund", "--no-audit", *packages])
    else:
        _run([sys.executable, "-m", "venv", str(target)])
        _run([str(target / "bin/python"), "-m", "pip", "install", "--quiet", *packages])
    stamp.write_text("\n".join(packages))
    return target


def installed(folder: Path | None, name: str) -> Path | None:
    """Where a harness was installed to; None when it was not, or in another version than the pinned one."""
    if folder is None:
        return None
    stamp = folder / name / STAMP
    harness = load("agents", name)
    found = stamp.exists() and isinstance(harness, Harness) and stamp.read_text().split() == list(harness.packages)
    return folder / name if found else None


def _run(command: list[str]) -> None:
    env = {**os.environ, "npm_config_loglevel": "error", "npm_config_update_notifier": "false"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`{' '.join(command)}` did not end within {TIMEOUT_S} s: can the registry be reached?"
        ) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise UserError(f"`{' '.join(command)}` failed; can the registry be reached? It said:\n{said}")
