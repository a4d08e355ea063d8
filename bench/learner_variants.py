"""The workloads of bench/learner.py, each variant in a process of its own so that peak memory is its own.

    python bench/learner_variants.py VARIANT STEPS THREADS [--quick]     (bench/learner.py calls it)

Grouped: 64 completions in 8 groups that share a 300-token prompt, lognormal lengths, 46,479 tokens. Branched: 8
sessions with a 1,500-token trunk and 3 branches each. The model is a 1 M parameter Qwen3 with 2,048 token ids. One step
is log-probabilities, entropy, clipped loss as a token mean, backward, clipping and AdamW. Variants: ``padded`` to the
longest of the batch and ``sorted`` (padded to the longest of a micro-batch, by length) are plain loops over the
model; ``packed`` and ``tree`` are the learner; ``flat`` and ``nested`` the same two on the branched batch; ``trl`` is
TRL's own GRPOTrainer with its generation replaced by the batch.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROMPT, VOCABULARY, MICRO, LR = 300, 2048, 8, 1e-6


def grouped(quick: bool) -> list[dict[str, Any]]:
    """Sequences: prompt p, completion c, advantage a."""
    groups, size = (1, 8) if quick else (8, 8)
    rng = np.random.default_rng(0)
    lengths = np.clip(np.round(rng.lognormal(np.log(300), 0.9, groups * size)), 50, 1200).astype(int)
    prompts = [rng.integers(2, VOCABULARY, PROMPT) for _ in range(groups)]
    completions = [np.append(rng.integers(2, VOCABULARY, n - 1), 1) for n in lengths]
    advantages = rng.standard_normal(groups * size).astype("float32")
    return [
        {"p": prompts[i // size], "c": completions[i], "a": float(advantages[i]), "group": i // size}
        for i in rng.permutation(groups * size)
    ]


def model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    return Qwen3ForCausalLM(Qwen3Config(**settings))


Step = Callable[[], tuple[float, float]]  # one optimizer step -> (loss, gradient norm)


def padded(rows: list[dict[str, Any]], by_length: bool) -> Step:
    rows = sorted(rows, key=lambda r: -len(r["c"])) if by_length else rows
    longest = max(len(r["c"]) for r in rows)
    total = sum(len(r["c"]) for r in rows)
    micro = []
    for start in range(0, len(rows), MICRO):
        now = rows[start : start + MICRO]
        width = PROMPT + (max(len(r["c"]) for r in now) if by_length else longest)
        ids, mask = torch.zeros(len(now), width, dtype=torch.long), torch.zeros(len(now), width, dtype=torch.long)
        for i, r in enumerate(now):
            n = PROMPT + len(r["c"])
            ids[i, :n], mask[i, :n] = torch.from_numpy(np.concatenate([r["p"], r["c"]])), 1
        micro.append((ids, mask, torch.tensor([r["a"] for r in now])[:, None]))
    policy = model()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step() -> tuple[float, float]:
        loss = 0.0
        for ids, mask, advantage in micro:
            keep = ids.shape[1] - PROMPT
            logits = policy(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=keep + 1).logits[:, :-1]
            scores = logits.log_softmax(-1)
            lp, trained = scores.gather(-1, ids[:, PROMPT:, None])[..., 0], mask[:, PROMPT:].bool()
            with torch.no_grad():
                torch.where(trained, -(scores.exp() * scores).sum(-1), 0.0).sum()
            ratio = (lp - lp.detach()).exp()
            value = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            part = torch.where(trained, value, 0.0).sum() / total
            torch.autograd.backward(part)
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, float(norm)

    return step


def learner(batch: Any, tree: bool) -> Step:
    from uniagent.engine.config import Learner
    from uniagent.engine.learner.trainer import Trainer

    config = Learner(
        correction="none", clip_low=0.2, clip_high=0.2, lr=LR, warmup_steps=0, micro_tokens=4096, prefix_tree=tree
    )
    trainer = Trainer(model(), config, seed=0, steps=1000)

    def step() -> tuple[float, float]:
        metrics = trainer.step(batch)
        return metrics["loss"], metrics["grad_norm"]

    return step


def batch_of(chains: list[tuple[Any, Any, float, int]], sessions: int) -> Any:
    """chains: ids [T], trained positions [n], advantage, session (its own group)."""
    from uniagent.engine.learner.batch import Batch, BatchLedger, Chain

    made, at = [], 0
    for ids, trained, _, session in chains:
        made.append(Chain(ids.astype(np.int32), trained, at, session, session))
        at += len(trained)
    counts = [len(c[1]) for c in chains]
    return Batch(
        chains=tuple(made),
        logprobs=np.full(at, -7.6, np.float32),
        versions=np.zeros(at, np.int32),
        advantages=np.repeat([c[2] for c in chains], counts).astype(np.float32),
        temperature=np.ones(at, np.float32),
        session=np.repeat([c[3] for c in chains], counts),
        turn=np.zeros(at, np.int64),
        kept=None,
        sessions=tuple(map(str, range(sessions))),
        version=0,
        ledger=BatchLedger(at, at),
    )


def grouped_batch(rows: list[dict[str, Any]]) -> Any:
    chains = []
    for r in rows:
        ids = np.concatenate([r["p"], r["c"]])
        chains.append((ids, np.arange(PROMPT, len(ids)), r["a"], r["group"]))
    return batch_of(chains, len(rows))


def branched_batch(quick: bool) -> Any:
    """Trunk: a prompt and 1,200 trained tokens; branches of 300-800 trained tokens. The trunk is trained once."""
    rng = np.random.default_rng(1)
    sessions, trunk = (2, 600) if quick else (8, 1500)
    chains = []
    for session in range(sessions):
        shared, advantage = rng.integers(2, VOCABULARY, trunk), float(rng.standard_normal())
        for branch in range(3):
            ids = np.concatenate([shared, rng.integers(2, VOCABULARY, rng.integers(300, 801))])
            first = PROMPT if branch == 0 else trunk
            chains.append((ids, np.arange(first, len(ids)), advantage, session))
    return batch_of(chains, sessions)


def trl(rows: list[dict[str, Any]], steps: int) -> list[tuple[float, float, float, float]]:
    """(wall s, CPU s, loss, gradient norm) of each step of TRL's own loop."""
    from datasets import Dataset  # type: ignore[import-not-found]
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "p": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    settings = GRPOConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=len(rows) // MICRO,
        num_generations=8,
        max_completion_length=1200,
        learning_rate=LR,
        max_steps=steps,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        bf16=False,
        gradient_checkpointing=False,
    )
    done: list[list[float]] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = (time.perf_counter(), time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            done.append([time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]])

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            if "grad_norm" in (logs or {}):
                done[-1] += [float(logs["loss"]), float(logs["grad_norm"])]

    trainer = GRPOTrainer(
        model(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["p"] * len(rows)}),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    width = max(len(r["c"]) for r in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, r in enumerate(rows):
        ids[i, : len(r["c"])], mask[i, : len(r["c"])] = torch.from_numpy(r["c"]), 1
    fixed = {
        "prompt_ids": torch.from_numpy(np.stack([r["p"] for r in rows])),
        "prompt_mask": torch.ones(len(rows), PROMPT, dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor([r["a"] for r in rows]),
        "num_items_in_batch": mask.sum().float(),
    }
    trainer._generate_and_score_completions = lambda _: {k: v.clone() for k, v in fixed.items()}
    trainer.train()
    return [(s[0], s[1], s[2], s[3]) for s in done]


def loss_share(step: Step) -> float:
    """Share of one step's time that is loss and advantage code (not model, head or optimizer)."""
    from uniagent.engine.learner.objective import Objective

    spent = 0.0
    inner = Objective._losses

    def timed(self: Any, *args: Any) -> Any:
        nonlocal spent
        begun = time.perf_counter()
        found = inner(self, *args)
        spent += time.perf_counter() - begun
        return found

    Objective._losses = timed  # type: ignore[method-assign, assignment]
    begun = time.perf_counter()
    step()
    whole = time.perf_counter() - begun
    Objective._losses = inner  # type: ignore[method-assign]
    return spent / whole


def memory_mib() -> tuple[float, float]:
    """(now, peak) resident memory."""
    now = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(now.split()[1]) / 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(variant: str, steps: int, threads: int, quick: bool) -> None:
    torch.set_num_threads(threads)
    rows = grouped(quick)
    share = 0.0
    if variant == "trl":
        base = memory_mib()[0]
        taken = trl(rows, steps + 1)
    else:
        if variant in ("padded", "sorted"):
            step = padded(rows, variant == "sorted")
        else:
            batch = branched_batch(quick) if variant in ("flat", "nested") else grouped_batch(rows)
            step = learner(batch, variant in ("tree", "nested"))
        base, taken = memory_mib()[0], []
        for _ in range(steps + 1):
            begun, cpu = time.perf_counter(), time.process_time()
            loss, norm = step()
            taken.append((time.perf_counter() - begun, time.process_time() - cpu, loss, norm))
    peak = memory_mib()[1] - base
    if variant in ("packed", "tree"):
        share = loss_share(step)
    real = (
        sum(len(c.ids) for c in batch.chains)
        if variant in ("flat", "nested")
        else sum(PROMPT + len(r["c"]) for r in rows)
    )
    print("RESULT " + json.dumps({"steps": taken, "tokens": real, "peak_mib": peak, "loss_share": share}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "--quick" in sys.argv)
