"""The sandbox in which kernels run: what is shown inside so that torch and Triton work there.

With the local provider they are those of this node, shown read-only: each package that torch, Triton and numpy need,
and no other, for what else is installed there may hold the answers. Elsewhere the image has ``python3`` with both.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from attrs import evolve
from packaging.requirements import Requirement

from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json
from uniagent.tasks.config import SandboxConfig, TaskConfig

NEEDED = ("torch", "triton", "numpy")
MEMORY_MIB = 4096


def shown(config: TaskConfig, device: str) -> TaskConfig:
    """The config with what kernels need in its sandbox section."""
    section = config.sandbox
    given: dict[str, Json] = dict(section.options)
    env = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}
    env |= {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    if _local(section):
        base = Path(sys.base_prefix).resolve()
        packages = needed_packages()
        env |= {"PATH": f"{base}/bin:/usr/bin:/bin", "TRITON_HOME": "/tmp", "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor"}
        env["PYTHONPATH"] = ":".join(dict.fromkeys(str(Path(path).parent) for path in packages))
        mounts = [*([] if str(base).startswith("/usr") else [str(base)]), *packages]
        given["read_only"] = list(dict.fromkeys([*given.get("read_only", ()), *mounts]))
        given.setdefault("memory_mib", MEMORY_MIB)
    given["env"] = {**env, **given.get("env", {})}
    return evolve(config, sandbox=evolve(section, options=given))


def _local(config: SandboxConfig) -> bool:
    return config.provider == "local" and not config.image


@cache
def needed_packages() -> tuple[str, ...]:
    """Paths of the installed packages that kernels need, with what those need. UserError when one is not there."""
    paths: dict[str, None] = {}
    seen: set[str] = set()
    waiting = list(NEEDED)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            one = distribution(name)
        except PackageNotFoundError:
            if name in NEEDED:
                raise UserError(f"the task kernel needs {name}: pip install 'uniagent[kernel]'") from None
            continue  # needed only by what nobody calls here
        paths |= dict.fromkeys(_tops(one))
        requirements = map(Requirement, one.requires or ())
        waiting += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return tuple(paths)


def _tops(one: Distribution) -> list[str]:
    """The folders and modules of a distribution, side by side in its site-packages."""
    tops = {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}
    found = (Path(str(one.locate_file(top))).resolve() for top in sorted(tops) if not top.endswith(".pth"))
    return [str(path) for path in found if path.exists()]
