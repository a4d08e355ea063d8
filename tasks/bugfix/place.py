"""The sandbox a project lives in: what is shown inside so that its tests run, and what must not be.

With the local provider the node's own interpreter and a folder with pytest are shown read-only. Elsewhere the image has
``python3`` and pytest itself. The project must not be importable from there: it would be the fix.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from attrs import evolve

from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json
from uniagent.tasks.bugfix.project import Project, runtime
from uniagent.tasks.config import SandboxConfig, TaskConfig

FOLDER = "project"  # below the sandbox's working directory


def shown(config: SandboxConfig, project: Project) -> SandboxConfig:
    """The sandbox section with what tests need, where the provider is local."""
    if config.provider != "local" or config.image:
        return config
    place = runtime(project.requires)
    place.mkdir(parents=True, exist_ok=True)
    base = Path(sys.base_prefix).resolve()
    mounts = [str(place), *([] if str(base).startswith("/usr") else [str(base)])]
    given: dict[str, Json] = dict(config.options)
    env = {"PATH": f"{base}/bin:/usr/bin:/bin", **environment(config, project), **given.get("env", {})}
    read_only = list(dict.fromkeys([*given.get("read_only", ()), *mounts]))
    return evolve(config, options={**given, "env": env, "read_only": read_only})


def shown_in(config: TaskConfig, project: Project) -> TaskConfig:
    """A task's config with ``shown`` in place of its sandbox section."""
    return evolve(config, sandbox=shown(config.sandbox, project))


def environment(config: SandboxConfig, project: Project) -> dict[str, str]:
    """Variables of a process that runs the tests."""
    if config.provider != "local" or config.image:
        return {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}
    own = str(runtime(project.requires))
    return {"PYTHONPATH": own, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}


def python(config: SandboxConfig) -> str:
    if config.provider != "local" or config.image:
        return "python3"
    return str(Path(sys.base_prefix).resolve() / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


def refuse_installed(packages: Iterable[str]) -> None:
    """Raises UserError where the interpreter shown in local sandboxes has the project itself."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix).resolve()
    places = [base / "lib" / version / "site-packages", *map(Path, ("/usr/lib/python3/dist-packages",))]
    places += [Path(f"/usr/local/lib/{version}/{end}") for end in ("dist-packages", "site-packages")]
    for place in places:
        for package in packages:
            if (place / package).is_dir() or (place / f"{package}.py").is_file():
                raise UserError(
                    f"{place / package} is installed where agents can read it, and it holds the fix: uninstall it, or "
                    "run this task in a container"
                )


def root(workdir: PurePosixPath) -> PurePosixPath:
    return workdir / FOLDER
