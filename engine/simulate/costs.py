"""What things cost on simulated accelerators, and how to read it off a real run.

Seconds are those of one replica (``accelerators`` of them work together on it), save the learner's, which are
accelerator-seconds. A decode step of ``batch`` requests over ``kv`` tokens takes
``decode_base_s + decode_request_s * batch + decode_kv_s * kv``: to read the weights, work a request, to read the KV.
Pure numbers; knows no clock.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from attrs import asdict, evolve, fields, frozen

from uniagent.engine.errors import UserError
from uniagent.engine.storage import parse_line, whole_lines


@frozen
class Costs:
    """The default is roughly a dense 30-billion model in bfloat16 on four 80 GB accelerators."""

    accelerators: int = 4  # of one replica
    prefill_token_s: float = 6e-5
    prefill_chunk: int = 2048  # prompt tokens that join one decode step
    decode_base_s: float = 0.012
    decode_request_s: float = 5e-5
    decode_kv_s: float = 1.6e-8
    kv_tokens: int = 1_000_000  # of one replica
    learner_token_s: float = 6e-4  # accelerator-seconds: forward, backward, recomputation
    learner_step_s: float = 1.0  # wall: optimizer, bookkeeping
    sync_s: float = 1.0  # generation stands still for this long
    switch_s: float = 15.0  # a training mesh takes up inference, or gives it up
    sandbox_start_s: float = 4.0
    sandbox_exec_s: float = 0.05  # of every command, on top of what it does

    def step_s(self, batch: float, kv: float) -> float:
        """One decode step."""
        return self.decode_base_s + self.decode_request_s * batch + self.decode_kv_s * kv

    def token_s(self, context: float) -> float:
        """Accelerator-seconds of one sampled token where the batch fills the KV with requests of this context."""
        batch = max(1.0, self.kv_tokens / max(context, 1.0))
        return self.accelerators * self.step_s(batch, batch * context) / batch

    def generation_s(self, prompt: int, cached: int, tokens: int) -> float:
        """Wall-clock of one generation alone on a replica."""
        return (prompt - cached) * self.prefill_token_s + tokens * self.step_s(1, prompt + tokens / 2)


def read(path: Path) -> Costs:
    """Costs in a JSON file, as ``uniagent simulate --calibrate RUN`` prints them; what is missing is the default."""
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise UserError(f"simulate.costs = {str(path)!r}: cannot be read as JSON: {problem}") from problem
    known = {f.name for f in fields(Costs)}
    if not isinstance(given, dict) or (unknown := sorted(set(given) - known)):
        raise UserError(
            f"simulate.costs = {str(path)!r}: {unknown or 'not a table'}; allowed: {', '.join(sorted(known))}"
        )
    return Costs(**given)


def calibrate(run: Path, start: Costs | None = None) -> tuple[Costs, dict[str, float]]:
    """Costs of the machine a run was made on, and what the fit was made from (counts and relative errors).

    From ``metrics.jsonl``: the learner's seconds (``training_s``, the sync included) as a line over a batch's tokens.
    From ``episodes.jsonl``: decode seconds a token (engine seconds over sampled tokens, at the run's own concurrency),
    what a sandbox takes to start and to verify, what an answer takes outside the engine. What a run cannot tell
    (prefill apart from decode, how a step depends on the batch) keeps the proportions of ``start``.
    """
    costs = start or Costs(accelerators=1)
    steps = _lines(run / "metrics.jsonl", "step")
    episodes = [
        line
        for line in _lines(run / "episodes.jsonl", "kind")
        if line["kind"] == "episode" and line["use"].get("evaluation") is None and line["result"]["failure"] is None
    ]
    if not steps or not episodes:
        raise UserError(f"{run}: it has {len(steps)} steps and {len(episodes)} trained episodes; calibrate needs both")
    learned: Counter[int] = Counter()
    for e in episodes:
        learned[e["use"]["step"]] += sum(len(t["token_ids"]) for t in e["trajectories"])
    base, slope, learner_error = _line(
        [float(learned[s["step"]]) for s in steps], [float(s["training_s"]) for s in steps]
    )
    times = [e["timings"] for e in episodes]
    start_s = float(np.mean([t.get("sandbox", 0.0) + t.get("verify", 0.0) for t in times]))
    answers = sum(len(e["fates"]) for e in episodes)
    exec_s = sum(max(0.0, t.get("agent", t["engine"]) - t["engine"]) for t in times) / max(1, answers)
    sampled = sum(e["ledger"]["sampled"] for e in episodes)
    token_s = sum(e["timings"]["engine"] for e in episodes) / max(1, sampled)
    context = float(np.mean([sum(len(t["token_ids"]) for t in e["trajectories"]) for e in episodes]))
    scale = token_s / costs.step_s(1, context)
    fitted = evolve(
        costs,
        learner_step_s=base,
        learner_token_s=slope * costs.accelerators,
        sandbox_start_s=start_s,
        sandbox_exec_s=exec_s,
        decode_base_s=costs.decode_base_s * scale,
        decode_request_s=costs.decode_request_s * scale,
        decode_kv_s=costs.decode_kv_s * scale,
        prefill_token_s=costs.prefill_token_s * scale,
        sync_s=0.0,  # inside training_s
    )
    seen = {
        "steps": len(steps),
        "episodes": len(episodes),
        "learner_error": learner_error,  # mean, relative
    }
    return fitted, seen


def concurrency(run: Path) -> tuple[float, float]:
    """(mean requests of a decode step, seconds of one) of a run without evaluations, prefill included.

    A token waits one step, so that the sessions' engine seconds a token are a step's; the device's engine seconds a
    token are a step's over its batch. ``batch / step_s`` tokens a second is exact; that queues count as batch is not.
    """
    summary = json.loads((run / "summary.json").read_text())
    lines = _lines(run / "episodes.jsonl", "kind")
    episodes = [e for e in lines if e["kind"] == "episode" and e["use"].get("evaluation") is None]
    sampled = sum(e["ledger"]["sampled"] for e in episodes)
    if not sampled or not summary["engine_s"]:
        raise UserError(f"{run}: its engine sampled nothing in this process: there is no step to measure")
    step_s = sum(e["timings"]["engine"] for e in episodes) / sampled
    batch = step_s / (summary["engine_s"] / sampled)
    return max(1.0, batch), step_s


def as_json(costs: Costs) -> dict[str, Any]:
    return asdict(costs)


def _lines(path: Path, key: str) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"{path} does not exist: give the folder of a run that uniagent train made")
    found = [parse_line(path, number, raw) for number, raw in enumerate(whole_lines(path), 1)]
    return [line for line in found if key in line]


def _line(xs: list[float], ys: list[float]) -> tuple[float, float, float]:
    """Least squares with neither part negative: (constant, slope, mean absolute error over the mean)."""
    x, y = np.array(xs), np.array(ys)
    slope = float(np.cov(x, y, bias=True)[0, 1] / np.var(x)) if np.var(x) > 0 else 0.0
    slope = min(max(slope, 0.0), float(y.mean() / x.mean()) if x.mean() > 0 else 0.0)
    constant = max(0.0, float(y.mean() - slope * x.mean()))
    error = float(np.abs(constant + slope * x - y).mean() / y.mean()) if y.mean() > 0 else 0.0
    return constant, slope, error
