"""Scripted players of shell_quest: from what a turn shows to the next command.

``right`` solves every job. ``sloppy`` gives the tiny model its start: it knows the kind of command, but the right flag
or command is the minority choice (with a weak preference left: a choice without any is not found again by
reinforcement), names are right nine times in ten, and now and then it stops early. ``MISTAKES`` fail every job.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

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
                return pick({"ls *.txt": 0.5, "ls -S *.txt": 0.4, "ls -Sr *.txt": 0.1})
            case "smallest":
                return pick({"ls *.txt": 0.5, "ls -Sr *.txt": 0.4, "ls -S *.txt": 0.1})
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


def wrong_command(turn: Turn) -> str | None:
    """The right file, the wrong deed."""
    command = right(turn)
    if command is None:
        return None
    swaps = {
        "largest": ("ls -S ", "ls -Sr "),
        "smallest": ("ls -Sr ", "ls -S "),
        "copy": ("cp ", "mv "),
        "count": ("wc -l", "wc -w"),
        "find": ("grep -l", "grep -L"),  # the files without the word
        "delword": ("grep -l", "grep -L"),
        "rename": ("mv ", "cp "),
    }
    return command.replace(*swaps[turn.family])


def wrong_name(turn: Turn) -> str | None:
    """The right deed on another file: the next of the names that the player knows."""
    command = right(turn)
    if command is None:
        return None
    words = [w if w not in NAMES or w == turn.other else _another(w, turn.other) for w in command.split(" ")]
    return " ".join(words)


def _another(name: str, avoid: str) -> str:
    following = NAMES[NAMES.index(name) + 1 :] + NAMES
    return next(n for n in following if n not in (name, avoid))


def delete_all(turn: Turn) -> str | None:
    return "rm *.txt" if turn.number == 0 else None


def job_and_more(turn: Turn) -> str | None:
    """The right deed, and something broken beside it."""
    return right(turn) or ("touch extra.txt" if turn.number < 3 else None)


MISTAKES: dict[str, Player] = {
    "wrong_command": wrong_command,
    "wrong_name": wrong_name,
    "delete_all": delete_all,
    "job_and_more": job_and_more,
}
