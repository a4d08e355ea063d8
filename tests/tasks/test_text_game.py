"""The task ``text_game``: games made from seeds, played through the tool, scored by how far they got."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import AgentResult
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.config import ENDPOINT

pytest.importorskip("textworld")

from uniagent.tasks.text_game import task as text_game
from uniagent.tasks.text_game.game import GameSpec, compiled
from uniagent.tasks.text_game.task import Play, TextGame, row, samples

pytestmark = pytest.mark.slow
SPEC = GameSpec(7, rooms=2, objects=4, quest=3)
RESOLVER = TaskConfigResolver([{"name": "text_game", "sandbox": {"provider": "none"}}])


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


class Place:
    """Stands for a session's sandbox: the game asks nothing of it."""


def task(row: dict[str, Any]) -> TextGame:
    config = RESOLVER.resolve(json.loads(json.dumps(row)), dict.fromkeys(ENDPOINT, "x"))
    return TextGame(config, providers=None)  # type: ignore[arg-type]


async def started() -> tuple[TextGame, Any]:
    made, place = task(row(SPEC)), Place()
    await made.setup(place)  # type: ignore[arg-type]
    return made, place


async def test_the_solution_played_through_the_tool_wins_and_ends_the_episode() -> None:
    made, place = await started()
    play = Play(place, {})
    seen = []
    for command in await text_game.GAMES[place].solution():
        observation = await play({"command": command})
        seen.append(observation)
    assert seen[0].text.startswith("-= "), "the first answer shows where one stands"
    assert [o.done for o in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].text.endswith("You have won.")
    after = await play({"command": "look"})
    assert "The game is over." in after.text
    for _ in range(2):
        result = await made.verify(place, AgentResult(True))  # type: ignore[arg-type]
        assert (result.reward, result.outcome, result.metrics["moves"]) == (1.0, True, float(len(seen)))


async def test_a_game_that_was_not_won_earns_nothing_and_unknown_commands_are_counted() -> None:
    made, place = await started()
    play = Play(place, {"as": "say"})
    assert play.schema.name == "say"
    observation = await play({"command": "dance\nwith the\x00 door " + "x" * 500})
    assert not observation.done
    result = await made.verify(place, AgentResult(True))  # type: ignore[arg-type]
    assert (result.reward, result.outcome, result.metrics["unknown_commands"]) == (0.0, False, 1.0)


async def test_its_attempts_are_what_the_check_expects() -> None:
    for name, attempt in task(row(SPEC)).attempts().items():
        made, place = await started()
        result = await made.verify(place, await attempt(place))  # type: ignore[arg-type]
        assert result.outcome is (name == "oracle")


async def test_a_game_whose_process_is_lost_is_infrastructure() -> None:
    _, place = await started()
    table = text_game.GAMES[place]
    table.process.kill()
    with pytest.raises(InfraError, match="ended by itself"):
        await Play(place, {})({"command": "look"})
    await table.close()


def test_a_game_is_a_function_of_its_spec_and_is_compiled_once() -> None:
    path = compiled(SPEC)
    made = path.stat().st_mtime_ns
    assert compiled(SPEC).stat().st_mtime_ns == made
    assert SPEC.make().serialize() == SPEC.make().serialize()
    assert [p.name for p in path.parent.parent.iterdir()] == [path.parent.name], "nothing half made is left"


def test_rows_are_a_function_of_split_and_seed_and_the_splits_share_no_game() -> None:
    options = {"rooms": 1, "objects": 2, "quest": 1, "games": 3}
    train, held_out = (list(islice(samples(split, 1, **options), 6)) for split in ("train", "heldout"))
    assert train == list(islice(samples("train", 1, **options), 6))
    seeds = [[r["metadata"]["game"]["seed"] for r in some] for some in (train, held_out)]
    assert sorted(seeds[0][:3]) == sorted(seeds[0][3:]), "the same games, time after time"
    assert not set(seeds[0]) & set(seeds[1])
    assert {s % 5 for s in seeds[1]} == {4}
    with pytest.raises(UserError, match="no split 'test'"):
        next(samples("test", 0))


def test_mistakes_are_told() -> None:
    with pytest.raises(UserError, match="rooms"):
        task({"name": "text_game", "metadata": {"game": {"seed": 1, "rooms": 0}}})
    with pytest.raises(UserError, match="this session has none"):
        Play(Place(), {})  # type: ignore[arg-type]
