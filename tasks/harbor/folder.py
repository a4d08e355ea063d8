"""A task folder on this machine: its config, its instructions, its scripts; read once, checked whole.

Harbor's layout has ``task.toml``, ``instruction.md``, ``environment/``, ``tests/test.sh`` and ``solution/solve.sh``;
with steps each of them has ``steps/NAME/`` with its own. Terminal-Bench's has ``task.yaml``, ``run-tests.sh``,
``tests/`` and ``solution.sh``, and a ``Dockerfile`` at its root. Knows no sandbox.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import yaml
from attrs import frozen

from uniagent.engine.errors import UserError
from uniagent.tasks.harbor.schema import HarborConfig, read_toml, read_yaml, unknown

log = logging.getLogger(__name__)
CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)


@frozen
class Turn:
    """What one step (or the whole task, where it has none) asks and how it is judged. ``tests`` are folders that are
    laid over each other as /tests, and ``test`` is the script among them; ``solution`` becomes /solution, and ``solve``
    is its script (None: there is none); ``workdir`` is laid into the working directory first."""

    name: str
    instruction: str
    tests: tuple[Path, ...]
    test: Path
    solution: Path | None = None
    solve: Path | None = None
    workdir: Path | None = None


@frozen
class TaskFolder:
    """``exit_code``: the test script's exit status is the verdict, as Terminal-Bench has it. ``context``: the folder
    that a Dockerfile is built in."""

    path: Path
    config: HarborConfig
    turns: tuple[Turn, ...]
    context: Path
    exit_code: bool = False

    @property
    def dockerfile(self) -> Path | None:
        file = self.context / "Dockerfile"
        return file if file.is_file() else None


def read_folder(path: Path) -> TaskFolder:
    """Raises UserError that names the file and the key."""
    if (path / "task.toml").is_file():
        return _harbor(path)
    if (path / "task.yaml").is_file():
        return _terminal_bench(path)
    raise UserError(f"{path}: no task folder: it has neither task.toml (Harbor) nor task.yaml (Terminal-Bench)")


def _harbor(path: Path) -> TaskFolder:
    config = read_toml(path / "task.toml")
    for key in unknown(config):
        log.warning("%s: unknown key %s", path / "task.toml", key)
    steps = [(step.name, path / "steps" / step.name) for step in config.steps] or [("", path)]
    turns = tuple(_turn(path, name, folder) for name, folder in steps)
    context = path / "environment"
    for name in ("docker-compose.yaml", "singularity-compose.yaml"):
        if (context / name).exists():
            raise UserError(f"{context / name}: environments of several services are not supported here")
    if config.environment.docker_image is None and not (context / "Dockerfile").is_file():
        raise UserError(
            f"{path}: no environment: give environment/Dockerfile, or environment.docker_image in task.toml"
        )
    return TaskFolder(path, config, turns, context)


def _turn(path: Path, name: str, folder: Path) -> Turn:
    """One step in ``folder``; what it lacks is the task's own."""
    if not folder.is_dir():
        raise UserError(f"{path / 'task.toml'}: steps: there is no folder {folder}")
    if (folder / "trajectory.json").exists():
        raise UserError(f"{folder / 'trajectory.json'}: an agent cannot be given earlier context here")
    shared, own = path / "tests", folder / "tests"
    tests = tuple(dict.fromkeys(place for place in (shared, own) if place.is_dir()))
    scripts = [place / "test.sh" for place in (own, shared) if (place / "test.sh").is_file()]
    if not scripts:
        raise UserError(f"{own / 'test.sh'}: is missing: it judges the task")
    solutions = [place for place in (folder / "solution", path / "solution") if (place / "solve.sh").is_file()]
    workdir = folder / "workdir" if folder != path and (folder / "workdir").is_dir() else None
    solution = solutions[0] if solutions else None
    solve = None if solution is None else solution / "solve.sh"
    instruction = _instruction(folder / "instruction.md")
    return Turn(name, instruction, tests, scripts[0], solution, solve, workdir)


def _instruction(path: Path) -> str:
    """Without the canary lines at its beginning, which mark benchmark data and are not for the agent."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: is missing: it tells the agent what to do") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{path}: cannot be read: {problem}") from None
    while lines and CANARY.match(lines[0].strip()):
        del lines[0]
    text = "\n".join(lines).strip()
    if not text:
        raise UserError(f"{path}: is empty: it tells the agent what to do")
    return text


def _terminal_bench(path: Path) -> TaskFolder:
    config, instruction = read_yaml(path / "task.yaml")
    if not (path / "run-tests.sh").is_file():
        raise UserError(f"{path / 'run-tests.sh'}: is missing: it judges the task")
    if (path / "solution.yaml").exists():
        raise UserError(
            f"{path / 'solution.yaml'}: solutions of single keystrokes are not supported; write solution.sh"
        )
    if not (path / "Dockerfile").is_file():
        raise UserError(f"{path / 'Dockerfile'}: is missing: it makes the task's environment")
    _one_service(path / "docker-compose.yaml")
    solve = path / "solution.sh"
    tests = (path / "tests",) if (path / "tests").is_dir() else ()
    turn = Turn("", instruction.strip(), tests, path / "run-tests.sh", None, solve if solve.is_file() else None)
    return TaskFolder(path, config, (turn,), path, exit_code=True)


def _one_service(path: Path) -> None:
    """Raises UserError for a composition of more than the task's own container."""
    if not path.exists():
        return
    try:
        services = yaml.safe_load(path.read_text(encoding="utf-8"))["services"]
        number = len(services)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, KeyError) as problem:
        raise UserError(f"{path}: services: cannot be read: {problem!r}") from None
    if number != 1:
        raise UserError(f"{path}: services: {', '.join(services)}: only one is supported here")
