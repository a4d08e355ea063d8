"""The contract suite on the engines that come with the package: embedded (shared module, own copy) and scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
import trio
from attrs import frozen

from tests.engines.contract import Check, Logits, Opened, Subject, applicable
from tests.engines.models import SIZE, forward, module, reference, replayed
from uniagent.adapters.engines.scripted import ScriptedEngine
from uniagent.adapters.engines.transformers import build
from uniagent.engine import config
from uniagent.engine.accelerator import Accelerator
from uniagent.engine.ports import Ids, KvPolicy, Sampling, VersionSpan
from uniagent.engine.rollout.driver import StepDriver


@frozen
class Embedded:
    """The transformers engine over a tiny random model."""

    kind: str
    shared: bool
    model: bool = True
    vocabulary: int = SIZE["vocab_size"]

    @asynccontextmanager
    async def open(self, *, slots: int = 8, context: int = 96, prefill: int = 32) -> AsyncIterator[Opened]:
        settings = config.Engine(slots=slots, context=context, prefill_tokens=prefill)
        learner = module(self.kind)
        async with Accelerator.start() as accelerator:
            inner = await accelerator.run(lambda: build(settings, learner, shared=self.shared), kind="engine")
            engine = StepDriver(accelerator, inner)

            async def update(version: int, kv: KvPolicy) -> None:
                new = reference(self.kind, version)

                def change() -> None:  # the learner's change and the update are one call: no step in between
                    learner.load_state_dict(new.state_dict())
                    inner.update(None, version, kv)

                if self.shared:
                    await accelerator.run(change)
                else:
                    await engine.update(new.named_parameters(), version, kv)

            async def crash() -> None:
                broken = ((name, torch.full_like(p, torch.nan)) for name, p in learner.named_parameters())
                if self.shared:
                    await accelerator.run(lambda: learner.load_state_dict(dict(broken), strict=False))
                else:
                    await engine.update(broken, 1, KvPolicy.RECOMPUTE)

            yield Opened(engine, update, crash)

    def logits(self, ids: Ids, version: int) -> Logits:
        return forward(self.kind, ids, version)

    def replay(self, ids: Ids, spans: tuple[VersionSpan, ...]) -> Logits:
        return replayed(self.kind, ids, spans)


@frozen
class Scripted:
    """The stand-in: its answers are a fixed function of the prompt's length."""

    model: bool = False
    vocabulary: int = 200

    @asynccontextmanager
    async def open(self, *, slots: int = 8, context: int = 96, prefill: int = 32) -> AsyncIterator[Opened]:
        def respond(prompt: Ids, sampling: Sampling, session: str) -> list[int]:
            return [(7 * n + 1) % self.vocabulary for n in range(80)]

        engine = ScriptedEngine(respond, context=context, vocabulary=self.vocabulary)

        async def update(version: int, kv: KvPolicy) -> None:
            await engine.update(None, version, kv)

        yield Opened(engine, update, trio.lowlevel.checkpoint)

    def logits(self, ids: Ids, version: int) -> Logits:
        raise NotImplementedError

    def replay(self, ids: Ids, spans: tuple[VersionSpan, ...]) -> Logits:
        raise NotImplementedError


SUBJECTS: dict[str, Subject] = {
    "shared": Embedded("qwen3", shared=True),  # tied embeddings
    "own-copy": Embedded("qwen3", shared=False),
    "llama": Embedded("llama", shared=False),
    "mixture": Embedded("qwen3_moe", shared=False),
    "scripted": Scripted(),
}


OFTEN = {  # of the other models, what is run every time; the rest in the slower stage
    "logprobs_and_kept_sets_match_a_plain_forward",
    "recompute_continues_under_the_new_weights_alone",
    "keep_continues_over_the_recorded_kv",
    "a_group_shares_its_first_prefill",
}


def cases() -> list[object]:
    return [
        pytest.param(
            name,
            check,
            id=f"{name}-{check.__name__}",
            marks=[pytest.mark.slow] if name in ("llama", "mixture") and check.__name__ not in OFTEN else [],
        )
        for name, subject in SUBJECTS.items()
        for check in applicable(subject)
    ]


@pytest.mark.parametrize(("name", "check"), cases())
async def test_contract(name: str, check: Check) -> None:
    await check(SUBJECTS[name])
