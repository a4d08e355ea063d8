"""``command``: any agent program as a black box, and what every external harness is run by.

The program runs in the sandbox, in a home directory of its own, with the session's gateway as its only way to the model
where the sandbox has no network. Its turns and tokens are limited at the gateway, its time here: it is stopped a little
before whoever runs the agent would give up, so that what it left can still be told. What it started and left running
is killed when it ends. Knows harnesses only as recipes.

``AgentResult.info``: ``stop`` (exit, timeout, max_steps), ``exit_code``, ``stderr`` (its end), ``seconds``, ``reaped``
(processes it left running), ``error``, and the transcript's own counters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Protocol

import trio
from attrs import evolve, frozen

from uniagent.adapters.agents.recipe import Recipe, fill, prompt_text
from uniagent.adapters.agents.transcripts import Told
from uniagent.adapters.options import options
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import AgentResult, Completed, Json, Messages, ModelEndpoint, Sandbox
from uniagent.engine.registry import load

LEAVE_S = 10.0  # kept of the time limit for what comes after the program; of a short one, a quarter
GRACE_S = 3.0  # for a program to end by itself once it may ask no more
STEP_S = 30.0  # for each small command of ours
INSTALL_S = 900.0
TAIL = 2000  # characters of stderr in the result
TRANSCRIPT_BYTES = 16 << 20
# $1: programs; $2: the program. Prints the new home, and whether the program is missing.
PREPARE = """home=$(mktemp -d "${TMPDIR:-/tmp}/harness-XXXXXX") && echo "$home" || exit 1
PATH=$1:$PATH; command -v -- "$2" >/dev/null || echo missing"""
WRITE = 'mkdir -p -- "${1%/*}" && cat > "$1"'
START = 'PATH=$1:$PATH; export PATH; shift; exec "$@"'
# $1: NAME=value that every process of the program has inherited. Twice: one may have been forking.
REAP = """for round in 1 2; do for file in $(grep -Flsa -e "$1" /proc/[0-9]*/environ); do
pid=${file#/proc/}; kill -9 "${pid%/environ}" 2>/dev/null && echo; done; done; true"""


class AgentSettings(Protocol):
    """The ``agent`` section of a task."""

    @property
    def name(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Json]: ...


class CommandAgent:
    """``engine.ports.Agent``; stateless, so one may run many episodes."""

    def __init__(self, base: Recipe, settings: AgentSettings) -> None:
        """Raises UserError for an unknown key or value, and for a recipe without a command."""
        self.where = f"agent {settings.name}"
        given = options(Recipe, settings.options, f"{self.where}: options")
        self.recipe = laid_on(base, {name: getattr(given, name) for name in settings.options})
        if not self.recipe.command:
            raise UserError(f"{self.where}: options.command is missing: the argv of the program to run")
        self.read: Callable[[str], Told] = load("transcripts", self.recipe.transcript)

    @property
    def read_only(self) -> tuple[str, ...]:
        """Host paths that a local sandbox must show for it."""
        return shown(Path(self.recipe.programs)) if self.recipe.programs else ()

    async def run(self, prompt: Messages, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        """Raises UserError where the program is not in the sandbox and cannot be installed."""
        async with sandbox.reach(model) as near:
            return await self._run(prompt_text(prompt), sandbox, near)

    async def _run(self, prompt: str, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        recipe, programs = self.recipe, self.recipe.programs
        values = {
            "base_url": model.base_url,
            "openai_base_url": model.openai_base_url,
            "api_key": model.api_key,
            "model": model.model_name,
            "prompt": prompt,
            "workdir": str(sandbox.workdir),
            "programs": programs,
        }
        home, missing = await self._prepare(sandbox, f"{programs}/bin", fill(recipe.command[0], values))
        values |= {"home": home, "prompt_file": f"{home}/prompt.txt"}
        mark = {"UNIAGENT_HOME": home}
        env = {**{name: fill(value, values) for name, value in recipe.env.items()}, "HOME": home, **mark}
        if missing:
            await self._install(sandbox, fill(recipe.install, values), env)
        files = {"prompt.txt": "{prompt}"} if "{prompt_file}" in repr(recipe) else {}
        for name, text in {**files, **recipe.files}.items():
            path = f"{home}/{fill(name, values)}"
            await self._step(sandbox, ["sh", "-c", WRITE, "sh", path], stdin=fill(text, values).encode())
        command = [fill(part, values) for part in (*recipe.command, *recipe.args)]
        spent = False

        async def stop_when_spent() -> None:
            nonlocal spent
            if model.spent is not None:
                await model.spent()
                spent = True
                await trio.sleep(GRACE_S)
                await self._reap(sandbox, home)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_when_spent)
            done = await sandbox.exec(
                ["sh", "-c", START, "sh", f"{programs}/bin", *command],
                stdin=fill(recipe.stdin, values).encode(),
                timeout_s=_time_left(),
                env=env,
            )
            nursery.cancel_scope.cancel()
        reaped = await self._reap(sandbox, home)
        told = await self._told(sandbox, PurePosixPath(home), done)
        return result(recipe, command[0], done, told, spent=spent, reaped=reaped)

    async def _prepare(self, sandbox: Sandbox, path: str, program: str) -> tuple[str, bool]:
        """A new home, and whether the program is missing."""
        done = await self._step(sandbox, ["sh", "-c", PREPARE, "sh", path, program])
        home, *missing = done.output.decode().split("\n")
        return home, "missing" in missing

    async def _step(self, sandbox: Sandbox, argv: Sequence[str], stdin: bytes = b"") -> Completed:
        done = await sandbox.exec(argv, stdin=stdin, timeout_s=STEP_S)
        if done.code != 0:
            said = done.errors.decode(errors="replace").strip() or f"exit code {done.code}"
            raise InfraError(f"{self.where}: a step around the program failed in the sandbox: {said}")
        return done

    async def _reap(self, sandbox: Sandbox, home: str) -> int:
        """Kill every process of the run; how many there were."""
        done = await self._step(sandbox, ["sh", "-c", REAP, "sh", f"UNIAGENT_HOME={home}"])
        return done.output.count(b"\n")

    async def _install(self, sandbox: Sandbox, script: str, env: Mapping[str, str]) -> None:
        program = self.recipe.command[0]
        if not script:
            raise UserError(
                f"{self.where}: there is no program {program!r} in the sandbox: install it with `uniagent harness "
                "install` and name its folder in agent.options.programs, use an image that has it, or give "
                "agent.options.install"
            )
        done = await sandbox.exec(["sh", "-c", script], timeout_s=INSTALL_S, env=env)
        if done.code != 0:
            said = (done.errors or done.output).decode(errors="replace").strip()[-TAIL:]
            raise InfraError(f"{self.where}: its install recipe ended with {done.code}: {said}")

    async def _told(self, sandbox: Sandbox, home: PurePosixPath, done: Completed) -> Told:
        output = done.output
        if self.recipe.transcript_file:
            output = b""
            with suppress(OSError):  # a program that was stopped may not have written it
                output = await sandbox.read(home / self.recipe.transcript_file, limit=TRANSCRIPT_BYTES)
        return self.read(output.decode(errors="replace"))


@frozen
class Harness:
    """A named harness: its recipe, and the pinned packages that ``uniagent harness install`` installs it from. The
    registry's entry; called with a task's settings it gives the agent."""

    recipe: Recipe
    installer: str  # npm | pip
    packages: tuple[str, ...]  # the first is the harness itself, NAME@VERSION or NAME==VERSION
    ends_by: str | None = None  # the shell command that ends a session, where an answer without a call does not

    def __call__(self, settings: AgentSettings) -> CommandAgent:
        return CommandAgent(self.recipe, settings)


command = partial(CommandAgent, Recipe())


def laid_on(base: Recipe, over: Mapping[str, object]) -> Recipe:
    """A recipe with some keys changed: tables are merged, everything else is replaced."""
    changes = {}
    for name, value in over.items():
        below = getattr(base, name)
        changes[name] = {**below, **value} if isinstance(value, Mapping) else value
    return evolve(base, **changes)  # type: ignore[arg-type]


def shown(programs: Path) -> tuple[str, ...]:
    """Host paths that the programs in a folder need: the folder, and the Python that a virtual environment was made
    from where that lies outside /usr."""
    paths = [str(programs)]
    with suppress(FileNotFoundError):
        for line in (programs / "pyvenv.cfg").read_text().splitlines():
            name, _, value = line.partition("=")
            home = Path(value.strip())
            if name.strip() == "home" and not home.is_relative_to("/usr"):
                paths.append(str(home.parent))
    return tuple(paths)


def result(recipe: Recipe, program: str, done: Completed, told: Told, *, spent: bool, reaped: int) -> AgentResult:
    """What an ended program comes to. ``spent``: it asked for more generations than it may have."""
    stderr = done.errors.decode(errors="replace").strip()[-TAIL:]
    stop, error = "exit", told.error
    if spent:
        stop, error = "max_steps", "it asked for more generations than agent.max_steps"
    elif done.timed_out:
        stop, error = "timeout", f"{program} was stopped at its time limit, after {done.duration_s:.0f} s"
    elif error is None and done.code not in recipe.ok:
        last = stderr.splitlines()[-1] if stderr else "it said nothing on stderr"
        error = f"{program} ended with exit code {done.code}: {last}"
    info: dict[str, Json] = {
        **told.info,
        "stop": stop,
        "exit_code": done.code,
        "stderr": stderr,
        "seconds": round(done.duration_s, 3),
        "reaped": reaped,
        **({"error": error} if error else {}),
    }
    return AgentResult(error is None, told.messages, info)


def _time_left() -> float:
    """Seconds the program may run: until a little before the caller's deadline."""
    left = trio.current_effective_deadline() - trio.current_time()
    return left if math.isinf(left) else max(0.0, left - min(LEAVE_S, left / 4))
