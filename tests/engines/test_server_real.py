"""The server engine against vLLM's own OpenAI server, for real, on a CPU."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from attrs import frozen

from tests.engines import contract
from tests.engines.contract import Asked, Check, Logits, Opened, applicable, ask, joined, prompt, well_formed, worst
from tests.engines.models import SIZE, module, reference
from uniagent.adapters.engines import server_engine
from uniagent.adapters.engines.server import build
from uniagent.engine import config
from uniagent.engine.ports import Ids, InferenceEngine, KvPolicy, Sampling, VersionSpan
from uniagent.engine.rollout.router import ReplicaLost, Router

pytestmark = pytest.mark.vllm

CONTEXT, SLOTS, BLOCK = 512, 16, 32
START_S = 240.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
HELD = {  # they need weights changed, a broken engine, kept sets, or another engine than the one server of this file
    "versions_follow_updates",
    "cancelling_around_an_update_leaves_nothing_behind",
    "a_pause_in_the_middle_changes_nothing",
    "what_waited_over_an_update_says_whose_kv_it_took",
    "a_crash_reaches_every_waiter_at_once",
    "logprobs_and_kept_sets_match_a_plain_forward",  # here without kept sets, below
    "a_sessions_next_turn_starts_from_what_is_resident",  # what is resident is a belief
    "nothing_stale_is_reused_after_an_update",
    "recompute_continues_under_the_new_weights_alone",
    "keep_continues_over_the_recorded_kv",
    "many_updates_lose_no_request",
}


@contextmanager
def vllm_server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """vLLM's server over a model folder: its URL and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {
        "--model": folder,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": CONTEXT,
        "--max-num-seqs": SLOTS,
        "--max-num-batched-tokens": CONTEXT,
        "--block-size": BLOCK,
        "--logprobs-mode": "processed_logprobs",
    }
    flags = ["--enforce-eager", "--no-enable-chunked-prefill", "--enable-prompt-tokens-details"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--skip-tokenizer-init", *flags]
    command += [str(part) for pair in arguments.items() for part in pair]
    log = folder.parent / f"server-{port}.log"
    with log.open("wb") as out:
        environment = {**os.environ, **ENVIRONMENT}
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            try:
                direct.open(f"{url}/health", timeout=2).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield url, process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):  # a killed server leaves its engine and workers behind
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "qwen3"
    module("qwen3").save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with vllm_server(folder) as (found, _):
        yield found


@asynccontextmanager
async def opened(folder: Path, *urls: str, slots: int = 8, context: int = CONTEXT) -> AsyncIterator[InferenceEngine]:
    settings = config.Engine("server", slots=slots, context=context, options={"urls": list(urls)})
    async with build(settings, folder) as engine:
        yield engine


@functools.cache
def _logits(ids: bytes) -> Logits:
    row = torch.from_numpy(np.frombuffer(ids, np.int32).copy()).long()[None]
    with torch.no_grad():
        return np.asarray(reference("qwen3")(input_ids=row, use_cache=False).logits[0].numpy())


@frozen
class Remote:
    """The one server of this file, at version 0 for good."""

    folder: Path = Path()
    url: str = ""
    model: bool = True
    block: int = BLOCK
    vocabulary: int = SIZE["vocab_size"]

    @asynccontextmanager
    async def open(self, *, slots: int = 8, context: int = 96, prefill: int = 32) -> AsyncIterator[Opened]:
        async def update(version: int, kv: KvPolicy) -> None:
            raise NotImplementedError

        async with opened(self.folder, self.url, slots=slots, context=context) as engine:
            yield Opened(engine, update, trio.lowlevel.checkpoint)

    def logits(self, ids: Ids, version: int) -> Logits:
        return _logits(ids.astype(np.int32).tobytes())

    def replay(self, ids: Ids, spans: tuple[VersionSpan, ...]) -> Logits:
        raise NotImplementedError


CHECKS = [c for c in applicable(Remote()) if c.__name__ not in HELD]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
async def test_contract(check: Check, folder: Path, url: str) -> None:
    await check(Remote(folder, url))


async def test_logprobs_match_a_plain_forward(folder: Path, url: str) -> None:
    remote = Remote(folder, url)
    requests = [
        Asked(prompt(n, 2 + 7 * n % 60, remote.vocabulary), contract.SETTINGS[n % len(contract.SETTINGS)], f"s{n}")
        for n in range(24)
    ]
    plain = [r for r in requests if r.sampling.top_p == 1 and not r.sampling.top_k]
    async with opened(folder, url) as engine:
        for asked, generation in zip(requests, await ask(engine, *requests), strict=True):
            well_formed(asked, generation)
            if asked in plain:
                assert worst(remote.logits(joined(asked, generation), 0), asked, generation) < contract.TOLERANCE


async def test_a_next_turn_is_cached_and_the_belief_is_right(folder: Path, url: str) -> None:
    async with opened(folder, url) as engine:
        first = Asked(prompt(801, 200, SIZE["vocab_size"]), Sampling(40), "turns")
        (answer,) = await ask(engine, first)
        assert answer.cached_tokens == 0
        history = np.concatenate([joined(first, answer), prompt(802, 10, SIZE["vocab_size"])])
        believed = engine.resident(history)
        (second,) = await ask(engine, Asked(history, Sampling(4, turn=1), "turns"))
        assert second.cached_tokens == believed == 239 // BLOCK * BLOCK


async def test_leaving_frees_the_server(folder: Path, url: str) -> None:
    """Cancelled generations would otherwise keep all of the server's slots for hundreds of steps."""

    def running() -> int:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{url}/metrics", timeout=10) as said:
            lines = said.read().decode().splitlines()
        return int(sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:num_requests_running{")))

    async with opened(folder, url, slots=SLOTS) as engine:

        async def left(number: int) -> None:
            with trio.CancelScope() as scope:
                await engine.generate(
                    prompt(number, 9, SIZE["vocab_size"]),
                    Sampling(480),
                    session=f"l{number}",
                    on_tokens=lambda ids: scope.cancel(),
                )

        async with trio.open_nursery() as nursery:
            for number in range(SLOTS):
                nursery.start_soon(left, number)
        with trio.fail_after(30):
            while await trio.to_thread.run_sync(running):
                await trio.sleep(0.05)


async def test_a_replica_that_dies_is_left_out(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_engine, "PAUSES_S", (0.05, 0.05))
    with vllm_server(folder) as (doomed, process):
        async with opened(folder, doomed, url) as engine:
            done: list[Any] = []

            async def one(number: int) -> None:
                asked = Asked(prompt(number, 20, SIZE["vocab_size"]), Sampling(400), f"d{number}")
                done.extend(await ask(engine, asked))

            async with trio.open_nursery() as nursery:
                for number in range(12):
                    nursery.start_soon(one, number)
                await trio.sleep(0.2)
                process.kill()
            assert [len(g.token_ids) for g in done] == [400] * 12
            assert isinstance(engine, Router)
            assert len(engine.offers(prompt(0, 9, SIZE["vocab_size"]), "new")) == 1  # it was lost in the middle
        async with opened(folder, url) as alone:
            whole = await alone.generate(prompt(1, 9, SIZE["vocab_size"]), Sampling(5), session="after")
            assert len(whole.token_ids) == 5


async def test_a_lone_server_that_dies_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_engine, "PAUSES_S", (0.05, 0.05))
    with vllm_server(folder) as (doomed, process):
        async with opened(folder, doomed) as engine:
            process.kill()
            process.wait()
            with pytest.raises(ReplicaLost):
                await engine.generate(prompt(1, 9, SIZE["vocab_size"]), Sampling(5), session="s")
