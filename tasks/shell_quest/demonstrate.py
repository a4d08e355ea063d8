"""Scripted players of shell_quest, and episodes recorded with them in place of the model.

A recorded episode takes the path of any other (agent, tool, sandbox, verifier), so what it shows is what the model
will see. ``right`` solves every job. ``sloppy`` gives the tiny model its start: it knows the kind of command, but the
right flag or command is the minority choice (with a weak preference left: a choice without any is not found again by
reinforcement), names are right nine times in ten, and now and then it stops early.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio
from attrs import frozen

from uniagent.engine.messages import Call, Message, ModelCall, Reply, Usage
from uniagent.engine.ports import Json, ModelEndpoint, Providers, TaskResult
from uniagent.tasks.config import ENDPOINT, TaskConfigResolver
from uniagent.tasks.shell_quest.words import NAMES, WORDS


@frozen
class Turn:
    """What a player acts on: the job, how many commands came before, and the lines of the last result."""

    family: str
    name: str
    other: str
    word: str
    number: int
    seen: tuple[str, ...]


Player = Callable[[Turn], str | None]  # the next command; None: it is done


def right(turn: Turn) -> str | None:
    """The shortest solution."""
    first = turn.seen[0] if turn.seen else ""
    commands = {
        "largest": ["ls -S *.txt", f"rm {first}"],
        "smallest": ["ls -Sr *.txt", f"rm {first}"],
        "copy": [f"cp {turn.name} backup/"],
        "count": [f"wc -l < {turn.name} > answer.txt"],
        "find": [f"grep -l {turn.word} *.txt", f"echo {first} > answer.txt"],
        "delword": [f"grep -l {turn.word} *.txt", f"rm {first}"],
        "rename": [f"mv {turn.name} {turn.other}"],
    }[turn.family]
    return commands[turn.number] if turn.number < len(commands) else None


def sloppy(draw: random.Random) -> Player:
    """A player with the right idea and the wrong habits."""

    def chance(p: float) -> bool:
        return draw.random() < p

    def pick(weights: Mapping[str, float]) -> str:
        return draw.choices(list(weights), list(weights.values()))[0]

    def mostly(right: str, others: Sequence[str]) -> str:
        return right if chance(0.9) else draw.choice(others)

    def first_command(turn: Turn) -> str:
        name = mostly(turn.name, NAMES)
        match turn.family:
            case "largest":
                return pick({"ls *.txt": 0.5, "ls -S *.txt": 0.32, "ls -Sr *.txt": 0.18})
            case "smallest":
                return pick({"ls *.txt": 0.5, "ls -Sr *.txt": 0.32, "ls -S *.txt": 0.18})
            case "copy":
                return f"{pick({'cp': 0.33, 'mv': 0.57, 'rm': 0.1})} {name} backup/"
            case "count":
                return f"wc {pick({'-l': 0.36, '-w': 0.54, '-c': 0.1})} < {name} > answer.txt"
            case "rename":
                other = mostly(turn.other, NAMES)
                return pick({f"mv {name} {other}": 0.36, f"cp {name} {other}": 0.54, f"mv {other} {name}": 0.1})
            case _:
                return f"grep -l {mostly(turn.word, WORDS)} *.txt" if chance(0.42) else "ls *.txt"

    def second_command(turn: Turn) -> str:
        listed = [line for line in turn.seen if line in NAMES]
        name = listed[0] if listed and chance(0.88) else draw.choice(listed or NAMES)
        answers = (turn.family == "find") != chance(0.1)
        return f"echo {name} > answer.txt" if answers else f"rm {name}"

    def player(turn: Turn) -> str | None:
        if turn.number == 0:
            return None if chance(0.03) else first_command(turn)
        if turn.number == 1 and turn.family in ("largest", "smallest", "find", "delword"):
            return None if chance(0.05) else second_command(turn)
        return None

    return player


@frozen
class Demonstration:
    """A whole conversation in chat form, and what the task made of it."""

    messages: Sequence[Mapping[str, Json]]
    result: TaskResult


async def record(
    rows: Sequence[Mapping[str, Any]],
    player: Callable[[int], Player],
    *,
    resolver: TaskConfigResolver,
    providers: Providers,
    at_once: int = 32,
) -> list[Demonstration]:
    """Play every row; ``player(i)`` plays the i-th. The tool is the first of the Task Config."""
    done: dict[int, Demonstration] = {}
    places = trio.CapacityLimiter(at_once)

    async def play(number: int, row: Mapping[str, Any]) -> None:
        async with places:
            stage = _Stage(row["metadata"], player(number))
            task = resolver.resolve(row, dict.fromkeys(ENDPOINT, "scripted")).build(providers)
            result = await task.run(ModelEndpoint("scripted", "scripted", "scripted", complete=stage.complete))
            done[number] = Demonstration(stage.messages, result)

    async with trio.open_nursery() as nursery:
        for number, row in enumerate(rows):
            nursery.start_soon(play, number, row)
    return [done[number] for number in range(len(rows))]


class _Stage:
    """A player behind the model's endpoint; keeps the last request with its answer."""

    def __init__(self, metadata: Mapping[str, Any], player: Player) -> None:
        self.family, self.job, self.player = metadata["family"], metadata["job"], player
        self.messages: list[dict[str, Json]] = []

    async def complete(self, call: ModelCall) -> Reply:
        number = sum(m.role == "assistant" for m in call.messages)
        last = call.messages[-1]
        seen = tuple(last.text.splitlines()) if last.role == "tool" else ()
        command = self.player(Turn(self.family, **self.job, number=number, seen=seen))
        if command is None:
            reply = Reply(f"turn_{number}", "Done.", "", (), "stop", Usage(0, 0))
        else:
            wanted = Call(f"call_{number}", "shell", json.dumps({"command": command}))
            reply = Reply(f"turn_{number}", "", "", (wanted,), "tool_calls", Usage(0, 0))
        self.messages = [_as_chat(m) for m in (*call.messages, reply.message())]
        return reply


def _as_chat(message: Message) -> dict[str, Json]:
    functions = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.calls]
    return {"role": message.role, "content": message.text, **({"tool_calls": functions} if functions else {})}
