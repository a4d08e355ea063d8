"""The part of the contract about weights that change while requests are in flight; see ``contract``."""

from __future__ import annotations

import numpy as np
import trio

from tests.engines.contract import (
    TOLERANCE,
    Asked,
    Subject,
    ask,
    check,
    joined,
    prompt,
    until_empty,
    versions_of,
    well_formed,
    worst,
)
from uniagent.engine.ports import Generation, Ids, KvPolicy, Sampling


@check(model=False)
async def cancelling_around_an_update_leaves_nothing_behind(subject: Subject) -> None:
    async with subject.open(slots=3) as opened:
        kept: list[Generation] = []

        async def one(number: int) -> None:
            kept.extend(
                await ask(opened.engine, Asked(prompt(number, 9, subject.vocabulary), Sampling(12), f"k{number}"))
            )

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(one, number)
            async with trio.open_nursery() as cancelled:
                for number in range(5, 10):
                    asked = Asked(prompt(number, 9, subject.vocabulary), Sampling(60), f"c{number}")
                    cancelled.start_soon(ask, opened.engine, asked)
                await trio.sleep(0.001)
                cancelled.start_soon(opened.update, 1, KvPolicy.RECOMPUTE)
                cancelled.cancel_scope.cancel()
            await opened.update(2, KvPolicy.KEEP)
        await until_empty(opened.engine)
        assert [len(g.token_ids) for g in kept] == [12] * 5
        load = opened.engine.capacity()
        assert load.kv_free == load.kv_total


async def _updated_in_flight(subject: Subject, kv: KvPolicy) -> list[tuple[Asked, Generation]]:
    """Requests of every phase (decoding, prefilling in pieces, waiting) across two updates."""
    requests = [
        Asked(prompt(n, 200 if n == 3 else 10 + 5 * n, subject.vocabulary), Sampling(1000, top_p=0.9), f"s{n}")
        for n in range(6)
    ]
    answers: list[tuple[Asked, Generation]] = []
    async with subject.open(slots=4, context=1024, prefill=8) as opened:
        done = 0  # updates

        async def one(asked: Asked) -> None:
            seen = after = 0

            def stop(ids: Ids) -> bool:
                nonlocal seen, after
                seen += len(ids)
                after += len(ids) if done == 2 else 0
                if seen >= 6:
                    begun.set()
                return after >= 6

            answers.append(
                (
                    asked,
                    await opened.engine.generate(asked.prompt, asked.sampling, session=asked.session, on_tokens=stop),
                )
            )

        async with trio.open_nursery() as nursery:
            begun = trio.Event()
            for asked in requests:
                nursery.start_soon(one, asked)
            await begun.wait()
            for version in (1, 2):
                await opened.update(version, kv)
                done += 1
        await until_empty(opened.engine)
    assert len(answers) == len(requests)
    assert max(len(g.versions) for _, g in answers) >= 2
    for asked, generation in answers:
        well_formed(asked, generation)
    return answers


@check(model=True)
async def recompute_continues_under_the_new_weights_alone(subject: Subject) -> None:
    for asked, generation in await _updated_in_flight(subject, KvPolicy.RECOMPUTE):
        ids = joined(asked, generation)
        each = versions_of(generation.versions, len(generation.token_ids))
        assert each == sorted(each)
        by_version = {v: subject.logits(ids, v) for v in set(each)}
        rows = [by_version[v][len(asked.prompt) - 1 + t] for t, v in enumerate(each)]
        logits = np.concatenate([np.zeros((len(asked.prompt) - 1, subject.vocabulary), np.float32), rows, rows[-1:]])
        assert worst(logits, asked, generation) < TOLERANCE


@check(model=True)
async def keep_continues_over_the_recorded_kv(subject: Subject) -> None:
    for asked, generation in await _updated_in_flight(subject, KvPolicy.KEEP):
        logits = subject.replay(joined(asked, generation), generation.kv_versions)
        assert worst(logits, asked, generation) < TOLERANCE
        kv = versions_of(generation.kv_versions, len(logits))
        sampled = versions_of(generation.versions, len(generation.token_ids))
        assert kv[len(asked.prompt) - 1 : -1] == sampled  # a token comes from the weights that wrote the K/V before it


@check(model=True)
async def a_pause_in_the_middle_changes_nothing(subject: Subject) -> None:
    """An update that brings the weights that are there already."""
    requests = [Asked(prompt(n, 9 + 20 * n, subject.vocabulary), Sampling(30), f"s{n}") for n in range(3)]
    async with subject.open(slots=2) as opened:
        alone = await ask(opened.engine, *requests)
        for kv in KvPolicy:
            again: list[Generation] = []

            async def all_of_them(into: list[Generation]) -> None:
                into.extend(await ask(opened.engine, *requests))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(all_of_them, again)
                for _ in range(4):
                    await trio.sleep(0.002)
                    await opened.update(0, kv)
            for before, after in zip(alone, again, strict=True):
                assert before.token_ids.tolist() == after.token_ids.tolist()
                assert np.abs(before.logprobs - after.logprobs).max() < TOLERANCE


@check(model=True)
async def what_waited_over_an_update_says_whose_kv_it_took(subject: Subject) -> None:
    """Of two requests with one prompt the second starts after the update, while the first holds K/V of old weights."""
    start = prompt(13, 70, subject.vocabulary)
    answers: list[tuple[Asked, Generation]] = []
    async with subject.open(slots=1, context=1024) as opened:
        begun, updated = trio.Event(), False

        async def one(asked: Asked) -> None:
            after = 0

            def stop(ids: Ids) -> bool:
                nonlocal after
                begun.set()
                after += len(ids) if updated else 0
                return after >= 12

            generation = await opened.engine.generate(
                asked.prompt, asked.sampling, session=asked.session, on_tokens=stop
            )
            answers.append((asked, generation))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, Asked(start, Sampling(900), "first"))
            await begun.wait()
            nursery.start_soon(one, Asked(start, Sampling(900, turn=1), "second"))
            await opened.update(1, KvPolicy.KEEP)
            updated = True
    assert len(answers) == 2
    for asked, generation in answers:
        well_formed(asked, generation)
        logits = subject.replay(joined(asked, generation), generation.kv_versions)
        assert worst(logits, asked, generation) < TOLERANCE


@check(model=True)
async def many_updates_lose_no_request(subject: Subject) -> None:
    async with subject.open(slots=4) as opened, trio.open_nursery() as nursery:

        async def one(number: int) -> None:
            asked = Asked(prompt(number, 5 + number, subject.vocabulary), Sampling(20), f"s{number}")
            (generation,) = await ask(opened.engine, asked)
            well_formed(asked, generation)
            assert len(generation.token_ids) == 20

        for number in range(20):
            nursery.start_soon(one, number)
        for version in (1, 2, 3, 1, 2):
            await opened.update(version, KvPolicy.RECOMPUTE)
