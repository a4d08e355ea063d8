"""One TextWorld game: made from a seed, compiled once, played command by command.

A game is a function of its ``GameSpec`` (Côté et al. 2018, TextWorld: A Learning Environment for Text-based Games). The
compiled file is kept under the user's cache folder, by a hash of the spec and the package's version; two makers of one
game each compile into a folder of their own and the first rename wins. Blocking, and the interpreter of compiled games
is C that does not bear other threads: a session plays in a process of its own (``main``). Knows no task.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen
from attrs.validators import ge, le

from uniagent.engine.errors import UserError

_PROMPT = re.compile(r"\n+>[^\n]*\Z")  # the prompt of the next line, and the status bar printed over it
_ROOM = "-= "  # before the name of a room, where the world begins after title and objective
_END = re.compile(r"\n\s*\*\*\* .* \*\*\*.*\Z", re.DOTALL)  # what follows the last answer
_NOT_TYPED = re.compile(r"[^A-Za-z0-9' ,.-]")  # and a longer line, kill the interpreter
LINE = 80
_making = threading.Lock()  # the generator has state of its own


@frozen
class GameSpec:
    """What a game is made of. ``quest`` is the number of commands of a shortest solution."""

    seed: int
    rooms: int = field(default=3, validator=[ge(1), le(30)])
    objects: int = field(default=6, validator=[ge(1), le(60)])
    quest: int = field(default=4, validator=[ge(1), le(30)])

    def make(self) -> Any:
        """The game as the package's object; raises UserError where no game of this shape exists."""
        textworld = package()
        options = textworld.GameOptions()
        options.seeds, options.nb_rooms, options.nb_objects = self.seed, self.rooms, self.objects
        options.quest_length, options.quest_breadth = self.quest, 1
        with _making:
            try:
                return textworld.generator.make_game(options)
            except (ValueError, AssertionError, textworld.generator.QuestGenerationError) as problem:
                raise UserError(f"text_game: no game of {attrs.asdict(self)} can be made: {problem}") from problem


@frozen
class Seen:
    """What the game says after a command, and how it stands: points of ``most``."""

    text: str
    score: float
    most: float
    won: bool
    done: bool
    known: bool = True  # the game took the command


class Game:
    """A game that is being played, in this process. Commands come one at a time, from the thread that made it."""

    def __init__(self, spec: GameSpec) -> None:
        textworld = package()
        infos = textworld.EnvInfos(
            score=True, max_score=True, won=True, lost=True, policy_commands=True, admissible_commands=True
        )
        self._env = textworld.start(str(compiled(spec)), infos)
        self._state = self._env.reset()
        self.opening = _ROOM + _text(self._state.feedback).partition(_ROOM)[2]
        self.seen = self._seen(self.opening, done=False)

    def say(self, command: str) -> Seen:
        """One command; after the end it changes nothing."""
        if self.seen.done:
            return attrs.evolve(self.seen, text="The game is over.")
        line = " ".join(_NOT_TYPED.sub(" ", command).split())[:LINE]
        known = line.lower() in self._state["admissible_commands"]
        self._state, _, done = self._env.step(line)
        self.seen = self._seen(_text(self._state.feedback), done=done, known=known)
        return self.seen

    def solution(self) -> list[str]:
        """Commands that win from here."""
        return list(self._state["policy_commands"] or ())

    def _seen(self, text: str, *, done: bool, known: bool = True) -> Seen:
        state = self._state
        return Seen(text, float(state["score"] or 0), float(state["max_score"]), bool(state["won"]), bool(done), known)


def main() -> None:
    """``python -m uniagent.tasks.text_game.game SPEC``: a game over pipes. A line of JSON a question, a line of JSON an
    answer: text is a command, null asks for the solution. The first line told is (opening, how it stands)."""
    game = Game(GameSpec(**json.loads(sys.argv[1])))
    _tell([game.opening, attrs.asdict(game.seen)])
    for line in sys.stdin:
        command = json.loads(line)
        _tell(game.solution() if command is None else attrs.asdict(game.say(command)))


def _tell(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def compiled(spec: GameSpec) -> Path:
    """The game's file, made where it is not there yet."""
    textworld = package()
    named = json.dumps([attrs.asdict(spec), version("textworld")], sort_keys=True)
    folder = cache() / hashlib.sha256(named.encode()).hexdigest()[:24]
    if not (folder / "game.z8").exists():
        game = spec.make()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            options = textworld.GameOptions()
            options.path = str(Path(fresh, "made", "game.z8"))
            Path(fresh, "made").mkdir()
            textworld.generator.compile_game(game, options)
            try:
                Path(fresh, "made").rename(folder)
            except OSError:
                if not (folder / "game.z8").exists():
                    raise
    return folder / "game.z8"


def cache() -> Path:
    """Where compiled games are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "uniagent", "text_game")


def package() -> Any:
    """TextWorld, which is imported when a game is wanted; raises UserError where it is not installed."""
    try:
        import textworld
        import textworld.generator
    except ImportError as problem:
        raise UserError(f"the task text_game needs a package: pip install 'uniagent[text-game]' ({problem})") from None
    return textworld


def _text(feedback: str) -> str:
    """What a player reads: without the prompt, and the offer to play again."""
    text = _END.sub("", _PROMPT.sub("", feedback.rstrip()))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.split("\n"))).strip()


if __name__ == "__main__":
    main()
