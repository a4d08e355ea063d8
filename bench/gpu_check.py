"""The learner on one GPU: numerics against float64 and throughput, in under five minutes.

    python bench/gpu_check.py [--quick] [--out PATH] [--device cuda]

Needs torch, transformers and this package; without a GPU it says so and ends well. Numerics: one training step's
gradient on packed rows and prefix trees, in fp32 and with bf16 products, against each sequence alone in float64 on the
CPU. ``gradient_error`` is relative, over all parameters together; ``logprob_error`` in nats. Trees are measured by flex
attention, as training uses it on a GPU, and by one call a segment. Throughput: a Qwen3 of 0.6 B parameters with random
weights; ``tokens_per_s`` counts real tokens, ``mfu`` 6 operations a weight and computed
token plus attention over the GPU's bf16 peak. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from uniagent.engine.config import Learner
from uniagent.engine.learner import flex
from uniagent.engine.learner.batch import Batch, BatchLedger, Chain
from uniagent.engine.learner.trainer import Trainer

LAYOUTS = ("packed", "tree", "tree by segments")
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}  # dense bf16, operations per s


def qwen3(**size: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(max_position_embeddings=32768, tie_word_embeddings=True, **size))


def batch(groups: int, size: int, prompt: int, answer: int, vocabulary: int) -> Batch:
    """``groups`` prompts with ``size`` answers of half to one and a half times ``answer`` tokens."""
    rng = np.random.default_rng(0)
    chains, session, advantages, at = [], [], [], 0
    for group in range(groups):
        shared = rng.integers(1, vocabulary, prompt)
        for number in range(size):
            n = int(rng.integers(answer // 2, answer * 3 // 2))
            ids = np.concatenate([shared, rng.integers(1, vocabulary, n)]).astype(np.int32)
            chains.append(Chain(ids, np.arange(prompt, prompt + n), at, group * size + number, group))
            session += [group * size + number] * n
            advantages += [float(rng.standard_normal())] * n
            at += n
    return Batch(
        chains=tuple(chains),
        logprobs=np.full(at, -np.log(vocabulary), np.float32),
        versions=np.zeros(at, np.int32),
        advantages=np.array(advantages, np.float32),
        temperature=np.ones(at, np.float32),
        session=np.array(session),
        turn=np.zeros(at, np.int64),
        kept=None,
        sessions=tuple(map(str, range(groups * size))),
        version=0,
        ledger=BatchLedger(at, at),
    )


def gradient(model: Any, given: Batch, config: Learner) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(gradients, log-probabilities [N]) of one step, on the CPU in fp64."""
    trainer = Trainer(model, config, seed=0, steps=1)
    for piece in trainer.plan(given):
        trainer.micro(piece)
    found = {name: p.grad.double().cpu() for name, p in model.named_parameters()}
    return found, trainer._now().objective.current.double().cpu()


def numerics(device: str, quick: bool) -> dict[str, dict[str, float]]:
    size = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = qwen3(**size, num_key_value_heads=2, head_dim=64, vocab_size=4096)
    given = batch(2, 4, *((40, 30) if quick else (200, 300)), 4096)
    exact = Learner(correction="none", micro_tokens=16, prefix_tree=False, precision="float32")
    expected, lp = gradient(copy.deepcopy(model).double(), given, exact)
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    out = {}
    for precision in ("float32", "bfloat16"):
        for layout in LAYOUTS:
            config = Learner(correction="none", micro_tokens=4096, prefix_tree=layout != "packed", precision=precision)
            with attention(layout):
                found, scores = gradient(copy.deepcopy(model).to(device), given, config)
            error = torch.stack([(found[n] - g).norm() for n, g in expected.items()]).norm() / norm
            out[f"{precision} {layout}"] = {
                "gradient_error": float(error),
                "logprob_error": float((scores - lp).abs().max()),
            }
    return out


def throughput(device: str, quick: bool) -> dict[str, dict[str, float]]:
    if quick:
        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = qwen3(**size, num_key_value_heads=2, head_dim=32, vocab_size=4096)
        given = batch(2, 4, 60, 40, 4096)
    else:
        size = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
        model = qwen3(**size, num_key_value_heads=8, head_dim=128, vocab_size=151936)
        given = batch(8, 8, 1000, 1000, 151936)
    model = model.to(device)
    peak = next((p for name, p in PEAK.items() if device == "cuda" and name in torch.cuda.get_device_name()), None)
    real = sum(len(c.ids) for c in given.chains)
    out = {}
    for layout in LAYOUTS:
        config = Learner(micro_tokens=16384, prefix_tree=layout != "packed", recompute=not quick, lr=1e-6)
        trainer = Trainer(model, config, seed=0, steps=9)
        with attention(layout):
            trainer.step(given)
            _wait(device)
            begun = time.perf_counter()
            trainer.step(given)
            _wait(device)
            taken = time.perf_counter() - begun
        cost = sum(p.row.cost for p in trainer.plan(given) if p.row)
        head = 6.0 * given.tokens * model.get_output_embeddings().weight.numel()
        out[layout] = {"tokens_per_s": real / taken, "seconds": taken}
        if peak:
            out[layout]["mfu"] = (cost + head) / taken / peak
    return out


@contextlib.contextmanager
def attention(layout: str) -> Iterator[None]:
    """With ``tree by segments``, no flex attention."""
    usable = flex.usable
    if layout == "tree by segments":
        flex.usable = lambda *_: False
    try:
        yield
    finally:
        flex.usable = usable


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to see that it runs")
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU")
        result: dict[str, Any] = {"gpu": None}
    else:
        torch.backends.cuda.matmul.allow_tf32 = False
        gpu = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        result = {"gpu": gpu, "numerics": numerics(args.device, args.quick)}
        result["throughput"] = throughput(args.device, args.quick)
        for name, errors in result["numerics"].items():
            print(f"{name:26} gradient {errors['gradient_error']:.1e}  log-probability {errors['logprob_error']:.1e}")
        for name, speed in result["throughput"].items():
            print(f"{name:26} " + "  ".join(f"{k} {v:.4g}" for k, v in speed.items()))
    line = json.dumps(result)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
