"""Which samples come next: shares, exclusion and re-probing, determinism, saving; over finite and endless data."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.engine.config import Curriculum as Table
from uniagent.engine.curriculum.curriculum import Curriculum, open_curriculum
from uniagent.engine.curriculum.pool import LOOK, WINDOW, Rows, Stream, family_of
from uniagent.engine.errors import UserError
from uniagent.engine.registry import names

Row = dict[str, Any]
PLAIN = Table(strategy="uniform", exclude_trials=0)


def rows(n: int, families: int = 1) -> list[Row]:
    return [{"name": "t", "n": i, "metadata": {"family": f"f{i % families}"}} for i in range(n)]


def endless(families: str = "abc", most: int | None = None) -> Iterator[Row]:
    count = itertools.count() if most is None else range(most)
    return ({"name": "t", "n": i, "metadata": {"family": families[i * 7 % len(families)]}} for i in count)


def finite(n: int, table: Table = PLAIN, *, seed: int = 0, families: int = 1) -> Curriculum:
    return Curriculum(Rows(rows(n, families), table.family), table, seed=seed)


def stream(table: Table = PLAIN, *, seed: int = 0, families: str = "abc") -> Curriculum:
    return Curriculum(Stream(endless(families), table.family), table, seed=seed)


def play(curriculum: Curriculum, steps: int, passes: Any, *, batch: int = 4, size: int = 8) -> list[int]:
    """Train: ``passes(n)`` of ``size`` trials of row n pass. The rows drawn."""
    drawn = []
    for step in range(steps):
        for number, row in list(islice(curriculum, batch)):
            drawn.append(row["n"])
            k = passes(row)
            curriculum.done(number, [True] * k + [False] * (size - k))
        curriculum.advance(step + 1)
    return drawn


def test_uniform_takes_every_row_once_before_any_twice() -> None:
    drawn = play(finite(20), 10, lambda row: 4)
    assert sorted(drawn[:20]) == sorted(drawn[20:40]) == list(range(20))
    assert drawn[:20] != sorted(drawn[:20])


def test_numbers_count_up_and_a_row_flies_once_while_there_are_others() -> None:
    drawn = list(islice(finite(6), 6))
    assert [number for number, _ in drawn] == list(range(6))
    assert len({row["n"] for _, row in drawn}) == 6


def test_more_draws_in_flight_than_rows_are_spread_evenly() -> None:
    assert set(Counter(row["n"] for _, row in islice(finite(3), 9)).values()) == {3}


def test_samples_that_always_or_never_pass_are_left_out_and_probed_again() -> None:
    table = Table(strategy="uniform", exclude_trials=8, reprobe=0.1)
    curriculum = finite(40, table)
    drawn = play(curriculum, 200, lambda row: {0: 0, 1: 8}.get(row["n"] % 4, 4))
    late = Counter(n % 4 for n in drawn[200:])
    assert late[0] + late[1] < 0.1 * sum(late.values())
    assert curriculum.excluded().sum() == 20
    assert set(drawn[200:]) == set(range(40))  # nothing is lost for good


def test_a_sample_comes_back_once_a_probe_shows_both_outcomes() -> None:
    table = Table(strategy="uniform", exclude_trials=8, reprobe=0.2)
    curriculum = finite(8, table)
    play(curriculum, 20, lambda row: 0 if row["n"] == 3 else 4)
    assert curriculum.excluded().tolist() == [n == 3 for n in range(8)]
    drawn = play(curriculum, 60, lambda row: 1 if row["n"] == 3 else 4)
    assert not curriculum.excluded().any()
    assert Counter(drawn[-80:])[3] > 5


def test_one_success_in_many_trials_is_no_rate_of_0() -> None:
    curriculum = finite(1, Table(strategy="uniform", exclude_trials=8))
    for step in range(5):
        number, _ = next(curriculum)
        curriculum.done(number, [True] + [False] * 63)
        curriculum.advance(step)
    assert not curriculum.excluded().any()


def test_groups_that_failed_outside_the_model_teach_nothing() -> None:
    curriculum = finite(1, Table())
    number, _ = next(curriculum)
    before = curriculum.known().rate.tolist()
    curriculum.done(number, [])
    curriculum.advance(1)
    assert curriculum.known().rate.tolist() == before


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(names("strategies")), seed=st.integers(0, 5), n=st.integers(1, 30))
def test_every_sample_is_drawn_again_within_its_reprobe_share(name: str, seed: int, n: int) -> None:
    table = Table(strategy=name, reprobe=0.1)
    draw = np.random.default_rng(seed)
    skill = {i: int(draw.choice([0, 0, 1, 4, 8, 8])) for i in range(n)}
    drawn = play(finite(n, table, seed=seed, families=3), 40 * n // 4 + 1, lambda row: skill[row["n"]])
    for i in range(n):
        where = [at for at, one in enumerate(drawn) if one == i]
        assert max(b - a for a, b in itertools.pairwise([-1, *where, len(drawn)])) <= 2 * n / table.reprobe + 1


def test_learnability_goes_where_groups_differ() -> None:
    drawn = play(finite(40, Table(strategy="learnability", exclude_trials=0)), 100, lambda row: row["n"] % 5)
    late = Counter(n % 5 for n in drawn[200:])
    assert late[4] > late[3] > late[2] > late[1] > late[0]


def test_quotas_are_met_by_the_draws() -> None:
    table = Table(strategy="mixture", quotas={"f0": 0.7}, exclude_trials=0, reprobe=0.001)
    pool = Rows(rows(30) + [{**row, "metadata": {"family": "g"}} for row in rows(300)], table.family)
    curriculum = Curriculum(pool, table, seed=0)
    families = []
    for _ in range(200):
        number, row = next(curriculum)
        families.append(row["metadata"]["family"])
        curriculum.done(number, [True, False])
        curriculum.advance(0)
    assert Counter(families)["f0"] / 200 == pytest.approx(0.7, abs=0.08)


def test_what_arrives_late_counts_by_sample_and_not_by_arrival() -> None:
    states = []
    for order in (1, -1):
        curriculum = finite(10, Table())
        batch = list(islice(curriculum, 4))
        for number, row in batch[::order]:
            curriculum.done(number, [row["n"] % 2 == 0] * 4 + [True])
        curriculum.advance(1)
        states.append(curriculum.state())
    assert states[0] == states[1]


def test_outcomes_wait_for_the_step() -> None:
    curriculum = finite(4, Table())
    number, _ = next(curriculum)
    before = curriculum.weights().tolist()
    curriculum.done(number, [False] * 8)
    assert curriculum.weights().tolist() == before
    curriculum.advance(1)
    assert curriculum.weights().tolist() != before


# ---------------------------------------------------------------- endless data


def test_an_endless_source_gives_each_row_once_with_the_shares_of_the_data() -> None:
    curriculum = stream()
    drawn = play(curriculum, 1500, lambda row: 4)
    assert len(set(drawn)) == len(drawn) == 6000
    assert len(curriculum.pool.sight()) <= WINDOW
    assert max(drawn) < 6000 + WINDOW + LOOK


def test_families_that_teach_nothing_become_rare_but_stay() -> None:
    curriculum = stream(Table(strategy="learnability"), families="abcd")
    easy = {"a": 0, "b": 8}
    drawn = play(curriculum, 300, lambda row: easy.get(row["metadata"]["family"], 4))
    families = Counter("abcd"[n * 7 % 4] for n in drawn[400:])
    assert families["a"] + families["b"] < 0.2 * families.total()
    assert min(families.values()) > 0.005 * families.total()
    assert max(drawn) < 4 * len(drawn) + WINDOW  # it does not read on without need


def test_a_family_that_appears_late_joins() -> None:
    late = itertools.chain(
        endless("a", most=WINDOW), ({"name": "t", "n": -i, "metadata": {"family": "z"}} for i in itertools.count(1))
    )
    curriculum = Curriculum(Stream(late, PLAIN.family), Table(), seed=0)
    drawn = play(curriculum, 400, lambda row: 4)
    assert any(n < 0 for n in drawn)


def test_a_stream_that_ends_says_so() -> None:
    curriculum = Curriculum(Stream(endless(most=10), PLAIN.family), PLAIN, seed=0)
    assert sorted(row["n"] for _, row in curriculum) == list(range(10))


def test_a_source_that_knows_its_length_is_finite() -> None:
    assert isinstance(open_curriculum(lambda repeat: iter(rows(5)), PLAIN, seed=0).pool, Rows)
    assert isinstance(open_curriculum(lambda repeat: endless(), PLAIN, seed=0).pool, Stream)


def test_a_family_is_a_path_in_the_row_or_the_task() -> None:
    assert family_of({"name": "t", "metadata": {"family": 3}}, "metadata.family") == "3"
    assert family_of({"name": "t", "metadata": {}}, "metadata.family") == "t"
    assert family_of({"name": "t", "metadata": "x"}, "metadata.family") == "t"


# ---------------------------------------------------------------- determinism and saving


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from([finite, stream]),
    name=st.sampled_from(names("strategies")),
    flying=st.integers(0, 6),
    steps=st.integers(0, 12),
)
def test_a_restored_curriculum_goes_on_as_if_nothing_had_happened(
    kind: Any, name: str, flying: int, steps: int
) -> None:
    table = Table(strategy=name)

    def fresh() -> Curriculum:
        return stream(table, seed=1) if kind is stream else finite(30, table, seed=1, families=3)

    def skill(row: Mapping[str, Any]) -> int:
        return (0, 2, 4, 8)[int(row["n"]) % 4]

    whole = fresh()
    play(whole, steps, skill)
    begun = list(islice(whole, flying))
    state = json.loads(json.dumps(whole.state()))
    again = fresh()
    again.restore(state)
    assert list(islice(again, flying)) == begun
    for number, row in begun:
        for one in (whole, again):
            one.done(number, [True] * skill(row) + [False] * (8 - skill(row)))
    assert play(again, 10, skill) == play(whole, 10, skill)
    assert again.state() == whole.state()


def test_the_seed_decides_the_order() -> None:
    def order(seed: int) -> list[int]:
        return [row["n"] for _, row in islice(finite(50, seed=seed), 50)]

    assert order(0) == order(0) != order(1)


def test_other_data_is_refused_at_restoring() -> None:
    state = finite(10).state()
    with pytest.raises(UserError, match="has 11 samples"):
        finite(11).restore(state)
    with pytest.raises(UserError, match="no known end"):
        stream().restore(state)


def test_another_strategy_may_be_named_by_its_place() -> None:
    curriculum = finite(10, Table(strategy="uniagent.engine.curriculum.strategies:growth"))
    assert len(list(islice(curriculum, 5))) == 5
    with pytest.raises(UserError, match="there is no strategy named 'growht': did you mean 'growth'"):
        finite(10, Table(strategy="growht"))
