"""The history of trials: kept once, by several runs at a time, and what commands say of it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from uniagent.engine.cli import main
from uniagent.engine.config import Curriculum as Table
from uniagent.engine.curriculum.curriculum import Curriculum
from uniagent.engine.curriculum.difficulty import Difficulty, summary
from uniagent.engine.curriculum.feed import Feed
from uniagent.engine.curriculum.history import History, RunIdentity, Store, by_family
from uniagent.engine.curriculum.pool import Rows
from uniagent.engine.curriculum.trials import Trial, key_of, trial_of
from uniagent.engine.episode import Episode
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Failure, TaskResult
from uniagent.engine.trajectory.types import Export, Ledger

RUN = RunIdentity("run-1", "data", "template", "model")
ROW = {"name": "t", "metadata": {"family": "f"}}


def trial(session: str = "s", sample: str = "a", version: int = 0, outcome: bool | None = True, **other: Any) -> Trial:
    of = Trial(session, sample, "f", "t", "train", version, float(bool(outcome)), outcome, "react", "h", 2, 30)
    return evolve(of, **other)


def episode(
    sample: int = 0,
    replica: int = 0,
    *,
    reward: float = 1.0,
    outcome: bool | None = None,
    failure: Failure | None = None,
) -> Episode:
    return Episode(
        session=f"train-{sample}-{replica}",
        task="t",
        sample=sample,
        replica=replica,
        result=TaskResult(reward, outcome=outcome, failure=failure),
        export=Export((), ("live", "live"), Ledger(sampled=30, trainable=30)),
        row={**ROW, "agent": {"name": "claude_code"}},
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "trials.db") as opened:
        opened.begin(RUN, 1.0)
        yield opened


def test_a_trial_is_kept_once_however_often_it_is_written(store: Store) -> None:
    store.add("run-1", [trial("s", outcome=False), trial("r")], 2.0)
    store.add("run-1", [trial("s", outcome=True)], 3.0)  # a resumed run did it again
    assert store.counts("run-1") == {"a": (2, 2)}


def test_a_batch_of_trials_is_kept_whole_or_not_at_all(store: Store) -> None:
    with pytest.raises(UserError, match=r"trials\.db"):
        store.add("run-1", [trial("good"), trial("bad", family=None)], 2.0)
    assert store.counts("run-1") == {}
    store.add("run-1", [trial("good")], 2.0)
    assert store.counts("run-1") == {"a": (1, 1)}


def test_infrastructure_failures_count_in_no_rate(store: Store) -> None:
    store.add("run-1", [trial("s"), trial("t", outcome=None)], 2.0)
    assert store.counts("run-1") == {"a": (1, 1)}
    assert store.sessions("run-1") == {"s"}


def test_trials_stay_when_the_file_is_closed_and_two_runs_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trials.db"
    with Store(path) as one, Store(path) as other:
        for number, store in enumerate((one, other)):
            store.begin(evolve(RUN, run=f"run-{number}"), float(number))
        for i in range(20):
            one.add("run-0", [trial(f"s{i}")], 1.0)
            other.add("run-1", [trial(f"s{i}", outcome=False)], 1.0)
    with Store(path, read_only=True) as store:
        assert [(r["run"], r["trials"], r["passes"]) for r in store.runs()] == [("run-0", 20, 20), ("run-1", 20, 0)]


def test_cells_add_up_by_sample_version_and_family(store: Store) -> None:
    some = [trial(f"{a}{v}{i}", a, v, outcome=i < 3) for a in "ab" for v in (0, 5) for i in range(4)]
    store.add("run-1", some, 2.0)
    assert {(c.sample, c.version, c.passes, c.trials) for c in store.cells()} == {
        (a, v, 3, 4) for a in "ab" for v in (0, 5)
    }
    assert [(c.version, c.passes, c.trials) for c in by_family(store.cells())["f"]] == [(0, 6, 8), (5, 6, 8)]


def test_a_file_that_is_no_history_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be looked at by SQLite" * 20)
    with pytest.raises(UserError, match="text"):
        Store(tmp_path / "text")
    with pytest.raises(UserError, match="there is no history of trials"):
        Store(tmp_path / "nowhere.db", read_only=True)
    assert not (tmp_path / "nowhere.db").exists()
    with sqlite3.connect(tmp_path / "new.db") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(UserError, match="written by a newer uniagent"):
        Store(tmp_path / "new.db")


async def test_what_was_begun_to_be_written_is_on_disk_though_the_run_is_cancelled(store: Store) -> None:
    history = History(store, RUN, lambda: 1.0)
    with trio.CancelScope() as scope:
        scope.cancel()
        await history.add([trial()])
    assert store.counts("run-1") == {"a": (1, 1)}


async def test_only_the_same_policy_and_harness_are_known_and_no_evaluation(store: Store) -> None:
    others = {
        "same": evolve(RUN, run="same"),
        "another model": evolve(RUN, run="another model", model="m2"),
        "another template": evolve(RUN, run="another template", template="t2"),
    }
    for run in others.values():
        store.begin(run, 1.0)
        store.add(run.run, [trial()], 1.0)
    store.add("same", [trial("e", purpose="eval"), trial("x", harness_hash="other")], 1.0)
    store.add("run-1", [trial()], 1.0)  # its own
    known = await History(store, RUN, lambda: 1.0).known({"h"})
    assert [(c.run, c.trials) for c in known] == [("same", 1)]


# ---------------------------------------------------------------- trials


def test_a_trial_says_who_did_what() -> None:
    of = trial_of(episode(), ROW, family="metadata.family", purpose="train", version=7)
    assert (of.sample, of.family, of.task, of.harness) == (key_of(ROW), "f", "t", "claude_code")
    assert (of.version, of.turns, of.tokens, of.reward, of.outcome) == (7, 2, 30, 1.0, True)


def test_the_outcome_counts_and_not_the_shaped_reward() -> None:
    of = trial_of(episode(reward=-0.4, outcome=True), ROW, family="metadata.family", purpose="train", version=0)
    assert of.outcome is True
    broken = trial_of(episode(failure=Failure.INFRA), ROW, family="metadata.family", purpose="train", version=0)
    assert broken.outcome is None


def test_the_harness_hash_is_that_of_the_whole_agent_section() -> None:
    def hash_of(agent: dict[str, Any]) -> str:
        one = evolve(episode(), row={**ROW, "agent": agent})
        return trial_of(one, ROW, family="metadata.family", purpose="train", version=0).harness_hash

    assert hash_of({"name": "react", "max_steps": 4}) == hash_of({"max_steps": 4, "name": "react"})
    assert hash_of({"name": "react", "max_steps": 4}) != hash_of({"name": "react", "max_steps": 5})


async def test_the_feed_writes_what_was_trained_and_what_was_left(store: Store) -> None:
    table = Table()
    feed = Feed(
        Curriculum(Rows([{**ROW, "n": i} for i in range(3)], table.family), table, seed=0), store_of(store), table, 2
    )
    groups = [[episode(number, replica) for replica in range(2)] for number, _ in (next(feed) for _ in range(3))]
    feed.done(groups[0])
    feed.done(groups[1])
    feed.advance(4)
    await feed.write([groups[2]])
    assert sum(trials for _, trials in store.counts("run-1").values()) == 6
    assert {c.version for c in store.cells()} == {4}
    assert [n for n, _, _ in feed.curriculum.state()["flying"]] == [2]  # left: to be run again


def test_groups_given_back_count_once_as_many_as_a_batch_came_back(store: Store) -> None:
    table = Table()
    feed = Feed(
        Curriculum(Rows([{**ROW, "n": i} for i in range(9)], table.family), table, seed=0), store_of(store), table, 2
    )
    groups = [[episode(number, r, reward=0.0) for r in range(8)] for number, _ in (next(feed) for _ in range(3))]
    feed.given_back(groups[0])
    assert not feed.curriculum.excluded().any()
    feed.given_back(groups[1])
    assert feed.curriculum.excluded().sum() == 2
    rate = feed.curriculum.known().rate.tolist()
    for group in groups[:2]:
        feed.done(group)
    feed.advance(0)
    assert feed.curriculum.known().rate.tolist() == rate  # counted once


def store_of(store: Store) -> History:
    return History(store, RUN, lambda: 1.0)


# ---------------------------------------------------------------- commands


def test_history_prints_what_moved(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    for version in range(10):
        grew = [trial(f"g{version}-{i}", "grew", version, outcome=i < version, family="grows") for i in range(10)]
        still = [trial(f"s{version}-{i}", "still", version, outcome=i < 5, family="stands") for i in range(10)]
        store.add("run-1", grew + still, 1.0)
    assert main(["history", str(store.path)]) == 0
    out = capsys.readouterr().out
    assert "run-1: 200 trials" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert lines["grows"].endswith("up")
    assert not lines["stands"].rstrip().endswith(("up", "down"))
    assert main(["history", str(store.path), "--by", "sample", "--moved", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [g["name"] for g in found["sample"]] == ["grew"]
    assert found["sample"][0]["q"] < 1e-6


def test_history_takes_a_run_folder_and_names_an_unknown_run(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.add("run-1", [trial()], 1.0)
    assert main(["history", str(store.path.parent), "--run", "run-2"]) == 2
    assert "did you mean 'run-1'" in capsys.readouterr().err


def test_the_band_is_on_the_pass_rate_and_bounds_are_in_it() -> None:
    found = [Difficulty({}, f, p, n) for f, p, n in (("a", 0, 8), ("a", 1, 8), ("b", 8, 8), ("b", 0, 0))]
    assert [d.within((0.125, 0.9)) for d in found] == [False, True, False, False]
    result = summary(found, (0.125, 0.9))
    assert {k: result[k] for k in ("samples", "tried", "trials", "never", "always", "in_band")} == {
        "samples": 4, "tried": 3, "trials": 24, "never": 1, "always": 1, "in_band": 1,
    }  # fmt: skip
    assert result["families"]["b"]["rate"] == 1.0
