"""The scripted engine: scripts, matches, budgets, delays on the virtual clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from uniagent.adapters.engines.scripted import Answer, Script, ScriptedEngine, build
from uniagent.engine import config
from uniagent.engine.errors import UserError
from uniagent.engine.messages import Problem
from uniagent.engine.ports import Finish, Ids, KvPolicy, Sampling, VersionSpan


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: Ids) -> str:
    return bytes(ids.tolist()).decode()


def prompt(text: str = "hi") -> Ids:
    return np.array(encode(text), np.int32)


def scripted(tmp_path: Path, *lines: dict[str, Any]) -> ScriptedEngine:
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return ScriptedEngine(Script.read(path, encode=encode, decode=decode))


async def said(engine: ScriptedEngine, text: str = "hi", session: str = "s", **sampling: Any) -> str:
    generation = await engine.generate(prompt(text), Sampling(**{"max_tokens": 99, **sampling}), session=session)
    return decode(generation.token_ids)


async def test_each_session_reads_the_script_from_its_first_line(tmp_path: Path) -> None:
    engine = scripted(tmp_path, {"text": "one"}, {"text": "two\u2028"}, {"token_ids": [51], "logprobs": [-0.5]})
    assert [await said(engine, session=s) for s in ("a", "b", "a", "b", "a")] == [
        "one",
        "one",
        "two\u2028",
        "two\u2028",
        "3",
    ]
    with pytest.raises(Problem, match="every line is used") as caught:
        await said(engine, session="a")
    assert caught.value.status == 409


async def test_match_keeps_a_line_for_prompts_that_contain_it(tmp_path: Path) -> None:
    engine = scripted(
        tmp_path, {"text": "T", "match": "title"}, {"text": "1"}, {"text": "2", "match": "go"}, {"text": "3"}
    )
    assert [await said(engine, p) for p in ("x", "go on", "a title", "x")] == ["1", "2", "T", "3"]
    engine = scripted(tmp_path, {"text": "T", "match": "title"})
    with pytest.raises(Problem, match="none of the 1 lines"):
        await said(engine, "x")


async def test_given_logprobs_are_kept_and_others_are_a_fixed_function_of_the_key(tmp_path: Path) -> None:
    lines = ({"token_ids": [1, 2], "logprobs": [-0.25, -1.5]}, {"text": "abc"})
    first, again = scripted(tmp_path, *lines), scripted(tmp_path, *lines)
    given = await first.generate(prompt(), Sampling(9), session="s")
    assert given.logprobs.tolist() == [-0.25, -1.5]
    await again.generate(prompt(), Sampling(9), session="s")
    a, b = [await e.generate(prompt(), Sampling(9, turn=1), session="s") for e in (first, again)]
    assert a.logprobs.tolist() == b.logprobs.tolist()
    assert len(set(a.logprobs.tolist())) == 3
    assert all(-2 < x <= 0 for x in a.logprobs)


@pytest.mark.parametrize(
    ("line", "sampling", "text", "finish"),
    [
        ({"text": "abcd"}, {}, "abcd", Finish.STOP),
        ({"text": "abcd"}, {"max_tokens": 3}, "abc", Finish.LENGTH),
        ({"text": "abcd"}, {"max_tokens": 4}, "abcd", Finish.STOP),
        ({"text": "abcd"}, {"stop_ids": (98,)}, "ab", Finish.STOP),
        ({"text": "abcd", "finish_reason": "length"}, {}, "abcd", Finish.LENGTH),
    ],
)
async def test_budget_stop_ids_and_finish_reason(
    tmp_path: Path, line: dict[str, Any], sampling: dict[str, Any], text: str, finish: Finish
) -> None:
    generation = await scripted(tmp_path, line).generate(
        prompt(), Sampling(**{"max_tokens": 9, **sampling}), session="s"
    )
    assert (decode(generation.token_ids), generation.finish) == (text, finish)
    assert len(generation.logprobs) == len(text)


async def test_delays_cost_virtual_time_and_cancel_cleanly(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    engine = scripted(tmp_path, {"text": "late", "delay_s": 100}, {"text": "later", "delay_s": 100})
    begun = trio.current_time()
    assert await said(engine) == "late"
    assert trio.current_time() - begun == 100
    with trio.move_on_after(5) as scope:
        await said(engine)
    assert scope.cancelled_caught
    assert engine.capacity().running == 0


async def test_versions_follow_an_update_in_the_middle_of_an_answer() -> None:
    engine = ScriptedEngine(lambda prompt, sampling, session: [7] + [8] * 99)

    async def update() -> None:
        await engine.update(None, 5, KvPolicy.KEEP)

    async with trio.open_nursery() as nursery:
        generation = await engine.generate(
            prompt(),
            Sampling(100),
            session="s",
            on_tokens=lambda ids: nursery.start_soon(update) if ids[0] == 7 else None,
        )
    spans = generation.versions
    assert (spans[0], spans[-1]) == (VersionSpan(0, 0, spans[0].end), VersionSpan(5, spans[-1].start, 100))


async def test_a_function_may_answer_and_on_tokens_may_end_it() -> None:
    engine = ScriptedEngine(lambda prompt, sampling, session: Answer(prompt[::-1], delay_s=0))
    seen: list[int] = []

    def stop(ids: Ids) -> bool:
        seen.extend(ids)
        return len(seen) == 2

    generation = await engine.generate(prompt("abc"), Sampling(9), session="s", on_tokens=stop)
    assert decode(generation.token_ids) == "cb"
    assert generation.finish is Finish.ABORTED


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "script.jsonl:1: not JSON"),
        ("[1]", "expected an object"),
        ('{"txt": "a"}', "did you mean 'text'"),
        ("{}", "exactly one of text and token_ids"),
        ('{"text": "a", "token_ids": [1]}', "exactly one"),
        ('{"token_ids": [1.5]}', "list of integers"),
        ('{"token_ids": [1], "logprobs": [1, 2]}', "as many logprobs"),
        ('{"text": "a", "finish_reason": "done"}', "finish_reason is stop or length"),
        ('{"text": 3}', "must be strings"),
        ('{"text": "a", "delay_s": "x"}', "script.jsonl:1"),
    ],
)
def test_a_bad_script_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "script.jsonl").write_text(line)
    with pytest.raises(UserError, match=message):
        Script.read(tmp_path / "script.jsonl", encode=encode)


def test_the_factory_reads_the_script_from_the_options(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.options\.script"):
        build(config.Engine(), encode=encode)
    with pytest.raises(UserError, match="cannot read the script"):
        build(config.Engine(options={"script": str(tmp_path / "none")}), encode=encode)
    (tmp_path / "s").write_text('{"text": "a", "match": "b"}')
    with pytest.raises(UserError, match="need a tokenizer"):
        build(config.Engine(options={"script": str(tmp_path / "s")}), encode=encode)
    engine = build(config.Engine(options={"script": str(tmp_path / "s")}, context=64), encode=encode, decode=decode)
    assert engine.capacity().context == 64
