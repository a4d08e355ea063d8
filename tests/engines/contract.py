"""The contract of every InferenceEngine, as checks that run on any implementation.

A ``Subject`` opens an engine and knows the truth about its model; ``applicable(subject)`` lists the checks. A test file
of an implementation parametrises over both. Nothing here knows threads, slots or a vendor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
import trio
from attrs import frozen

from uniagent.engine.ports import Finish, Generation, Ids, InferenceEngine, KvPolicy, Sampling, VersionSpan

Logits = npt.NDArray[np.float32]  # [T, V]

TOLERANCE = 1e-4  # of a logprob in nats, fp32


@frozen
class Opened:
    """An engine at version 0. ``update`` moves it to the subject's weights of a version; ``crash`` makes its next step
    fail."""

    engine: InferenceEngine
    update: Callable[[int, KvPolicy], Awaitable[None]]
    crash: Callable[[], Awaitable[None]]


class Subject(Protocol):
    """``model`` False: a stand-in without a model, for which only the checks about requests apply. It must then answer
    with at least 64 tokens, the first of which depends on nothing."""

    @property
    def model(self) -> bool: ...
    @property
    def vocabulary(self) -> int: ...
    def open(self, *, slots: int = 8, context: int = 96, prefill: int = 32) -> AbstractAsyncContextManager[Opened]: ...
    def logits(self, ids: Ids, version: int) -> Logits:
        """Of a plain forward under a version's weights: row t is the distribution of token t + 1."""
        ...

    def replay(self, ids: Ids, spans: tuple[VersionSpan, ...]) -> Logits:
        """Of a forward in which each span's tokens are computed by its version over the K/V before."""
        ...


Check = Callable[[Any], Awaitable[None]]
_CHECKS: list[tuple[Check, bool]] = []


def check(*, model: bool) -> Callable[[Check], Check]:
    def add(fn: Check) -> Check:
        _CHECKS.append((fn, model))
        return fn

    return add


def applicable(subject: Subject) -> list[Check]:
    import tests.engines.contract_updates  # noqa: F401  its checks are noted when it is imported

    return [fn for fn, model in _CHECKS if subject.model or not model]


# ---------------------------------------------------------------- helpers


def prompt(seed: int, length: int, vocabulary: int) -> Ids:
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32)


@frozen(eq=False)
class Asked:
    prompt: Ids
    sampling: Sampling
    session: str = "s"


async def ask(engine: InferenceEngine, *requests: Asked) -> list[Generation]:
    """All at once; answers in the order asked."""
    answers: dict[int, Generation] = {}

    async def one(number: int, asked: Asked) -> None:
        answers[number] = await engine.generate(asked.prompt, asked.sampling, session=asked.session)

    async with trio.open_nursery() as nursery:
        for number, asked in enumerate(requests):
            nursery.start_soon(one, number, asked)
    return [answers[number] for number in range(len(requests))]


async def until_empty(engine: InferenceEngine) -> None:
    with trio.fail_after(10):
        while (load := engine.capacity()).running or load.waiting:
            await trio.sleep(0.001)


def versions_of(spans: tuple[VersionSpan, ...], length: int) -> list[int]:
    """Token by token; the spans must cover [0, length) in order and differ from one to the next."""
    each = [span.version for span in spans for _ in range(span.start, span.end)]
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])][: len(spans)]
    assert len(each) == length
    assert all(a.version != b.version for a, b in pairwise(spans))
    return each


def well_formed(asked: Asked, generation: Generation) -> None:
    count = len(generation.token_ids)
    assert generation.token_ids.dtype == np.int32
    assert generation.logprobs.dtype == np.float32
    assert generation.logprobs.shape == (count,)
    assert np.isfinite(generation.logprobs).all()
    assert (generation.logprobs <= 1e-6).all()
    versions_of(generation.versions, count)
    if count:
        versions_of(generation.kv_versions, len(asked.prompt) + count)
    assert 0 <= generation.cached_tokens < len(asked.prompt)
    if generation.kept is not None:
        assert len(generation.kept) == count


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def worst(logits: Logits, asked: Asked, generation: Generation) -> float:
    """Largest error of the generation's logprobs against logits of prompt + tokens, under its own kept sets."""
    rows = logits[len(asked.prompt) - 1 : -1].astype(np.float64) / (asked.sampling.temperature or 1.0)
    logp = log_softmax(rows)
    error = 0.0
    for t, token in enumerate(generation.token_ids):
        expected = logp[t, token]
        kept = generation.kept[t] if generation.kept is not None else None
        if kept is not None:
            assert token in kept
            expected -= np.log(np.exp(logp[t, kept]).sum())
        error = max(error, abs(expected - generation.logprobs[t]))
    return error


def joined(asked: Asked, generation: Generation) -> Ids:
    return np.concatenate([asked.prompt, generation.token_ids])


SETTINGS = (
    Sampling(12),
    Sampling(12, temperature=0.7),
    Sampling(12, top_p=0.8),
    Sampling(12, top_k=5),
    Sampling(12, temperature=1.3, top_p=0.9, top_k=20),
    Sampling(12, temperature=0.0),
)


# ---------------------------------------------------------------- requests


@check(model=False)
async def streams_are_complete_and_in_order(subject: Subject) -> None:
    async with subject.open() as opened, trio.open_nursery() as nursery:

        async def one(number: int) -> None:
            asked = Asked(prompt(number, 3 + number, subject.vocabulary), Sampling(5 + number % 7), f"s{number}")
            seen: list[int] = []
            generation = await opened.engine.generate(
                asked.prompt, asked.sampling, session=asked.session, on_tokens=lambda ids: seen.extend(ids.tolist())
            )
            well_formed(asked, generation)
            assert seen == generation.token_ids.tolist()
            assert len(seen) == asked.sampling.max_tokens
            assert generation.finish is Finish.LENGTH

        for number in range(24):
            nursery.start_soon(one, number)


@check(model=False)
async def a_stop_id_ends_and_is_included(subject: Subject) -> None:
    async with subject.open() as opened:
        start = prompt(1, 9, subject.vocabulary)
        (free,) = await ask(opened.engine, Asked(start, Sampling(20)))
        stops = (int(free.token_ids[7]), int(free.token_ids[12]))
        (stopped,) = await ask(opened.engine, Asked(start, Sampling(20, stop_ids=stops)))
        length = next(t for t, token in enumerate(free.token_ids) if token in stops) + 1
        assert stopped.finish is Finish.STOP
        assert stopped.token_ids.tolist() == free.token_ids[:length].tolist()


@check(model=False)
async def the_context_ends_a_generation(subject: Subject) -> None:
    async with subject.open(context=40) as opened:
        assert opened.engine.capacity().context == 40
        asked = Asked(prompt(2, 30, subject.vocabulary), Sampling(1000))
        (generation,) = await ask(opened.engine, asked)
        well_formed(asked, generation)
        assert generation.finish is Finish.LENGTH
        assert len(generation.token_ids) == 10
        (one,) = await ask(opened.engine, Asked(prompt(2, 39, subject.vocabulary), Sampling(1000)))
        assert len(one.token_ids) == 1


@check(model=False)
async def prompts_that_cannot_be_served_are_refused(subject: Subject) -> None:
    async with subject.open(context=40) as opened:
        bad = [
            np.zeros(0, np.int32),
            np.zeros(40, np.int32),
            np.zeros(4000, np.int32),
            np.array([1, -1], np.int32),
            np.array([subject.vocabulary], np.int32),
        ]
        for ids in bad:
            with pytest.raises(ValueError, match="token"):
                await opened.engine.generate(ids, Sampling(3), session="s")
        (generation,) = await ask(opened.engine, Asked(prompt(3, 5, subject.vocabulary), Sampling(3)))
        assert len(generation.token_ids) == 3
        await until_empty(opened.engine)


@check(model=False)
async def cancelling_aborts_in_every_phase(subject: Subject) -> None:
    """More requests than slots, long prompts in pieces, cancelled at once, early and late: the others are complete."""
    async with subject.open(slots=3, context=96, prefill=8) as opened:

        async def cancelled(number: int, after: int) -> None:
            seen = 0

            def count(ids: Ids) -> None:
                nonlocal seen
                seen += len(ids)
                if seen >= after:
                    scope.cancel()

            with trio.CancelScope() as scope:
                if not after:
                    scope.deadline = trio.current_time() + 0.0002 * number
                ids = prompt(number, 40, subject.vocabulary)
                await opened.engine.generate(
                    ids, Sampling(50), session=f"c{number}", on_tokens=count if after else None
                )

        kept: list[Generation] = []

        async def whole(number: int) -> None:
            asked = Asked(prompt(100 + number, 30, subject.vocabulary), Sampling(9), f"w{number}")
            kept.extend(await ask(opened.engine, asked))

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(cancelled, number, (0, 1, 4)[number % 3])
                nursery.start_soon(whole, number)
        await until_empty(opened.engine)
        assert [len(g.token_ids) for g in kept] == [9] * 12
        load = opened.engine.capacity()
        assert load.kv_free == load.kv_total


@check(model=False)
async def on_tokens_may_end_a_generation(subject: Subject) -> None:
    async with subject.open() as opened:
        asked = Asked(prompt(4, 6, subject.vocabulary), Sampling(80))
        (whole,) = await ask(opened.engine, asked)
        seen: list[int] = []

        def stop(ids: Ids) -> bool:
            seen.extend(ids.tolist())
            return len(seen) >= 5

        cut = await opened.engine.generate(asked.prompt, asked.sampling, session="s", on_tokens=stop)
        well_formed(asked, cut)
        assert seen == cut.token_ids[: len(seen)].tolist()
        assert cut.token_ids.tolist() == whole.token_ids[: len(cut.token_ids)].tolist()
        assert cut.finish is Finish.ABORTED or len(cut.token_ids) == 80
        await until_empty(opened.engine)


@check(model=False)
async def what_was_sampled_before_a_cancel_is_told(subject: Subject) -> None:
    async with subject.open() as opened:
        asked = Asked(prompt(12, 6, subject.vocabulary), Sampling(80))
        (whole,) = await ask(opened.engine, asked)
        told: list[Generation] = []
        seen: list[int] = []

        def stop(ids: Ids) -> None:
            seen.extend(ids.tolist())
            if len(seen) >= 5:
                scope.cancel()

        with trio.CancelScope() as scope:
            await opened.engine.generate(
                asked.prompt, asked.sampling, session=asked.session, on_tokens=stop, on_abort=told.append
            )
        if scope.cancelled_caught:
            (partial,) = told
            well_formed(asked, partial)
            assert partial.finish is Finish.ABORTED
            assert len(partial.token_ids) >= len(seen)
            assert partial.token_ids.tolist() == whole.token_ids[: len(partial.token_ids)].tolist()
        else:
            assert len(seen) == 80
        await until_empty(opened.engine)


@check(model=False)
async def thousands_may_queue(subject: Subject) -> None:
    async with subject.open(slots=64) as opened:
        requests = [Asked(prompt(n % 50, 4, subject.vocabulary), Sampling(1), f"s{n}") for n in range(2000)]
        generations = await ask(opened.engine, *requests)
        assert [len(g.token_ids) for g in generations] == [1] * 2000


@check(model=False)
async def versions_follow_updates(subject: Subject) -> None:
    async with subject.open() as opened:
        asked = Asked(prompt(5, 6, subject.vocabulary), Sampling(4))
        for version in (0, 1, 2):
            if version:
                await opened.update(version, KvPolicy.RECOMPUTE)
            (generation,) = await ask(opened.engine, asked)
            assert generation.versions == (VersionSpan(version, 0, 4),)
            assert generation.kv_versions == (VersionSpan(version, 0, 10),)


@check(model=True)
async def a_crash_reaches_every_waiter_at_once(subject: Subject) -> None:
    failed = 0

    async def one(opened: Opened, number: int) -> None:
        nonlocal failed
        try:
            await opened.engine.generate(prompt(number, 5, subject.vocabulary), Sampling(90), session=f"s{number}")
        except RuntimeError:
            failed += 1

    async def body() -> None:
        async with subject.open(slots=2) as opened:
            await opened.crash()
            async with trio.open_nursery() as nursery:
                for number in range(5):
                    nursery.start_soon(one, opened, number)

    with trio.fail_after(120), pytest.raises(RuntimeError):  # opening the engine included
        await body()
    assert failed == 5


# ---------------------------------------------------------------- sampling


@check(model=True)
async def logprobs_and_kept_sets_match_a_plain_forward(subject: Subject) -> None:
    requests = [
        Asked(prompt(n, 2 + 7 * n % 60, subject.vocabulary), SETTINGS[n % len(SETTINGS)], f"s{n}") for n in range(24)
    ]
    async with subject.open() as opened:
        for asked, generation in zip(requests, await ask(opened.engine, *requests), strict=True):
            well_formed(asked, generation)
            logits = subject.logits(joined(asked, generation), 0)
            assert worst(logits, asked, generation) < TOLERANCE
            _kept_sets_are_right(logits, asked, generation)
            if asked.sampling.temperature == 0:
                best = logits[len(asked.prompt) - 1 : -1].argmax(-1)
                assert generation.token_ids.tolist() == best.tolist()


def _kept_sets_are_right(logits: Logits, asked: Asked, generation: Generation) -> None:
    """Top-k, then the smallest set of the likeliest whose mass reaches top-p of what is left."""
    sampling = asked.sampling
    if sampling.temperature == 0 or (sampling.top_p == 1 and not sampling.top_k):
        assert generation.kept is None
        return
    assert generation.kept is not None
    p = np.exp(log_softmax(logits[len(asked.prompt) - 1 : -1].astype(np.float64) / sampling.temperature))
    for row, kept in zip(p, generation.kept, strict=True):
        if kept is None:
            continue
        assert kept.tolist() == sorted(set(kept.tolist()))
        outside = np.delete(row, kept)
        assert row[kept].min() >= outside.max() - 1e-6
        allowed = np.sort(row)[::-1][: sampling.top_k or None]
        assert len(kept) <= len(allowed)
        share = np.sort(row[kept])[::-1].cumsum() / allowed.sum()
        assert share[-1] >= sampling.top_p - 1e-4 or len(kept) == len(allowed)
        assert len(kept) == 1 or share[-2] < sampling.top_p + 1e-4


@check(model=True)
async def sampled_frequencies_match_the_distribution(subject: Subject) -> None:
    start = prompt(6, 5, subject.vocabulary)
    sampling = Sampling(1, temperature=0.8)
    async with subject.open(slots=64) as opened:
        generations = await ask(opened.engine, *(Asked(start, sampling, f"s{n}") for n in range(3000)))
    counts = np.bincount([int(g.token_ids[0]) for g in generations], minlength=subject.vocabulary)
    p = np.exp(log_softmax(subject.logits(start, 0)[-1:].astype(np.float64) / 0.8))[0]
    deviation = np.abs(counts / 3000 - p) / np.sqrt(p * (1 - p) / 3000 + 1e-6)
    assert deviation.max() < 5  # standard deviations; the draws are keyed, so this never changes


@check(model=True)
async def draws_are_repeatable_and_distinct_by_seed_session_and_turn(subject: Subject) -> None:
    start = prompt(7, 11, subject.vocabulary)

    async def tokens(engine: InferenceEngine, seed: int, session: str, turn: int) -> tuple[int, ...]:
        (generation,) = await ask(engine, Asked(start, Sampling(16, seed=seed, turn=turn), session))
        return tuple(generation.token_ids.tolist())

    keys = [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]
    async with subject.open() as opened:
        first = [await tokens(opened.engine, *key) for key in keys]
        again = [await tokens(opened.engine, *key) for key in reversed(keys)]
    async with subject.open() as opened:
        anew = [await tokens(opened.engine, *key) for key in keys]
    assert first == again[::-1] == anew
    assert len(set(first)) == len(keys)


@check(model=True)
async def tokens_do_not_depend_on_the_batch(subject: Subject) -> None:
    requests = [
        Asked(prompt(n, 3 + 11 * n % 70, subject.vocabulary), SETTINGS[n % len(SETTINGS)], f"s{n}") for n in range(12)
    ]
    async with subject.open(slots=5, prefill=16) as opened:
        together = await ask(opened.engine, *requests)
    async with subject.open(slots=1) as opened:
        for asked, among in zip(requests, together, strict=True):
            (alone,) = await ask(opened.engine, asked)
            assert alone.token_ids.tolist() == among.token_ids.tolist()


# ---------------------------------------------------------------- prefixes


def whole(subject: Subject, tokens: int) -> int:
    """As much of a prefix as an engine keeps that keeps whole blocks only."""
    block: int = getattr(subject, "block", 1)
    return tokens // block * block


@check(model=True)
async def a_sessions_next_turn_starts_from_what_is_resident(subject: Subject) -> None:
    async with subject.open() as opened:
        asked = Asked(prompt(8, 40, subject.vocabulary), Sampling(10), "a")
        assert opened.engine.resident(asked.prompt) == 0
        others = [Asked(prompt(n, 9, subject.vocabulary), Sampling(4), f"o{n}") for n in range(20, 23)]
        first = (await ask(opened.engine, asked, *others))[0]
        history = np.concatenate([joined(asked, first), prompt(9, 6, subject.vocabulary)])
        resident = opened.engine.resident(history)
        assert whole(subject, 40) <= resident < 50
        assert opened.engine.resident(history[:17]) in (whole(subject, 16), whole(subject, 17))
        assert opened.engine.resident(np.concatenate([prompt(77, 5, subject.vocabulary), history])) <= 1
        following = Asked(history, Sampling(10, turn=1), "a")
        (second,) = await ask(opened.engine, following)
        assert second.cached_tokens == resident
        assert worst(subject.logits(joined(following, second), 0), following, second) < TOLERANCE


@check(model=True)
async def a_group_shares_its_first_prefill(subject: Subject) -> None:
    async with subject.open(prefill=64) as opened:
        start = prompt(10, 60, subject.vocabulary)
        requests = [Asked(start, Sampling(8), f"g{n}") for n in range(8)]
        generations = await ask(opened.engine, *requests)
        assert sum(g.cached_tokens for g in generations) >= 7 * whole(subject, 40)
        assert len({tuple(g.token_ids.tolist()) for g in generations}) > 1
        for asked, generation in zip(requests, generations, strict=True):
            assert worst(subject.logits(joined(asked, generation), 0), asked, generation) < TOLERANCE


@check(model=True)
async def nothing_stale_is_reused_after_an_update(subject: Subject) -> None:
    for kv in KvPolicy:
        async with subject.open() as opened:
            asked = Asked(prompt(11, 50, subject.vocabulary), Sampling(8), "a")
            await ask(opened.engine, asked)
            await opened.update(1, kv)
            assert opened.engine.resident(asked.prompt) == 0
            (generation,) = await ask(opened.engine, asked)
            assert generation.cached_tokens == 0
            assert worst(subject.logits(joined(asked, generation), 1), asked, generation) < TOLERANCE
            assert generation.kv_versions == (VersionSpan(1, 0, 58),)
