"""Reinforcement learning of a harness as it is: mini-swe-agent, unmodified, trained end to end on a CPU.

    python bench/blackbox_rl.py [--quick] [--out PATH] [--programs FOLDER] [--keep FOLDER]

mini-swe-agent starts in a sandbox of its own for every episode, with a configuration file of short templates, and talks
to the gateway in the chat format. The jobs are three families of shell_quest, judged by the files it leaves. The model
is the shipped tiny one, warm-started here on what this harness shows: its tool is called ``bash``, and it ends by a
command of its own; both get a token each. The demonstrations are as sloppy as the shipped model's, so that the right
command is the minority choice.

At most 600 episodes, evaluations included; nearly all of the time is the harness's own start (``harness_s`` a session,
most of it importing its libraries). The programs come from ``uniagent harness install DIR mini_swe_agent``, found at
--programs or in $UNIAGENT_HARNESSES. The last line is JSON: ``reward`` is the training curve, ``before`` and ``after``
the success on held-out jobs, ``rises`` whether the last third of the curve lies above the first by two standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import tomli_w
import trio

from uniagent.adapters.agents import installs
from uniagent.engine import config_file, run_folder
from uniagent.engine.errors import UserError
from uniagent.engine.observe.progress import Lines
from uniagent.engine.ports import Json
from uniagent.engine.providers import NodeProviders
from uniagent.engine.registry import load
from uniagent.tasks.config import TaskConfigResolver
from uniagent.tasks.shell_quest.data import samples
from uniagent.tasks.shell_quest.demonstrate import Demonstration, record
from uniagent.tasks.shell_quest.players import Player, Turn, sloppy

FAMILIES = ("copy", "count", "rename")
SUBMIT = load("agents", "mini_swe_agent").ends_by
OPENING = '\n{"name": "bash", "arguments": {"command": "'  # of a call, one token
MINI = """\
agent:
  system_template: You are a shell agent.
  instance_template: "{{task}}"
  step_limit: 4
  cost_limit: 0
model:
  observation_template: >-
    {{ output.output.strip()[:160] or "(no output)" }}{% if output.returncode %}

    exit code {{ output.returncode }}{% endif %}
  format_error_template: Call bash.
"""
SIZES = {  # demonstrations, steps of warm start, steps, groups, group size, held-out jobs
    "full": (600, 40, 16, 4, 8, 44),
    "quick": (200, 20, 2, 1, 4, 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few episodes: whether it runs, not whether it learns")
    parser.add_argument("--out", type=Path, help="write the JSON line there too")
    parser.add_argument("--programs", help="folder of mini-swe-agent")
    parser.add_argument("--keep", type=Path, help="an empty folder for the model, the configs and the run")
    args = parser.parse_args()
    folder = os.environ.get("UNIAGENT_HARNESSES")
    programs = args.programs or installs.installed(Path(folder) if folder else None, "mini_swe_agent")
    if programs is None:
        raise UserError("mini-swe-agent is not installed: uniagent harness install DIR mini_swe_agent, then --programs")
    with tempfile.TemporaryDirectory() as scratch:
        place = args.keep.absolute() if args.keep else Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        found = measure(place, str(programs), SIZES["quick" if args.quick else "full"])
    line = json.dumps(found)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)


def measure(place: Path, programs: str, sizes: Sequence[int]) -> dict[str, Any]:
    count, warm_steps, steps, groups, size, held_out = sizes
    started = time.monotonic()
    warm_start(place / "model", count, warm_steps)
    warm_s = time.monotonic() - started
    config = write_config(place, programs, steps, groups, size, held_out)
    folder = run_folder.create(place / "run", config, stem="blackbox", now=datetime.now(UTC))
    started = time.monotonic()
    with Lines(steps) as progress:
        from uniagent.engine import run

        summary = run.train(config, folder, progress)
    if summary["interrupted"]:
        raise UserError(f"interrupted after {summary['steps']} of {steps} steps")
    wall_s = time.monotonic() - started
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    found = {
        "reward": [round(line["reward"], 3) for line in lines],
        "before": summary["eval"]["before"]["success"],
        "after": summary["eval"]["after"]["success"],
        "rises": rises([line["reward"] for line in lines], groups * size),
        "episodes": steps * groups * size + 2 * held_out,
        "wall_s": round(wall_s, 1),
        "warm_start_s": round(warm_s, 1),
        "harness_s": round(mean(line["seconds/agent"] for line in lines), 2),
        "chains": mean(line["agent/mini_swe_agent/chains"] for line in lines),
        "trainable": mean(line["agent/mini_swe_agent/trainable"] for line in lines),
        "infra_failures": sum(line["infra_failures"] for line in lines),
    }
    table(found)
    return found


def write_config(place: Path, programs: str, steps: int, groups: int, size: int, held_out: int) -> Any:
    """The run as a user would write it."""
    agent = {
        "name": "mini_swe_agent",
        "max_steps": 5,
        "timeout_s": 240,
        "model": {"temperature": 1.0, "max_tokens": 24},
        "options": {"programs": programs, "args": ["-c", "{home}/mini.yaml"], "files": {"mini.yaml": MINI}},
    }
    task = {"name": "shell_quest", "sandbox": {"provider": "local"}, "agent": agent}
    (place / "tasks.toml").write_text(tomli_w.dumps({"tasks": [task]}))
    run = {
        "run": {"steps": steps},
        "model": {"path": str(place / "model")},
        "engine": {"context": 512, "slots": 16},
        "tasks": {"file": "tasks.toml", "data": "shell_quest/train", "options": {"families": list(FAMILIES)}},
        "gateway": {"refused": "train"},  # a call that the harness cannot read is a mistake to unlearn
        "rollout": {"groups_per_step": groups, "group_size": size, "max_sessions": 16},
        "learner": {"loss": "grpo", "aggregation": "token_mean", "lr": 6e-4, "warmup_steps": 2},
        "eval": {"data": "shell_quest/heldout", "n": held_out, "greedy": False},
        "sandbox": {"options": {"local": {"warm": 0}}},
    }
    (place / "run.toml").write_text(tomli_w.dumps(run))
    return config_file.load(place / "run.toml")


# ---------------------------------------------------------------- the warm start


def warm_start(folder: Path, count: int, steps: int) -> None:
    """The shipped model with two more tokens, trained on demonstrations in this harness's form."""
    import torch

    from uniagent.engine import model_files
    from uniagent.engine.learner.sft import sft
    from uniagent.tasks.shell_quest.make_model import example
    from uniagent.tasks.shell_quest.tokenizer import build

    torch.set_num_threads(1)
    tokenizer = build((OPENING, SUBMIT))
    model: Any = model_files.load(model_files.folder("builtin:tiny-shell"), dtype="float32", device="cpu")
    known = len(tokenizer) - 2
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    weight = model.get_input_embeddings().weight.data
    for new, like in enumerate((OPENING.replace("bash", "shell"), "echo"), known):
        weight[new] = weight[tokenizer(like).input_ids[0]]
    shown = [example(tokenizer, in_form(d.messages)) for d in demonstrations(count)]
    sft(model, shown, steps=steps, tokens_per_step=4096, lr=1e-3, seed=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def demonstrations(count: int) -> list[Demonstration]:
    """Sloppy episodes in the real sandbox, each ended by the submitting command."""
    agent = {
        "name": "react",
        "options": {"system": "You are a shell agent."},
        "tools": [{"name": "stateful_shell", "max_chars": 160, "timeout_s": 5}],
    }
    resolver = TaskConfigResolver([{"name": "shell_quest", "agent": agent}])
    rows = list(islice(samples("train", 5, families=FAMILIES), count))
    players = [submitting(sloppy(random.Random(f"blackbox/{i}"))) for i in range(count)]

    async def play() -> list[Demonstration]:
        async with trio.open_nursery() as nursery:
            providers = NodeProviders(nursery, {})
            recorded = await record(rows, players.__getitem__, resolver=resolver, providers=providers)
            nursery.cancel_scope.cancel()
        return recorded

    return trio.run(play)


def submitting(player: Player) -> Player:
    """A player that submits where the other one is done."""
    submitted = False

    def play(turn: Turn) -> str | None:
        nonlocal submitted
        if submitted:
            return None
        command = player(turn)
        submitted = command is None
        return SUBMIT if submitted else command

    return play


def in_form(messages: Sequence[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """A conversation as this harness has it: up to the submitting call, and the tool by its name."""
    last = max(i for i, message in enumerate(messages) if message.get("tool_calls"))
    out = []
    for message in messages[: last + 1]:
        calls = [{**c, "function": {**c["function"], "name": "bash"}} for c in message.get("tool_calls", ())]
        out.append({**message, **({"tool_calls": calls} if calls else {})})
    return out


# ---------------------------------------------------------------- telling


def rises(rewards: Sequence[float], episodes: int) -> bool:
    """Whether the last third of the steps lies above the first by two standard errors of the difference."""
    third = max(1, len(rewards) // 3)
    first, last = mean(rewards[:third]), mean(rewards[-third:])
    error = math.sqrt((first * (1 - first) + last * (1 - last)) / (third * episodes))
    return last - first > 2 * error


def table(found: Mapping[str, Any]) -> None:
    for step, reward in enumerate(found["reward"], 1):
        print(f"step {step:>3}  reward {reward:.3f}  {'#' * round(40 * reward)}")
    print(f"held-out jobs: {found['before']:.3f} before, {found['after']:.3f} after")
    print(
        f"{found['episodes']} episodes in {found['wall_s']:.0f} s, {found['harness_s']:.1f} s a session in the harness"
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as mistake:
        sys.exit(f"bench/blackbox_rl.py: {mistake}")
