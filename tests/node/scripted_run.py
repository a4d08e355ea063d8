"""A run whose answers are written: a step engine that says what a hash of session, turn and place says, and a task that
rewards by the length of it. Whatever the order and the process, the same tokens and the same logprobs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import trio

from uniagent.adapters.engines.sampling import draw_key, uniforms
from uniagent.engine import config
from uniagent.engine.ports import Capacity, Finish, Generation, KvPolicy, StepOutput, StepRequest, VersionSpan, Weights
from uniagent.tasks.function import Attempt

LONGEST = 12  # tokens of an answer, its end included


class ScriptedSteps:
    """A ``StepEngine``. It takes a while over each step, so that there is something to interrupt."""

    def __init__(self, step_s: float, context: int) -> None:
        self.version = 0
        self._step_s, self._context = step_s, context
        self._running: dict[int, tuple[StepRequest, list[int]]] = {}  # -> versions of its tokens so far

    def add(self, request: StepRequest) -> None:
        self._running[request.id] = (request, [])

    def abort(self, id: int) -> Generation | None:
        found = self._running.pop(id, None)
        return None if found is None else _made(*found, Finish.ABORTED)

    def busy(self) -> bool:
        return bool(self._running)

    def step(self) -> list[StepOutput]:
        if self._step_s:
            time.sleep(self._step_s)
        out = []
        for id, (request, versions) in tuple(self._running.items()):
            versions.append(self.version)
            n, whole = len(versions), len(_answer(request))
            made = None
            if n >= min(whole, request.sampling.max_tokens):
                made = _made(request, versions, Finish.STOP if n == whole else Finish.LENGTH)
                del self._running[id]
            out.append(StepOutput(id, _answer(request)[n - 1 : n], made))
        return out

    def update(self, weights: Weights, version: int, kv: KvPolicy) -> None:
        for _ in weights or ():
            pass
        self.version = version

    def weights(self) -> Weights:
        return None

    def capacity(self) -> Capacity:
        return Capacity(1 << 20, 1 << 19, len(self._running), 0, self._context)

    def resident(self, prompt: Any) -> int:
        return 0


def build(settings: config.Engine, model: Any, *, shared: bool) -> ScriptedSteps:
    """The registry's factory; ``engine.options.step_s``: seconds of a step."""
    return ScriptedSteps(float(settings.options.get("step_s", 0.0)), settings.context)


build.shares_module = False  # type: ignore[attr-defined]


def _draws(request: StepRequest) -> Any:
    key = draw_key(request.sampling.seed, request.session, request.sampling.turn)
    return uniforms(np.full(LONGEST, key, np.uint64), np.arange(LONGEST, dtype=np.uint64))


def _answer(request: StepRequest) -> Any:
    """Three tokens of plain text at least, then the end of the turn."""
    draws = _draws(request)
    length = 3 + int(draws[0] * (LONGEST - 4))
    text = 40 + (draws[1 : length + 1] * 200).astype(np.int32)
    return np.append(text, request.sampling.stop_ids[:1]).astype(np.int32)


def _made(request: StepRequest, versions: list[int], finish: Finish) -> Generation:
    n = len(versions)
    spans = tuple(VersionSpan(v, i, i + 1) for i, v in enumerate(versions))
    kv = (VersionSpan(versions[0] if versions else 0, 0, len(request.prompt) + n),)
    return Generation(_answer(request)[:n], (-2.0 * _draws(request)[:n]).astype(np.float32), spans, kv, finish, 0)


async def reward(attempt: Attempt, *, wait_s: float = 0.0) -> float:
    """1 for an even number of characters; takes as long as the task says, as a tool would."""
    await trio.sleep(wait_s)
    return float(len(attempt.answer) % 2 == 0)


def files(folder: Path, *, wait_s: float = 0.0, samples: int = 400) -> list[str]:
    """Task Config and samples in the folder, and the settings of a run with them."""
    task = {
        "name": "parity",
        "task": "function",
        "sandbox": {"provider": "none"},
        "agent": {"name": "react", "max_steps": 1, "model": {"max_tokens": 16}},
        "verifier": {"function": "tests.node.scripted_run:reward", "wait_s": wait_s},
    }
    (folder / "tasks.yaml").write_text(json.dumps([task]))
    rows: Iterable[dict[str, Any]] = (
        {"name": "parity", "prompt": [{"role": "user", "content": f"number {i}"}]} for i in range(samples)
    )
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "engine.name=tests.node.scripted_run:build",
        f"tasks.file={folder / 'tasks.yaml'}",
        f"tasks.data={folder / 'samples.jsonl'}",
        "eval.data=''",
        "rollout.groups_per_step=3",
        "rollout.group_size=4",
    ]
