"""The task and its tool: the task makes a session's game and scores it, the tool ``text_game`` plays it.

A game lives on this node in a process of its own, beside the session's sandbox; the agent reaches it through the tool
alone, so that it can do nothing with it but play. Reward: the game's score as a share of its maximum; the outcome is
whether it was won.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import attrs
from attrs import frozen

from uniagent.adapters.options import options
from uniagent.engine.config import key
from uniagent.engine.errors import UserError, nearest
from uniagent.engine.ports import (
    AgentResult,
    Json,
    ModelEndpoint,
    Observation,
    Providers,
    Sandbox,
    TaskResult,
    ToolSchema,
)
from uniagent.tasks.base import run_episode
from uniagent.tasks.check import Attempt
from uniagent.tasks.config import TaskConfig
from uniagent.tasks.structure import structure
from uniagent.tasks.text_game.game import GameSpec
from uniagent.tasks.text_game.table import Table

SPLITS = ("train", "heldout")
HELD_OUT = 5  # one seed in five
SEEDS = 1 << 31
GAMES: WeakKeyDictionary[Any, Table] = WeakKeyDictionary()  # by the sandbox of their session
INSTRUCTION = (
    "You play a text adventure with the tool `play`: one command a call, such as 'look', 'inventory', 'go east', "
    "'take lamp', 'open chest', 'put lamp on table', 'unlock door with key'. Your task:"
)
DESCRIPTION = "Say one command to the game. Its answer is what you see."


def samples(
    split: str, seed: int, *, rooms: int = 3, objects: int = 6, quest: int = 4, games: int = 500
) -> Iterator[dict[str, Any]]:
    """An endless stream of rows over ``games`` different games, in an order drawn anew each time round: compiling a
    game takes about a second, and it is kept. The splits share no game. Raises UserError for another split."""
    if split not in SPLITS:
        raise UserError(f"text_game has no split {split!r}: {nearest(split, SPLITS)}")
    draw = random.Random(f"text_game/{split}/{seed}")
    rest = HELD_OUT - 1 if split == "heldout" else None
    seeds = [draw.randrange(SEEDS // HELD_OUT) * HELD_OUT + _residue(draw, rest) for _ in range(games)]
    while True:
        for game_seed in seeds:
            yield row(GameSpec(game_seed, rooms, objects, quest))
        draw.shuffle(seeds)


def _residue(draw: random.Random, held_out: int | None) -> int:
    return draw.randrange(HELD_OUT - 1) if held_out is None else held_out


def row(spec: GameSpec) -> dict[str, Any]:
    """One sample: the objective is told, the world is not."""
    objective = spec.make().objective.strip()
    return {
        "name": "text_game",
        "prompt": [{"role": "user", "content": f"{INSTRUCTION}\n\n{objective}"}],
        "metadata": {"game": attrs.asdict(spec)},
    }


@frozen
class Metadata:
    """What a sample's metadata holds."""

    game: GameSpec


class TextGame:
    """Made for one sample."""

    def __init__(self, config: TaskConfig, providers: Providers) -> None:
        self.config, self.providers = config, providers
        self.spec = structure(Metadata, config.metadata, f"task {config.name!r}: metadata").game

    async def run(self, model: ModelEndpoint) -> TaskResult:
        return await run_episode(self.config, self.providers, model, setup=self.setup, verify=self.verify)

    async def setup(self, sandbox: Sandbox) -> None:
        GAMES[sandbox] = await Table.open(self.spec)

    async def verify(self, sandbox: Sandbox, acted: AgentResult) -> TaskResult:
        table = GAMES[sandbox]
        await table.close()
        seen = table.seen
        share = seen.score / seen.most if seen.most else float(seen.won)
        return TaskResult(
            max(0.0, share),
            outcome=seen.won,
            metrics={"moves": float(table.moves), "unknown_commands": float(table.unknown)},
            details={"won": seen.won, "score": seen.score, "last": seen.text},
        )

    def attempts(self) -> Mapping[str, Attempt]:
        """What ``uniagent tasks check`` plays in place of an agent."""
        return {"oracle": partial(_follow, 0), "gives_up_before_the_end": partial(_follow, 1)}


async def _follow(short: int, sandbox: Sandbox) -> AgentResult:
    """The solution, but for its last ``short`` commands."""
    table = GAMES[sandbox]
    solution = await table.solution()
    for command in solution[: len(solution) - short]:
        await table.say(command)
    return AgentResult(True)


@frozen
class PlayOptions:
    """Keys of the tool in ``agent.tools``."""

    as_: str = key("play", "the name the model sees")
    description: str = key(DESCRIPTION, "what the model is told")


class Play:
    """``engine.ports.Tool``: one command; the end of the game ends the episode."""

    def __init__(self, sandbox: Sandbox, given: Mapping[str, Json]) -> None:
        """Raises UserError in a session of another task."""
        self.options = options(PlayOptions, given, "tool text_game")
        if sandbox not in GAMES:
            raise UserError("the tool text_game plays the game of a task text_game, and this session has none")
        self.table = GAMES[sandbox]
        parameters = {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "what you do, in a few words"}},
            "required": ["command"],
            "additionalProperties": False,
        }
        self.schema = ToolSchema(self.options.as_, self.options.description, parameters)
        self._begun = False

    async def __call__(self, arguments: Mapping[str, Json]) -> Observation:
        opening = "" if self._begun else f"{self.table.opening}\n\n> {arguments['command']}\n"
        self._begun = True
        seen = await self.table.say(arguments["command"])
        end = "\n\nYou have won." if seen.won else "\n\nThe game is over." if seen.done else ""
        return Observation(f"{opening}{seen.text}{end}", done=seen.done)
