"""A Dockerfile read, and carried out in a sandbox that no container engine built: for the local backend.

The base image is what the sandbox already is; ENV, WORKDIR, COPY, ADD (of files) and RUN are carried out in order, with
the sandbox's own network. What needs a builder (several stages, ADD of URLs or archives, RUN --mount, another user) is
an error that names the line. Knows no task.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import trio
from attrs import field, frozen

from uniagent.adapters.sandboxes.bwrap import PATH
from uniagent.engine.errors import InfraError, UserError, nearest
from uniagent.engine.ports import Sandbox
from uniagent.tasks.scripts import checked, packed, run_script, unpack

VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
NOTHING_TO_DO = ("LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "VOLUME", "STOPSIGNAL", "MAINTAINER", "HEALTHCHECK")
KNOWN = (*NOTHING_TO_DO, "FROM", "ENV", "ARG", "WORKDIR", "COPY", "ADD", "RUN", "SHELL", "USER")
FILES_S = 60.0
HEREDOC = re.compile(r"<<-?\s*[\"']?(\w+)")


@frozen
class Instruction:
    """One instruction, variables replaced where Docker does so. ``workdir`` and ``env`` hold when it is carried out."""

    line: int
    word: str
    text: str
    workdir: PurePosixPath
    env: Mapping[str, str] = field(factory=dict)


@frozen
class Dockerfile:
    """``base`` as FROM names it; ``workdir`` and ``env`` at the end."""

    path: Path
    base: str
    instructions: tuple[Instruction, ...]
    workdir: PurePosixPath
    env: Mapping[str, str]


def read_dockerfile(path: Path) -> Dockerfile:
    """Raises UserError that names the line."""
    base, workdir = "", PurePosixPath("/")
    env: dict[str, str] = {}
    arguments = {"PATH": PATH}  # for ENV PATH=/more:$PATH
    found: list[Instruction] = []
    for line, word, text in _instructions(path):
        where = f"{path}:{line}: {word}"
        expanded = _expand(text, {**arguments, **env})
        if word == "FROM":
            if base or " as " in f" {text.lower()} ":
                raise UserError(f"{where}: several stages need a container engine")
            base = expanded
        elif word == "ENV":
            env.update(_pairs(expanded, where))
        elif word == "ARG":
            name, _, default = expanded.partition("=")
            arguments[name.strip()] = default.strip().strip("\"'")
        elif word == "WORKDIR":
            workdir = workdir / expanded.strip().strip("\"'")
        elif word == "USER":
            if expanded.strip() not in ("root", "0"):
                raise UserError(f"{where} {expanded}: another user needs a container engine")
        elif word == "RUN" and text.startswith("--"):
            raise UserError(f"{where} {text.split()[0]}: needs a container engine")
        elif word == "RUN":
            found.append(Instruction(line, word, text, workdir, {**arguments, **env}))
        elif word in ("COPY", "ADD"):
            found.append(Instruction(line, word, expanded, workdir, dict(env)))
        elif word not in (*NOTHING_TO_DO, "SHELL"):
            raise UserError(f"{path}:{line}: unknown instruction {word!r}: {nearest(word, KNOWN)}")
    if not base:
        raise UserError(f"{path}: it has no FROM")
    return Dockerfile(path, base, tuple(found), workdir, env)


async def replay(sandbox: Sandbox, dockerfile: Dockerfile, context: Path, *, timeout_s: float) -> None:
    """Carry it out. Raises UserError for a file of the context that is not there, InfraError for a command that
    fails."""
    with trio.move_on_after(timeout_s) as limit:
        for one in dockerfile.instructions:
            where = f"{dockerfile.path}:{one.line}: {one.word}"
            await checked(sandbox, ["mkdir", "-p", str(one.workdir)], where, timeout_s=FILES_S)
            if one.word == "RUN":
                ran = await run_script(sandbox, _shell(one.text), timeout_s=timeout_s, cwd=one.workdir, env=one.env)
                if ran.code != 0:
                    raise InfraError(f"{where} failed (exit status {ran.code}): {ran.log.strip()[-800:]}")
            else:
                await _copy(sandbox, one, context, where)
        await checked(sandbox, ["mkdir", "-p", str(dockerfile.workdir)], "WORKDIR", timeout_s=FILES_S)
    if limit.cancelled_caught:
        raise InfraError(f"{dockerfile.path}: took longer than environment.build_timeout_sec = {timeout_s:g} s")


async def _copy(sandbox: Sandbox, one: Instruction, context: Path, where: str) -> None:
    words = json.loads(one.text) if one.text.startswith("[") else shlex.split(one.text)
    options = [word for word in words if word.startswith("--")]
    if strange := [word for word in options if not word.startswith(("--chmod=", "--chown="))]:
        raise UserError(f"{where} {strange[0]}: needs a container engine")
    *sources, target = [word for word in words if not word.startswith("--")]
    place = one.workdir / target
    for source in sources:
        if "://" in source:
            raise UserError(f"{where} {source}: a URL needs a container engine")
        matches = sorted(context.glob(source.strip("/"))) if source.strip("./") else [context]
        if not matches:
            raise UserError(f"{where}: there is no {source!r} in {context}")
        for match in matches:
            into = target.endswith("/") or target in (".", "..") or len(sources) + len(matches) > 2
            await _put(sandbox, match, place, into=into)
    if modes := [word.partition("=")[2] for word in options if word.startswith("--chmod=")]:
        await checked(sandbox, ["chmod", "-R", modes[-1], str(place)], where, timeout_s=FILES_S)


async def _put(sandbox: Sandbox, source: Path, place: PurePosixPath, *, into: bool) -> None:
    """A folder's content into place, or a file as place (``into``: below it)."""
    if source.is_dir():
        await unpack(sandbox, await trio.to_thread.run_sync(packed, source), place)
        return
    target = place / source.name if into else place
    script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1" && chmod "$2" -- "$1"'
    argv = ["bash", "-c", script, "bash", str(target), f"{source.stat().st_mode & 0o777:o}"]
    await checked(sandbox, argv, f"cannot write {target}", stdin=source.read_bytes(), timeout_s=FILES_S)


def _shell(text: str) -> str:
    """The script of a RUN, in its shell or its exec form."""
    if text.startswith("["):
        return f"exec {shlex.join(json.loads(text))}\n"
    return f"set -e\n{text}\n"


def _instructions(path: Path) -> list[tuple[int, str, str]]:
    """(line, word, the rest) with continued lines and here-documents joined, comments left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{path}: cannot be read: {problem}") from None
    found = []
    number = 0
    while number < len(lines):
        first, text = number, lines[number].strip()
        number += 1
        if not text or text.startswith("#"):
            continue
        while text.endswith("\\") and number < len(lines):
            following = lines[number].strip()
            number += 1
            if not following.startswith("#"):
                text = f"{text[:-1].rstrip()} {following}"
        word, _, rest = text.partition(" ")
        if (match := HEREDOC.search(rest)) and word.upper() in ("RUN", "COPY", "ADD"):
            if word.upper() != "RUN":
                raise UserError(f"{path}:{first + 1}: {word}: a here-document needs a container engine")
            body = []
            while number < len(lines) and lines[number].strip() != match.group(1):
                body.append(lines[number])
                number += 1
            number += 1
            bare = rest.strip() == match.group(0)
            rest = "\n".join(body) if bare else "\n".join([rest, *body, match.group(1)])
        found.append((first + 1, word.upper(), rest.strip()))
    return found


def _pairs(text: str, where: str) -> dict[str, str]:
    """Of ``ENV a=b "c d"=e`` and of the old ``ENV a b c``."""
    words = shlex.split(text)
    if words and "=" not in words[0]:
        return {words[0]: text.strip().partition(" ")[2].strip()}
    if not words or not all("=" in word for word in words):
        raise UserError(f"{where} {text!r}: expected NAME=value")
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _expand(text: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(3)
        return values.get(name) or (match.group(2) or "")

    return VARIABLE.sub(value, text)
