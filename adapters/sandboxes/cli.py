"""``uniagent sandbox doctor|reap``: which backends work here and how fast, and removing what dead nodes left."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import trio
from attrs import asdict, frozen

from uniagent.adapters.sandboxes.bwrap import find_bwrap
from uniagent.adapters.sandboxes.cgroups import CONTROLLERS, hierarchies
from uniagent.adapters.sandboxes.cloud import CloudOptions
from uniagent.adapters.sandboxes.container import ContainerProvider
from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.adapters.sandboxes.node_dir import reap, root_folder
from uniagent.adapters.sandboxes.runc import RuncProvider
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.registry import load

STARTS, COMMANDS = 20, 50
CLOUD_STARTS = 2
CLOUDS = ("modal", "e2b", "daytona")


@frozen
class Finding:
    """One backend on this machine. Milliseconds are medians; ``advice`` is what to do where it does not work."""

    backend: str
    works: bool
    start_ms: float | None = None
    command_ms: float | None = None
    detail: str = ""
    advice: str = ""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="uniagent sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="doctor|reap")
    for name, about in (("doctor", "which backends work here"), ("reap", "remove what dead nodes left behind")):
        command = commands.add_parser(name, help=about)
        command.add_argument("--json", action="store_true", help="the result as one JSON line on standard output")
        command.add_argument("--root", help="root of [sandbox.options.local], where it is set")
        if name == "doctor":
            command.add_argument("--image", help="image reference, or folder of a root: time containers of it too")
            command.add_argument("--cloud", action="store_true", help="time sandboxes of cloud services too; they cost")
    arguments = parser.parse_args(argv)
    return _doctor(arguments) if arguments.command == "doctor" else _reap(arguments)


def _reap(arguments: argparse.Namespace) -> int:
    roots = dict.fromkeys([root_folder(arguments.root), root_folder(fast=True)])
    labels = [label for root in roots for label in reap(root)]
    labels += trio.run(_reap_elsewhere, _people(arguments))
    print(f"removed {len(labels)}: {', '.join(labels) or 'nothing was left behind'}", file=_people(arguments))
    if arguments.json:
        print(json.dumps({"reaped": labels}))
    return 0


async def _reap_elsewhere(out: Any) -> list[str]:
    """Of every backend that can be asked: providers remove what dead nodes left when they are entered."""
    labels: list[str] = []
    for name in ("container", "runc", *CLOUDS):
        provider: Any = load("sandboxes", name)()
        try:
            async with provider:
                labels += provider.reaped
        except UserError:  # not there, or not set up
            continue
        except InfraError as problem:
            print(f"{name}: {problem}", file=out)
    return labels


def _doctor(arguments: argparse.Namespace) -> int:
    findings = trio.run(_examine, arguments.root, arguments.image, arguments.cloud)
    out = _people(arguments)
    for finding in findings:
        speed = f"start {finding.start_ms:.1f} ms, command {finding.command_ms:.2f} ms" if finding.start_ms else ""
        print(f"{finding.backend:<22}{'works' if finding.works else 'no':<7}{speed}", file=out)
        for line in (finding.detail, finding.advice):
            if line:
                print(f"    {line}", file=out)
    if arguments.json:
        print(json.dumps({"backends": [asdict(f) for f in findings]}))
    return 0 if any(f.works for f in findings) else 1


async def _examine(root: str | None, image: str | None = None, cloud: bool = False) -> list[Finding]:
    found = [
        await _local("bwrap", root),
        await _local("none", root),
        await _container(image),
        await _runc(image),
        _ssh(),
    ]
    return [*found, *[await _cloud(name, cloud) for name in CLOUDS]]


async def _runc(image: str | None) -> Finding:
    """Timed where the image is a folder."""
    try:
        if image and os.path.isdir(image):
            return Finding("runc", True, *await measure(RuncProvider(), {"image": image}))
        async with RuncProvider() as provider:
            return Finding("runc", True, detail=provider.program)
    except (UserError, InfraError) as problem:
        return Finding("runc", False, advice=str(problem))


async def _cloud(name: str, start: bool) -> Finding:
    """Its SDK and its credentials; started only where that is asked for."""
    try:
        importlib.import_module(f"uniagent.adapters.sandboxes.{name}").connect(CloudOptions())
        if not start:
            return Finding(name, True, detail="the SDK and credentials are there; --cloud starts sandboxes")
        return Finding(name, True, *await measure(load("sandboxes", name)(), {}, CLOUD_STARTS))
    except (UserError, InfraError) as problem:
        return Finding(name, False, advice=str(problem))


async def _container(image: str | None) -> Finding:
    provider = ContainerProvider()
    try:
        if image and not os.path.isdir(image):
            speed = await measure(provider, {"image": image})
            return Finding("container", True, *speed, provider.program)
        async with provider:
            return Finding("container", True, detail=provider.program)
    except (UserError, InfraError) as problem:
        return Finding("container", False, detail=provider.program, advice=str(problem))


def _ssh() -> Finding:
    found = importlib.util.find_spec("asyncssh") is not None
    advice = "pip install asyncssh" if not found else ""
    return Finding("ssh", found, detail="to any host that lets you in; set host in the sandbox section", advice=advice)


async def _local(isolation: str, root: str | None) -> Finding:
    name = f"local ({isolation})"
    options: dict[str, Any] = {"isolation": isolation, "warm": 0, **({"root": root} if root else {})}
    try:
        starts, commands = await measure(LocalProvider(options), {})
    except (UserError, InfraError) as problem:
        return Finding(name, False, advice=str(problem))
    if isolation == "none":
        return Finding(name, True, starts, commands, "no confinement: commands run as this user")
    usable = hierarchies()
    missing = [c for c in CONTROLLERS if c not in usable]
    held = ", ".join(f"{c} (version {h.version})" for c, h in usable.items()) or "none"
    advice = ""
    if missing:
        advice = f"limits on {' and '.join(missing)} count for each process, not for the sandbox: no control group here"
    return Finding(name, True, starts, commands, f"{find_bwrap()}; control groups: {held}", advice)


async def measure(provider: Any, section: dict[str, Any], count: int | None = None) -> tuple[float, float]:
    """(milliseconds from open to the end of a first command, milliseconds of a command), medians."""
    starts, commands = [], []
    async with provider:
        for _ in range(count or STARTS):
            began = time.perf_counter()
            async with provider.open(section) as box:
                await (await box.shell()).run("true", timeout_s=30)
                starts.append(time.perf_counter() - began)
        async with provider.open(section) as box:
            shell = await box.shell()
            for _ in range(COMMANDS):
                began = time.perf_counter()
                await shell.run("true", timeout_s=30)
                commands.append(time.perf_counter() - began)
    return 1e3 * statistics.median(starts), 1e3 * statistics.median(commands)


def _people(arguments: argparse.Namespace) -> Any:
    return sys.stderr if arguments.json else sys.stdout
