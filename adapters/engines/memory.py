"""What a run puts on one device, while it samples and while it trains: weights, optimizer, gradients, K/V.

Pure arithmetic over sizes; ``of_run`` reads them from a run's config and the model's. Activations are not in it: they
grow with ``learner.micro_tokens``, and what is left of a device is for them. Bytes throughout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import frozen

from uniagent.engine import model_files
from uniagent.engine.config import RunConfig
from uniagent.engine.errors import UserError

MASTER, MOMENTS, GRADIENT = 4, 8, 4  # bytes a trained parameter: float32 weights, two moments of AdamW, its gradient
ROOM = 0.1  # of a device for activations and what libraries take


@frozen
class Sizes:
    """``parameters`` of the model, ``trained`` of them; ``kv_token``: K/V of a token; ``width``: bytes of a weight in
    the engine; ``ranks`` share the learner, ``parallel`` of them an engine; ``device``: memory of one."""

    parameters: int
    trained: int
    kv_token: int
    width: int
    device: int
    ranks: int = 1
    parallel: int = 1
    shared: bool = False  # learner and engine are one module
    trains: bool = True
    sleeps: bool = False  # the engine gives its memory back while the learner works


@frozen
class Row:
    """Bytes of one part on the device in each phase. ``note``: where it is meanwhile."""

    part: str
    sampling: int
    training: int
    note: str = ""


@frozen
class Plan:
    """``kv_left``: bytes that may be K/V while sampling; ``problem``: what does not fit and what to do, or nothing."""

    rows: tuple[Row, ...]
    device: int
    kv_wanted: int
    kv_left: int
    problem: str = ""

    @property
    def sampling(self) -> int:
        return sum(row.sampling for row in self.rows)

    @property
    def training(self) -> int:
        return sum(row.training for row in self.rows)


def plan(sizes: Sizes, *, tokens: int) -> Plan:
    """``tokens`` of K/V are wanted on the device (slots x context at most)."""
    share, s = -(-sizes.trained // sizes.ranks), sizes
    rows = []
    if s.trains:
        frozen_bytes = -(-(s.parameters - s.trained) // s.ranks) * s.width
        rows += [
            Row("learner weights", share * MASTER + frozen_bytes, share * MASTER + frozen_bytes, "float32"),
            Row("optimizer", share * MOMENTS, share * MOMENTS, "two moments of AdamW"),
            Row("gradients", 0, share * GRADIENT, "freed after a step"),
        ]
    weights = 0 if s.shared and s.trains else -(-s.parameters // s.parallel) * s.width
    kv = tokens * -(-s.kv_token // s.parallel)
    awake = not (s.sleeps and s.trains)
    away = "" if awake else "in host memory while training"
    rows.append(Row("engine weights", weights, weights if awake else 0, away if weights else "the learner's"))
    room = int(s.device * (1 - ROOM))
    left = max(0, room - sum(row.sampling for row in rows))
    rows.append(Row("K/V", kv, kv if awake else 0, "" if awake else "dropped while training, then computed again"))
    found = Plan(tuple(rows), s.device, kv, left)
    return Plan(found.rows, s.device, kv, left, _problem(found, s, room))


def _problem(plan: Plan, sizes: Sizes, room: int) -> str:
    without = plan.sampling - plan.kv_wanted
    if without > room or (plan.training - (0 if sizes.sleeps else plan.kv_wanted)) > room:
        more = "more ranks" if sizes.trains else "engine.options.tensor_parallel"
        return f"the weights alone do not fit into {_mib(room)}: use {more}, or a smaller model"
    if plan.sampling > room:
        tokens = plan.kv_left // max(1, -(-sizes.kv_token // sizes.parallel))
        return f"K/V of at most {tokens} tokens fits: lower engine.slots or engine.context, or let the engine limit it"
    if plan.training > room:
        return "the K/V leaves no room to train: lower engine.slots, or set engine.options.sleep (GPU, vllm)"
    return ""


def table(plan: Plan) -> str:
    """For people."""
    lines = [f"{'on one device':<18}{'sampling':>12}{'training':>12}"]
    lines += [f"{r.part:<18}{_mib(r.sampling):>12}{_mib(r.training):>12}  {r.note}".rstrip() for r in plan.rows]
    lines.append(f"{'together':<18}{_mib(plan.sampling):>12}{_mib(plan.training):>12}  of {_mib(plan.device)}")
    return "\n".join([*lines, plan.problem or "it fits"])


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def of_run(config: RunConfig, *, ranks: int = 1, device: int | None = None) -> Plan:
    """What a run that trains puts on one device; ``device``: its memory where it is not this machine's. Reads the
    model's config, not its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    where = model_files.pick_device(config.model.device)
    folder = model_files.folder(config.model.path)
    shape = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(shape)
    parameters = sum(p.numel() for p in module.parameters())
    dtype = {"auto": "float32" if where == "cpu" else "bfloat16"}.get(config.model.dtype, config.model.dtype)
    width = getattr(torch, dtype).itemsize
    options = config.engine.options
    own_copy = config.engine.name != "transformers" or ranks > 1 or config.rollout.sync_every > 1
    sizes = Sizes(
        parameters=parameters,
        trained=_adapters(module, config.learner.lora_rank) or parameters,
        kv_token=kv_bytes(shape.get_text_config(), width),
        width=width,
        device=device or memory_of(where),
        ranks=ranks,
        parallel=int(options.get("tensor_parallel", 1)),
        shared=not own_copy and config.learner.minibatches == 1,
        sleeps=bool(options.get("sleep", False)),
    )
    return plan(sizes, tokens=config.engine.slots * config.engine.context)


def _adapters(module: Any, rank: int) -> int:
    """Parameters of low-rank adapters on every linear layer; 0: all weights are trained."""
    import torch

    return sum(rank * (m.in_features + m.out_features) for m in module.modules() if isinstance(m, torch.nn.Linear))


def kv_bytes(shape: Any, width: int) -> int:
    """K and V of one token in all layers."""
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return int(2 * shape.num_hidden_layers * heads * size * width)


def memory_of(device: str) -> int:
    """All of it."""
    import torch

    if device == "cuda":
        return int(torch.cuda.mem_get_info()[1])
    info = Path("/proc/meminfo")
    if not info.exists():
        raise UserError("this system does not say how much memory it has: give --memory-mib")
    return int(info.read_text().split("MemTotal:", 1)[1].split()[0]) * 1024
