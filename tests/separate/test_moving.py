"""A generation that moves keeps its tokens, logprobs and versions, and spends its budget once."""

from __future__ import annotations

from typing import Any

import numpy as np
import trio
import trio.testing

from tests.separate.play import PlayEngine
from uniagent.engine.ports import Finish, Generation, Ids, KvPolicy, Sampling, VersionSpan
from uniagent.engine.separate import messages
from uniagent.engine.separate.moving import MovingEngine, splice

PROMPT = np.array([100], np.int32)


def pair() -> tuple[MovingEngine, PlayEngine, list[tuple[int, int, str]]]:
    """An engine, what it is made of, and what was asked elsewhere: (prompt, budget, session)."""
    core, other, asked = PlayEngine(), PlayEngine(), []
    core.version, other.version = 4, 5
    engine = MovingEngine(core, core.interrupt)

    async def elsewhere(prompt: Ids, sampling: Sampling, session: str) -> Generation:
        asked.append((len(prompt), sampling.max_tokens, session))
        return await other.generate(prompt, sampling, session=session)

    engine.elsewhere = elsewhere
    return engine, core, asked


async def test_closing_moves_a_generation_in_its_middle(autojump_clock: trio.testing.MockClock) -> None:
    engine, core, asked = pair()
    made: list[Generation] = []
    seen: list[int] = []

    async def generate() -> None:
        made.append(await engine.generate(PROMPT, Sampling(10), session="s", on_tokens=lambda ids: seen.extend(ids)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate)
        await trio.sleep(3.5)
        await engine.close()
        assert core.running == 0
    (whole,) = made
    assert whole.token_ids.tolist() == seen == list(range(101, 111))
    assert whole.logprobs.tolist() == [-float(i) for i in seen]
    assert whole.versions == (VersionSpan(4, 0, 3), VersionSpan(5, 3, 10))
    assert whole.finish is Finish.STOP
    assert asked == [(4, 7, "s+3")]  # what is left of the budget, and draws of its own


async def test_a_closed_engine_takes_nothing_and_opens_again(autojump_clock: trio.testing.MockClock) -> None:
    engine, _, asked = pair()
    await engine.close()
    refused = await engine.generate_here(PROMPT, Sampling(5), "guest")
    assert (len(refused.token_ids), refused.finish) == (0, Finish.ABORTED)
    assert (await engine.generate(PROMPT, Sampling(1), session="s")).versions == (VersionSpan(5, 0, 1),)
    engine.open()
    assert (await engine.generate(PROMPT, Sampling(1), session="s")).versions == (VersionSpan(4, 0, 1),)
    assert len(asked) == 1


async def test_an_engine_without_others_waits_until_it_opens(autojump_clock: trio.testing.MockClock) -> None:
    core = PlayEngine()
    engine = MovingEngine(core, core.interrupt)
    await engine.close()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: engine.generate(PROMPT, Sampling(2), session="s"))
        await trio.sleep(100)
        assert core.running == 0
        engine.open()
        await trio.testing.wait_all_tasks_blocked()
        assert core.running == 1


async def test_what_was_sampled_before_a_cancel_is_accounted_for_wherever_it_was(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine, _, _ = pair()
    lost: list[Generation] = []
    with trio.move_on_after(8):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: engine.generate(PROMPT, Sampling(99), session="s", on_abort=lost.append))
            await trio.sleep(3.5)
            await engine.close()
            await trio.sleep(50)
    (made,) = lost
    assert (made.token_ids.tolist(), made.finish) == ([101, 102, 103], Finish.ABORTED)


async def test_a_reader_that_has_enough_ends_it(autojump_clock: trio.testing.MockClock) -> None:
    engine, core, asked = pair()
    await engine.close()
    made = await engine.generate(PROMPT, Sampling(10), session="s", on_tokens=lambda ids: True)
    assert len(made.token_ids) == 10  # it came at once; what is too much is the codec's to cut
    assert len(asked) == 1
    assert core.running == 0


def test_a_splice_says_who_cut_what_and_survives_the_wire() -> None:
    def part(start: int, n: int, finish: Finish, kept: Any = None) -> Generation:
        ids = np.arange(start, start + n, dtype=np.int32)
        logprobs = np.float32(1) / np.arange(3, 3 + n, dtype=np.float32)
        return Generation(ids, logprobs, (VersionSpan(1, 0, n),), (VersionSpan(start, 0, start + n),), finish, 2, kept)

    kept = (None, np.array([5, 6], np.int32))
    whole = splice([part(0, 2, Finish.ABORTED, kept), part(2, 3, Finish.LENGTH)])
    again = messages.read_generation(messages.generation(whole))
    for made in (whole, again):
        assert made.token_ids.tolist() == [0, 1, 2, 3, 4]
        assert made.versions == (VersionSpan(1, 0, 5),)
        assert made.kv_versions == (VersionSpan(2, 0, 5),)
        assert made.kept is not None
        assert [None if k is None else k.tolist() for k in made.kept] == [None, [5, 6], None, None, None]
        assert (made.finish, made.cached_tokens) == (Finish.LENGTH, 2)
    assert np.array_equal(again.logprobs, whole.logprobs)


async def test_updates_go_through(autojump_clock: trio.testing.MockClock) -> None:
    engine, core, _ = pair()
    await engine.update(None, 9, KvPolicy.RECOMPUTE)
    assert core.version == 9
