"""Numbers of a run: from episodes, from the loop, and as lines of metrics.jsonl."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
import trio
import trio.testing
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.episode import Episode
from uniagent.engine.observe import lag, metrics
from uniagent.engine.observe.lag import Lag, percentile
from uniagent.engine.ports import Failure, TaskResult
from uniagent.engine.trajectory.types import Export, Ledger

Make = Callable[..., Episode]


def test_success_counts_no_infrastructure_failure(make_episode: Make) -> None:
    failed = make_episode(result=TaskResult(0.0, failure=Failure.INFRA))
    episodes = [make_episode(reward=1.0), make_episode(reward=0.0), make_episode(reward=0.0), make_episode(), failed]
    assert metrics.success(episodes) == {"success": 0.5, "n": 4, "stderr": 0.25}
    assert math.isnan(metrics.success([failed])["success"])


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8), st.integers(1, 4))
def test_pass_at_k_is_the_share_of_draws_of_k_episodes_with_a_solved_one(outcomes: list[list[bool]], k: int) -> None:
    found = metrics.pass_at_k(
        [
            Episode(f"{n}-{i}", "t", n, i, TaskResult(float(x)), Export((), (), Ledger()))
            for n, some in enumerate(outcomes)
            for i, x in enumerate(some)
        ],
        k,
    )
    enough = [some for some in outcomes if len(some) >= k]
    if not enough:
        assert math.isnan(found["value"])
        return
    draws = [[any(c) for c in itertools.combinations(some, k)] for some in enough]
    assert found["value"] == pytest.approx(mean(mean(d) for d in draws))
    assert 0.0 <= found["low"] <= found["value"] + 1e-9
    assert found["value"] - 1e-9 <= found["high"] <= 1.0
    assert found["high"] - found["low"] > 0, "few samples are never certain"


def test_the_interval_of_a_share_is_wilsons() -> None:
    assert metrics.wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)  # Wilson 1927; any table
    assert metrics.wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)


def test_a_batch_in_numbers_by_task_has_what_its_verifiers_measured(make_episode: Make) -> None:
    def judged(moves: float, *flags: str, failure: Failure | None = None) -> Episode:
        metrics_ = {"moves": moves, "agent_s": 1.0}
        result = TaskResult(1.0, components={"style": moves / 10}, flags=flags, metrics=metrics_, failure=failure)
        return make_episode(task="text_game", result=result)

    lost = judged(99.0, failure=Failure.INFRA)
    numbers = metrics.of_tasks([judged(2.0, "odd", "odd"), judged(4.0), lost, make_episode()])
    assert {k.removeprefix("task/text_game/"): v for k, v in numbers.items() if "text_game" in k} == {
        "episodes": 3,
        "success": 1.0,
        "moves": 3.0,
        "component_style": pytest.approx(0.3),
        "flag_odd": 0.5,
    }
    assert numbers["task/shell_quest/success"] == 1.0


def test_answers_that_were_cut_or_malformed_are_shares_of_all_answers(make_episode: Make) -> None:
    turns = [
        {"finish": "length", "problem": None},
        {"finish": "stop", "problem": "no closing tag"},
        {"finish": "stop", "problem": None},
    ]
    numbers = metrics.of_answers([make_episode(turns=turns[:2]), make_episode(turns=turns[2:])])
    assert numbers == {
        "answers/tokens": 2.0,
        "answers/cut": pytest.approx(1 / 3),
        "answers/malformed": pytest.approx(1 / 3),
    }


def test_the_outcome_decides_over_the_reward(make_episode: Make) -> None:
    shaped = [make_episode(result=TaskResult(0.3, outcome=False)), make_episode(result=TaskResult(-0.1, outcome=True))]
    assert metrics.success(shaped)["success"] == 0.5
    assert metrics.success([evolve(shaped[0], result=TaskResult(0.3))])["success"] == 1.0


def test_a_batch_in_numbers_adds_up(make_episode: Make) -> None:
    crashed = make_episode(reward=0.0, result=TaskResult(0.0, failure=Failure.AGENT), timings={"total": 2.5})
    numbers = metrics.of_episodes([make_episode(), crashed])
    assert (numbers["success"], numbers["reward"], numbers["reward_std"]) == (0.5, 0.5, 0.5)
    assert (numbers["episodes"], numbers["agent_failures"], numbers["infra_failures"]) == (2, 1, 0)
    assert numbers["tokens/sampled"] == 6
    assert numbers["tokens/sampled"] == numbers["tokens/trainable"] + numbers["tokens/discarded_retried"]
    assert (numbers["seconds/total"], numbers["seconds/engine"]) == (2.0, 0.25)
    assert metrics.of_episodes([]) == {}


def test_a_batch_in_numbers_by_agent(make_episode: Make) -> None:
    row = {"agent": {"name": "claude_code"}}
    crashed = make_episode(reward=0.0, result=TaskResult(0.0, failure=Failure.AGENT), row=row)
    numbers = metrics.of_agents([make_episode(), make_episode(row=row), crashed])
    assert numbers["agent/react/success"] == 1.0
    mine = {k.removeprefix("agent/claude_code/"): v for k, v in numbers.items() if "claude_code" in k}
    assert mine == {
        "episodes": 2,
        "success": 0.5,
        "agent_failures": 1,
        "infra_failures": 0,
        "actions": 2.0,
        "chains": 1.0,
        "tokens": 3.0,
        "trainable": 2 / 3,
        "discarded_retried": 1 / 3,
        "echo_verbatim": 1.0,
    }


def test_staleness_is_of_trained_tokens(make_episode: Make) -> None:
    assert metrics.staleness([make_episode()], version=5) == {"staleness": 2.0, "staleness_max": 2.0}
    assert metrics.staleness([], version=5) == {}


def test_a_line_a_step_with_wall_time(tmp_path: Path) -> None:
    now = iter([10.0, 11.5, 13.0])
    file = metrics.MetricsFile(tmp_path / "metrics.jsonl", lambda: next(now))
    file.log({"loss": 0.5}, step=1)
    file.log({"loss": math.nan, "grad_norm": math.inf}, step=2)
    file.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "wall_s": 1.5, "loss": 0.5},
        {"step": 2, "wall_s": 3.0, "loss": None, "grad_norm": None},
    ]


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (1, 1), (50, 50), (99, 99), (100, 100)])
def test_percentiles_of_one_to_a_hundred(percent: float, value: float) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == value
    assert math.isnan(percentile([], percent))


async def test_a_loop_that_was_held_up_shows_as_lag(autojump_clock: trio.testing.MockClock) -> None:
    autojump_clock.autojump_threshold = math.inf
    seen = Lag()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: lag.watch(seen, interval_s=0.05))
        for passed in (0.05, 0.07, 1.05):  # the heartbeat is due after 0.05
            await trio.testing.wait_all_tasks_blocked()
            autojump_clock.jump(passed)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert seen.metrics() == pytest.approx({"loop_lag_p50_ms": 20.0, "loop_lag_p99_ms": 1000.0})
    assert seen.metrics() == {}  # a window starts anew


async def test_an_idle_loop_has_no_lag(autojump_clock: trio.testing.MockClock) -> None:
    seen = Lag()
    with trio.move_on_after(10):
        await lag.watch(seen)
    assert seen.metrics() == {"loop_lag_p50_ms": 0.0, "loop_lag_p99_ms": 0.0}
