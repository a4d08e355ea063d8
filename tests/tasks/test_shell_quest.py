"""shell_quest in the real sandbox: right episodes earn 1, wrong ones 0; what is recorded is what a model would see."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tomli
import trio

from uniagent.engine.errors import UserError
from uniagent.engine.ports import Failure
from uniagent.engine.providers import NodeProviders
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.config import ENDPOINT
from uniagent.tasks.shell_quest.data import samples
from uniagent.tasks.shell_quest.demonstrate import Demonstration, record
from uniagent.tasks.shell_quest.make_model import TASK, example
from uniagent.tasks.shell_quest.players import MISTAKES, Player, Turn, right, sloppy
from uniagent.tasks.shell_quest.tokenizer import build
from uniagent.tasks.shell_quest.words import FAMILIES

ROWS = list(islice(samples("heldout", 5), len(FAMILIES)))


async def play(player: Callable[[int], Player], rows: list[dict[str, Any]] = ROWS) -> list[Demonstration]:
    async with trio.open_nursery() as nursery:
        providers = NodeProviders(nursery, {"local": {"warm": 2}})
        played = await record(rows, player, resolver=TaskConfigResolver([TASK]), providers=providers, at_once=8)
        nursery.cancel_scope.cancel()
    return played


async def test_a_right_episode_of_any_family_earns_one() -> None:
    for row, shown in zip(ROWS, await play(lambda i: right), strict=True):
        assert shown.result.reward == 1.0, (row["metadata"]["family"], shown.result.details)
        assert (shown.result.outcome, shown.result.failure) == (True, None)
        assert shown.result.metrics[f"success/{row['metadata']['family']}"] == 1.0


@pytest.mark.parametrize("mistake", [*MISTAKES, "nothing"])
async def test_a_wrong_episode_of_any_family_earns_nothing(mistake: str) -> None:
    player = MISTAKES.get(mistake, lambda turn: None)
    for row, shown in zip(ROWS, await play(lambda i: player), strict=True):
        assert shown.result.reward == 0.0, (row["metadata"]["family"], shown.messages)
        assert shown.result.outcome is False
        assert shown.result.details["differences"]


async def test_only_the_directory_counts_not_how_the_agent_ended() -> None:
    def goes_on(turn: Turn) -> str:
        return right(turn) or "true"

    for shown in await play(lambda i: goes_on):
        assert (shown.result.reward, shown.result.failure) == (1.0, Failure.AGENT)
        assert shown.result.details["agent"]["stop"] == "max_steps"


async def test_a_link_in_place_of_a_copy_is_not_the_expected_tree() -> None:
    def links(turn: Turn) -> str | None:
        return f"ln -s ../{turn.name} backup/{turn.name}" if turn.number == 0 else None

    rows = [row for row in ROWS if row["metadata"]["family"] == "copy"]
    assert [shown.result.reward for shown in await play(lambda i: links, rows)] == [0.0] * len(rows)


async def test_a_recorded_episode_is_the_conversation_that_the_model_is_taught() -> None:
    rows = [next(row for row in ROWS if row["metadata"]["family"] == "largest")]
    (shown,) = await play(lambda i: right, rows)
    files = rows[0]["metadata"]["files"]
    by_size = sorted((name for name in files if "/" not in name), key=lambda name: -len(files[name]))
    tokenizer = build()
    ids, said = example(tokenizer, shown.messages)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a shell agent.<|im_end|>\n"
        f"<|im_start|>user\n{rows[0]['prompt'][0]['content']}<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "shell", "arguments": {"command": "ls -S *.txt"}}\n</tool_call>'
        f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{chr(10).join(by_size)}\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>\n"
        f'{{"name": "shell", "arguments": {{"command": "rm {by_size[0]}"}}}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n(no output)\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nDone.<|im_end|>"
    )
    assert tokenizer.decode(ids[said]).count("<|im_end|>") == 3


async def test_the_sloppy_player_is_seldom_right_and_never_hopeless() -> None:
    rows = list(islice(samples("train", 11), 60))
    rewards = [shown.result.reward for shown in await play(lambda i: sloppy(random.Random(i)), rows)]
    assert 0.2 < sum(rewards) / len(rewards) < 0.5


def test_the_model_is_taught_under_the_quickstarts_task_config() -> None:
    path = Path(__file__).parents[2] / "examples" / "quickstart_tasks.toml"
    assert tomli.loads(path.read_text())["tasks"] == [TASK]


@pytest.mark.parametrize(
    ("change", "says"),
    [({"prompt": []}, "no prompt"), ({"metadata": {"family": "copy"}}, r"metadata: files: is missing")],
)
def test_a_bad_sample_is_told_when_the_task_is_built(change: dict[str, Any], says: str) -> None:
    resolver = TaskConfigResolver([{"name": "shell_quest"}])
    row = {"name": "shell_quest", "prompt": [{"role": "user", "content": "x"}], "metadata": {}, **change}
    with pytest.raises(UserError, match=says):
        resolver.resolve(row, dict.fromkeys(ENDPOINT, "x")).build(providers=None)  # type: ignore[arg-type]
