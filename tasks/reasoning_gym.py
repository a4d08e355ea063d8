"""The task ``reasoning_gym``: the procedural puzzles of the package of that name (``pip install reasoning-gym``).

A sample is (dataset, config, seed): the puzzle is made again from it where it is scored, so that rows stay small and
survive JSON. The agent answers between ``<answer>`` and ``</answer>`` in its last words; the reward is the
package's score in [0, 1]. Samples are single-turn without tools; with a tool the same samples make several turns.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import trio
from attrs import field, frozen

from uniagent.engine.errors import UserError, nearest
from uniagent.engine.ports import AgentResult, Json, ModelEndpoint, Providers, Sandbox, TaskResult
from uniagent.tasks.base import run_episode
from uniagent.tasks.check import Attempt
from uniagent.tasks.config import TaskConfig
from uniagent.tasks.structure import structure
from uniagent.tasks.verify import last_words

SPLITS = ("train", "heldout")
HELD_OUT = 5  # one question in five
TRIES = 100  # of finding a puzzle on the wanted side of the split; a few datasets have only some questions
INSTRUCTION = "Give your final answer between <answer> and </answer>, and nothing else there."
NEEDS_CONFIG = ("composite",)


@frozen
class Puzzle:
    """The metadata of a sample. ``answer`` is the package's own, null where it only knows how to check one."""

    dataset: str
    seed: int
    config: Mapping[str, Json] = field(factory=dict)
    answer: str | None = None

    def make(self) -> tuple[Any, dict[str, Any]]:
        """(the dataset, its entry); raises UserError for a dataset or config that does not exist."""
        return make(self.dataset, self.seed, self.config)


def samples(
    split: str, seed: int, *, datasets: Sequence[str] | Mapping[str, Mapping[str, Json]] = ()
) -> Iterator[dict[str, Any]]:
    """An endless stream of rows over ``datasets`` (names, or name -> config; default: all), which take turns. A hash of
    the question decides the split. Raises UserError for a split or dataset that does not exist."""
    if split not in SPLITS:
        raise UserError(f"reasoning_gym has no split {split!r}: {nearest(split, SPLITS)}")
    configs = dict(datasets) if isinstance(datasets, Mapping) else {name: {} for name in datasets or all_datasets()}
    draw = random.Random(f"reasoning_gym/{split}/{seed}")
    while True:
        found = 0
        for name, config in configs.items():
            for _ in range(TRIES):
                puzzle_seed = draw.randrange(1 << 31)
                _, entry = make(name, puzzle_seed, config)
                if held_out(name, entry["question"]) == (split == "heldout"):
                    found += 1
                    yield _row(name, puzzle_seed, config, entry)
                    break
        if not found:
            raise UserError(f"reasoning_gym: no question of {sorted(configs)} is in the split {split!r}")


def all_datasets() -> list[str]:
    """Every dataset that needs no config of its own."""
    return sorted(set(_factory().DATASETS) - set(NEEDS_CONFIG))


def make(name: str, seed: int, config: Mapping[str, Json]) -> tuple[Any, dict[str, Any]]:
    """One puzzle as (dataset, entry), a function of its arguments."""
    factory = _factory()
    if name not in factory.DATASETS:
        raise UserError(f"reasoning_gym has no dataset {name!r}: {nearest(name, factory.DATASETS)}")
    try:
        dataset = factory.create_dataset(name, seed=seed, size=1, **config)
    except (TypeError, AssertionError, ValueError) as problem:
        raise UserError(f"reasoning_gym dataset {name!r}: config {dict(config)}: {problem}") from problem
    return dataset, dataset[0]


def held_out(name: str, question: str) -> bool:
    digest = hashlib.md5(f"{name}\n{question}".encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % HELD_OUT == 0


def _row(name: str, seed: int, config: Mapping[str, Json], entry: Mapping[str, Any]) -> dict[str, Any]:
    puzzle = {"dataset": name, "seed": seed, "config": dict(config), "answer": entry["answer"]}
    prompt = f"{entry['question'].rstrip()}\n\n{INSTRUCTION}"
    return {"name": "reasoning_gym", "prompt": [{"role": "user", "content": prompt}], "metadata": puzzle}


def _factory() -> Any:
    try:
        from reasoning_gym import factory
    except ImportError as problem:
        raise UserError(f"the task reasoning_gym needs a package: pip install reasoning-gym ({problem})") from None
    return factory


def answer_in(text: str) -> str | None:
    """What stands between the last ``<answer>`` and the ``</answer>`` after it."""
    _, opened, rest = text.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return answer.strip() if opened and closed else None


async def _says(text: str, sandbox: Sandbox) -> AgentResult:
    return AgentResult(True, [{"role": "assistant", "content": text}])


class ReasoningGym:
    """Reward: the package's score of the answer; the outcome is a full score."""

    def __init__(self, config: TaskConfig, providers: Providers) -> None:
        self.config, self.providers = config, providers
        self.puzzle = structure(Puzzle, config.metadata, f"task {config.name!r}: metadata")

    async def run(self, model: ModelEndpoint) -> TaskResult:
        return await run_episode(self.config, self.providers, model, setup=self.setup, verify=self.verify)

    async def setup(self, sandbox: Sandbox) -> None:
        pass

    async def verify(self, sandbox: Sandbox, acted: AgentResult) -> TaskResult:
        answer = answer_in(last_words(acted))
        score = 0.0 if answer is None else await trio.to_thread.run_sync(self.score, answer, abandon_on_cancel=True)
        return TaskResult(
            score,
            outcome=score >= 1.0,
            flags=("no_answer",) if answer is None else (),
            metrics={f"score/{self.puzzle.dataset}": score},
            details={"answer": answer, "reference": self.puzzle.answer},
        )

    def attempts(self) -> Mapping[str, Attempt]:
        """What ``uniagent tasks check`` says in place of an agent."""
        wrong = {"wrong": partial(_says, "<answer>I do not know</answer>")}
        if self.puzzle.answer is None:
            return wrong
        bare = partial(_says, self.puzzle.answer)  # an answer outside the tags is none
        return {"oracle": partial(_says, f"<answer>{self.puzzle.answer}</answer>"), "bare": bare, **wrong}

    def score(self, answer: str) -> float:
        """In [0, 1]. Some scorers raise on an answer they cannot parse: that is a wrong answer, unless they raise on
        their own too."""
        dataset, entry = self.puzzle.make()
        try:
            return float(dataset.score_answer(answer, entry))
        except Exception:  # noqa: BLE001, whatever a scorer raises on model text
            dataset.score_answer(entry["answer"], entry)
            return 0.0
