"""Head and nodes under random trouble: whatever is lost, killed or late, the run ends and trains every prompt once."""

from __future__ import annotations

import pytest

from tests.separate.play import ANSWER, GROUPS, SIZE, TURNS, Play


def check(play: Play) -> None:
    assert play.trained.total() == play.steps * GROUPS
    assert set(play.trained.values()) == {1}
    assert play.tokens == play.steps * GROUPS * SIZE * TURNS * ANSWER


def shapes(seed: int) -> Play:
    return Play(
        seed,
        threshold=(0.0, 1.0)[seed % 2],
        meshes=1 + seed // 2 % 2,
        nodes=seed // 4 % 3,
        relief=bool(seed // 12 % 2),
    )


@pytest.mark.parametrize("seed", range(48))
def test_every_prompt_trains_once_whatever_goes_wrong(seed: int) -> None:
    check(shapes(seed).run())


@pytest.mark.slow
def test_thousands_of_schedules() -> None:
    moved = switches = killed = 0
    for seed in range(1000, 3000):
        play = shapes(seed)
        play.steps = 3
        try:
            check(play.run())
        except BaseException as problem:
            problem.add_note(f"tests.separate.play.Play, seed {seed}")
            raise
        moved, switches, killed = moved + play.moved, switches + play.switches, killed + play.killed
    assert min(moved, switches, killed) > 1000


def test_without_trouble_no_session_is_run_twice() -> None:
    play = Play(7, loss=0.0, kills=False).run()
    check(play)
    assert set(play.began.values()) == {1}
    assert play.moved > 0


def test_a_mesh_alone_serves_all_by_itself() -> None:
    play = Play(3, kills=False, nodes=0).run()
    check(play)
    assert play.switches >= 2 * play.steps - 1
