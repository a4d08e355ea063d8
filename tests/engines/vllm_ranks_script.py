"""What tests/engines/test_vllm_ranks.py starts under torchrun: vLLM engines in a world of two ranks on gloo.

    torchrun --nproc-per-node 2 vllm_ranks_script.py {fsdp,alone,tensor_parallel} MODEL_FOLDER SCRATCH_FOLDER

Every rank writes what it found to SCRATCH_FOLDER/rank-R.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from uniagent.adapters.engines import vllm_ranks
from uniagent.adapters.engines.vllm import build
from uniagent.adapters.engines.vllm_setup import Options, import_vllm
from uniagent.engine import config
from uniagent.engine.ports import Generation, Ids, KvPolicy, Sampling, StepRequest

VOCABULARY = 150
SETTINGS = config.Engine("vllm", slots=8, context=256)


def loaded(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def prompt(number: int, length: int) -> Ids:
    return np.random.default_rng(number).integers(0, VOCABULARY, length).astype(np.int32)


@torch.no_grad()
def error(models: list[Any], asked: Ids, generation: Generation) -> float:
    """Largest difference of a logprob to a forward under the weights of its version."""
    ids = np.concatenate([asked, generation.token_ids])
    row = torch.from_numpy(ids).long()[None]
    worst = 0.0
    for span in generation.versions:
        logp = models[span.version](input_ids=row, use_cache=False).logits[0].log_softmax(-1).numpy()
        for t in range(span.start, span.end):
            wanted = logp[len(asked) - 1 + t, generation.token_ids[t]]
            worst = max(worst, abs(float(wanted - generation.logprobs[t])))
    return worst


class Driver:
    """Steps an engine by hand and keeps what ends."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.prompts, self.ended = engine, {}, {}  # type: ignore[var-annotated]

    def ask(self, number: int, length: int, tokens: int) -> None:
        self.prompts[number] = prompt(number, length)
        self.engine.add(StepRequest(number, self.prompts[number], Sampling(tokens, seed=number), f"s{number}"))

    def step(self) -> None:
        for output in self.engine.step():
            if output.generation is not None:
                self.ended[output.id] = output.generation

    def rest(self) -> None:
        while self.engine.busy():
            self.step()


def fsdp(folder: str, scratch: Path) -> dict[str, Any]:
    """Engines of both ranks, built one after the other, step while FSDP2 trains; three updates in the middle."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    vllm_ranks.prepare_world("cpu")
    learner = loaded(folder)
    if rank == 0:
        time.sleep(2)  # no rank waits for another to build
    torch.manual_seed(7)
    before = torch.get_rng_state()
    engine = build(SETTINGS, learner, shared=False)
    driver = Driver(engine)
    models = [loaded(folder)]
    mesh = init_device_mesh("cpu", (2,))
    for layer in learner.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(learner, mesh=mesh)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3)
    for number in range(3 + 2 * rank):  # another number of requests and steps on each rank
        driver.ask(number, 9 + 30 * number, 100)
    for version in (1, 2, 3):
        for _ in range(4 + 5 * rank):
            driver.step()
        steps = training_beside(driver, learner, optimizer, seed=2 * version + rank)
        whole = [(name, p.detach().full_tensor()) for name, p in learner.named_parameters()]
        engine.update(whole, version, KvPolicy.RECOMPUTE)
        models.append(loaded(folder))
        models[-1].load_state_dict(dict(whole), strict=False)
        driver.ask(100 * version, 20, 30 + rank)
    untouched = bool(torch.equal(before, torch.get_rng_state()))
    driver.rest()
    found = {
        "error": max(error(models, driver.prompts[n], g) for n, g in driver.ended.items()),
        "control": max(error(models[:1] * 4, driver.prompts[n], g) for n, g in driver.ended.items()),
        "spanning": sum(len(g.versions) > 1 for g in driver.ended.values()),
        "requests": len(driver.ended),
        "steps_while_training": steps,
        "generator_untouched": untouched,
    }
    dist.barrier()
    engine.close()
    del engine, driver
    total = torch.ones(1)
    dist.all_reduce(total)
    found["collectives_after_close"] = total.item()
    if rank == 1:  # alone, and later than all else
        again = Driver(build(SETTINGS, loaded(folder), shared=False))
        again.ask(1, 12, 5)
        again.rest()
        found["built_alone"] = len(again.ended[1].token_ids)
        dist.barrier()
        again.engine._engine.engine_core.shutdown()  # vLLM's own end of an engine
        found["world_after_vllms_shutdown"] = dist.is_initialized()
        again.engine._engine.model_executor = None
    else:
        dist.barrier()
    return found


def training_beside(driver: Driver, learner: Any, optimizer: Any, *, seed: int) -> int:
    """A step of the learner, while a thread steps the engine; how many steps that made."""
    stop, steps = threading.Event(), 0

    def engine_steps() -> None:
        nonlocal steps
        while not stop.is_set() and steps < 8:
            driver.step()
            steps += 1

    thread = threading.Thread(target=engine_steps)
    thread.start()
    ids = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))
    learner(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    stop.set()
    thread.join()
    return steps


def alone(folder: str, scratch: Path) -> dict[str, Any]:
    """Rank 1 builds without ``prepare_world``: ours refuses, vLLM's own waits for rank 0."""
    rank, joined = dist.get_rank(), scratch / "joined"
    found: dict[str, Any] = {}
    vllm = import_vllm()
    if rank == 1:
        try:
            build(SETTINGS, loaded(folder), shared=False)
        except RuntimeError as problem:
            found["refused"] = str(problem)
        (scratch / "begun").touch()
    else:
        while not (scratch / "begun").exists():
            time.sleep(0.1)
        time.sleep(float(os.environ.get("ALONE_S", "15")))
        joined.touch()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    vllm.LLMEngine.from_engine_args(
        vllm.EngineArgs(model=folder, dtype="float32", max_model_len=64, enforce_eager=True, skip_tokenizer_init=True)
    )
    found["the_other_had_joined"] = joined.exists()
    return found


def tensor_parallel(folder: str, scratch: Path) -> dict[str, Any]:
    """One engine over both ranks: rank 0 leads through two updates, rank 1 replays its log."""
    options = Options(tensor_parallel=2)
    vllm_ranks.prepare_world("cpu", tensor_parallel=2)
    side = vllm_ranks.build_parallel(folder, SETTINGS, options, dtype="float32", device="cpu")
    if isinstance(side, vllm_ranks.Follower):
        side.follow()
        side.close()
        return {"followed": True}
    driver = Driver(side)
    models = [loaded(folder)]
    for number in range(4):
        driver.ask(number, 9 + 30 * number, 60)
    for version in (1, 2):
        for _ in range(7):
            driver.step()
        side.abort(version)
        new = loaded(folder)
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in new.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * 0.1 * parameter.abs().mean())
        side.update(new.named_parameters(), version, KvPolicy.RECOMPUTE)
        models.append(new)
        driver.ask(100 * version, 20, 30)
    driver.rest()
    side.end()
    side.close()
    return {
        "error": max(error(models, driver.prompts[n], g) for n, g in driver.ended.items()),
        "ended": sorted(driver.ended),
        "spanning": sum(len(g.versions) > 1 for g in driver.ended.values()),
    }


def main() -> None:
    mode, folder, scratch = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    modes: dict[str, Callable[[str, Path], dict[str, Any]]] = {
        "fsdp": fsdp,
        "alone": alone,
        "tensor_parallel": tensor_parallel,
    }
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = modes[mode](folder, scratch)
    (scratch / f"rank-{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # vLLM's finalizers would wait for groups that the other rank has left


if __name__ == "__main__":
    main()
