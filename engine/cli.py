"""The command ``uniagent``: finds the command's function, runs it, and turns whatever goes wrong into a sentence.

Exit status: 0 done; 1 crashed; 2 a mistake that the user can mend; 130 and 143 stopped by Ctrl-C and SIGTERM. Commands
are named by dotted strings and imported when used; one whose module is not installed is not offered.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence

from uniagent.engine import __version__
from uniagent.engine.crash import Crash, guard
from uniagent.engine.errors import UserError, nearest

COMMANDS = {  # name -> (function taking the remaining arguments and giving the exit status, what it does)
    "train": ("uniagent.engine.commands:train", "train as a config says: uniagent train examples/quickstart.toml"),
    "rollout": ("uniagent.engine.separate.join_cli:main", "roll out for a run elsewhere: uniagent rollout --join URL"),
    "eval": ("uniagent.engine.commands:evaluate", "evaluate the config's model, or a checkpoint, on held-out samples"),
    "show": ("uniagent.engine.commands:show", "print a recorded episode, its tokens coloured by who wrote them"),
    "simulate": ("uniagent.engine.simulate.cli:main", "run a config on a virtual clock: wall-clock, bound, faults"),
    "config": ("uniagent.engine.commands:config", "print every config key with its type, default and meaning"),
    "serve": ("uniagent.engine.gateway.serve_cli:main", "run the gateway alone, to debug a harness"),
    "template": ("uniagent.engine.gateway.template_cli:main", "say how a model's chat template will be handled"),
    "harness": ("uniagent.adapters.agents.harness_cli:main", "external harnesses: list, install, check"),
    "engine": ("uniagent.adapters.engines.cli:main", "which inference engines work here"),
    "sandbox": ("uniagent.adapters.sandboxes.cli:main", "which sandbox backends work here"),
    "difficulty": ("uniagent.engine.curriculum.cli:difficulty", "estimate how hard samples are, and choose among them"),
    "history": ("uniagent.engine.curriculum.cli:history", "what runs showed about samples, and which of them moved"),
    "data": ("uniagent.tasks.data_cli:main", "check a data set"),
    "bugfix": ("uniagent.tasks.bugfix.cli:main", "make repair samples from a Python project: bugfix make PROJECT"),
    "tasks": ("uniagent.tasks.check_cli:main", "check the quality of tasks"),
    "judge": ("uniagent.tasks.llm_judge.report:main", "cost and agreement of the judge of a run (task llm_judge)"),
    "sft": ("uniagent.engine.learner.sft_cli:main", "supervised fine-tuning on recorded conversations"),
}


def main(argv: Sequence[str]) -> int:
    """Run one command; the result is the process's exit status."""
    try:
        with guard():
            return _run(list(argv))
    except UserError as mistake:
        return _say(str(mistake), 2)
    except Crash as crash:
        return _say(str(crash), 1)
    except KeyboardInterrupt:
        return _say("stopped", 130)
    except BrokenPipeError:  # the reader of our output went away, as in `uniagent show … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def offered() -> list[str]:
    """The commands whose modules exist."""
    return [name for name, (target, _) in COMMANDS.items() if _exists(target.partition(":")[0])]


def _run(argv: list[str]) -> int:
    if argv and argv[0].endswith(".toml"):
        argv = ["train", *argv]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"uniagent {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS or not _exists(COMMANDS[name][0].partition(":")[0]):
        raise UserError(f"there is no command {name!r}: {nearest(name, offered())}")
    module, _, function = COMMANDS[name][0].partition(":")
    command: Callable[[Sequence[str]], int | None] = getattr(importlib.import_module(module), function)
    return command(rest) or 0


def _help() -> str:
    lines = ["usage: uniagent COMMAND ...", "", "Reinforcement learning of LLM agents.", ""]
    lines += [f"  {name:<10}{COMMANDS[name][1]}" for name in offered()]
    return "\n".join([*lines, "", "uniagent COMMAND --help says more."])


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there either
        return False


def _say(message: str, status: int) -> int:
    for line in message.splitlines():
        print(f"uniagent: {line}", file=sys.stderr)
    return status
