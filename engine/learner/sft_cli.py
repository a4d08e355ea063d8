"""``uniagent sft``: supervised training on the tokens that recorded sessions sampled, as in rejection sampling.

Reads records (``episodes.jsonl``) and trains on exactly what reinforcement learning would: the same token ids, the same
masks, chosen by reward. Writes a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from uniagent.engine import fingerprint, journal, model_files
from uniagent.engine.commands import Parser
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Ids


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    files = [p / "episodes.jsonl" if p.is_dir() else p for p in args.records]
    folder = model_files.folder(args.model)
    _refuse_other_tokenizers(files, folder)
    found = list(examples(files, args.min_reward, args.evaluations))
    tokens = sum(len(ids) for ids, _ in found)
    if not found:
        raise UserError(f"no recorded session has a reward of at least {args.min_reward} and a token to learn")
    steps = args.steps or max(1, math.ceil(args.epochs * tokens / args.tokens_per_step))
    _say(f"{len(found)} trajectories, {tokens} tokens, {steps} steps")

    import torch

    from uniagent.engine.learner.checkpoints import save_hf
    from uniagent.engine.learner.sft import SftStep, sft

    torch.set_num_threads(args.threads)
    model = model_files.load(folder, dtype="float32", device=model_files.pick_device(args.device))
    if (top := max(int(ids.max()) for ids, _ in found)) >= model.get_input_embeddings().weight.shape[0]:  # type: ignore[operator]
        raise UserError(f"the records hold token {top}, which {folder} does not have: give the model that sampled them")

    def report(step: SftStep) -> None:
        if step.step % max(1, steps // 20) == 0 or step.step == steps - 1:
            _say(f"step {step.step + 1}/{steps}  loss {step.loss:.4f}  grad norm {step.grad_norm:.3f}")

    done = sft(
        model,
        found,
        steps=steps,
        tokens_per_step=args.tokens_per_step,
        lr=args.lr,
        seed=args.seed,
        warmup=min(args.warmup, steps),
        on_step=report,
    )
    save_hf(model, folder, args.out)
    _say(f"wrote {args.out}")
    if args.json:
        result = {"steps": steps, "tokens": sum(s.tokens for s in done), "trajectories": len(found)}
        print(json.dumps({**result, "loss_first": done[0].loss, "loss_last": done[-1].loss, "out": str(args.out)}))
    return 0


def examples(files: Iterable[Path], least: float, evaluations: bool) -> Iterator[tuple[Ids, npt.NDArray[np.bool_]]]:
    """(ids [T], mask [T]) of every trajectory with a token to learn, of sessions with a reward of at least ``least``
    that did not fail outside the model; evaluations only if asked for."""
    for file in files:
        for record in journal.read(file):
            episode = record.episode
            if not episode.counts or episode.result.reward < least or (record.use.evaluation and not evaluations):
                continue
            yield from ((t.token_ids, t.loss_mask) for t in episode.export.trajectories if t.loss_mask.any())


def _refuse_other_tokenizers(files: Iterable[Path], folder: Path) -> None:
    own = fingerprint.of_files(folder, fingerprint.TOKENIZER)
    for file in files:
        first = next(journal.lines(file), None)
        if first is None:
            raise UserError(f"{file} is empty: give a run folder or an episodes.jsonl")
        recorded = first.get("hashes", {}).get("tokenizer")
        if recorded is not None and recorded != own:
            raise UserError(f"{file} was recorded with another tokenizer than that of {folder}: give that model")


def _parser() -> argparse.ArgumentParser:
    parser = Parser("sft", "Supervised training on recorded sessions; writes a Hugging Face folder.")
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="run folders, or episodes.jsonl files")
    parser.add_argument("--model", required=True, help="a Hugging Face folder, or builtin:NAME")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where the trained model goes")
    parser.add_argument("--min-reward", type=float, default=1.0, help="sessions to learn from (default: 1)")
    parser.add_argument("--evaluations", action="store_true", help="learn from evaluation episodes too")
    parser.add_argument("--epochs", type=float, default=1.0, help="passes over the tokens (default: 1)")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps, in place of --epochs")
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1e-5, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps of linear warm-up")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the trajectories")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line")
    return parser


def _say(line: str) -> None:
    print(line, file=sys.stderr)
