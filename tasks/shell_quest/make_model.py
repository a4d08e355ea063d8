"""Makes the tiny model's folder: ``python -m uniagent.tasks.shell_quest.make_model``.

Tokenizer and architecture, then supervised training on sloppy demonstrations, recorded in the real sandbox through the
quickstart's own Task Config. Two and a half minutes of one core. Everything is drawn from the seed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import trio

from uniagent.engine.learner.sft import Example, SftStep, sft
from uniagent.engine.ports import Json
from uniagent.engine.providers import NodeProviders
from uniagent.tasks.config import TaskConfigResolver
from uniagent.tasks.shell_quest.data import samples
from uniagent.tasks.shell_quest.demonstrate import Demonstration, record
from uniagent.tasks.shell_quest.model import folder, untrained
from uniagent.tasks.shell_quest.players import sloppy
from uniagent.tasks.shell_quest.tokenizer import build

TASK: dict[str, Any] = {  # the quickstart's Task Config
    "name": "shell_quest",
    "sandbox": {"provider": "local"},
    "agent": {
        "name": "react",
        "max_steps": 4,
        "tools": [{"name": "stateful_shell", "max_chars": 160, "timeout_s": 5}],
        "model": {"temperature": 1.0, "max_tokens": 24},
    },
}


def demonstrations(count: int, seed: int) -> list[Demonstration]:
    rows = list(islice(samples("train", seed), count))
    players = [sloppy(random.Random(f"sloppy/{seed}/{i}")) for i in range(count)]

    async def main() -> list[Demonstration]:
        async with trio.open_nursery() as nursery:
            providers = NodeProviders(nursery, {})
            recorded = await record(rows, players.__getitem__, resolver=TaskConfigResolver([TASK]), providers=providers)
            nursery.cancel_scope.cancel()
        return recorded

    return trio.run(main)


def example(tokenizer: Any, messages: Sequence[Mapping[str, Json]]) -> Example:
    """A conversation's ids, and which of them the model says: what follows each ``<|im_start|>assistant``, up to and
    with ``<|im_end|>``. The template's line end after the last turn is left out: the model never sees it."""
    ids = np.asarray(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False), np.int32)
    start, end, role = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "assistantĊ"])
    ids = ids[: np.flatnonzero(ids == end)[-1] + 1]
    said = np.zeros(len(ids), bool)
    speaking = False
    for i in range(2, len(ids)):
        speaking = (speaking and ids[i - 1] != end) or (ids[i - 2] == start and ids[i - 1] == role)
        said[i] = speaking
    return ids, said


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m uniagent.tasks.shell_quest.make_model", description=__doc__)
    parser.add_argument("--out", type=Path, default=folder(), help="the folder to write; default: the shipped one")
    parser.add_argument("--demonstrations", type=int, default=10000)
    parser.add_argument("--steps", type=int, default=260, help="of at least 4096 tokens; 0: an untrained model")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)

    tokenizer = build()
    model = untrained(tokenizer, args.seed)
    if args.steps:
        shown = demonstrations(args.demonstrations, args.seed)
        print(f"{len(shown)} demonstrations, {np.mean([d.result.reward for d in shown]):.1%} of them right", flush=True)
        examples = [example(tokenizer, d.messages) for d in shown]
        sft(model, examples, steps=args.steps, tokens_per_step=4096, lr=4e-3, seed=args.seed, on_step=_tell)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    for file in args.out.iterdir():
        file.chmod(0o644)
    print(f"wrote {args.out}")


def _tell(done: SftStep) -> None:
    if done.step % 20 == 0:
        print(f"step {done.step}: loss {done.loss:.3f} nats a token", flush=True)


if __name__ == "__main__":
    main()
