"""A program for torchrun: trains the tiny model for some steps and writes loss, metrics and weights from rank 0.

python two_ranks.py OUT CASE        one process
torchrun --nproc-per-node 2 two_ranks.py OUT CASE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import kit  # type: ignore[import-not-found]

from uniagent.engine.config import Learner
from uniagent.engine.learner import snapshots
from uniagent.engine.learner.batch import build
from uniagent.engine.learner.ranks import Ranks, join
from uniagent.engine.learner.recipe import recipe
from uniagent.engine.learner.trainer import Trainer
from uniagent.engine.learner.weights import broadcast, checksum, copy_weights, named_weights

STEPS = 5
CASES: dict[str, dict[str, Any]] = {
    "dapo": {"loss": "dapo"},
    "gspo": {
        "loss": "gspo",
        "minibatches": 2,
        "clip_low": 0.1,
        "clip_high": 0.1,
        "geometric_low": 0.5,
        "geometric_high": 2.0,
    },
    "kl": {"loss": "grpo", "kl_coef": 0.1, "correction": "tis_sequence"},
    "context": {"loss": "dapo"},
    "experts": {"loss": "dapo"},
    "recompute": {"loss": "dapo", "recompute": True},
    "adapters": {"loss": "dapo", "lora_rank": 4, "kl_coef": 0.1},
}


def train(case: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Metrics of each step, a canary and the weights at the end; and a snapshot in ``folder``."""
    config = Learner(**CASES[case], lr=1e-3, warmup_steps=0, micro_tokens=64)
    model = kit.model(experts=4 if case == "experts" else 0)
    start = {name: tensor.clone() for name, tensor in named_weights(model)}
    score = kit.scorer(kit.older(model))
    reference = kit.older(model) if config.kl_coef and not config.lora_rank else None
    trainer = Trainer(model, config, seed=0, steps=STEPS, reference=reference, ranks=ranks)
    metrics = []
    for step in range(STEPS):
        # ragged sessions split into chains; at step 3 one short group, so that a rank has no row of its own
        groups = kit.groups(1 if step == 3 else 3, 2 if step == 3 else 4, seed=step, split=True, score=score)
        metrics.append(trainer.step(build(groups, recipe(config).advantage)))
    snapshots.save(trainer, folder / case, extra={"version": STEPS}).finish()
    ids, where = np.arange(1, 20, dtype=np.int32), np.arange(1, 19)
    canary = torch.from_numpy(trainer.logprobs(ids, where, temperature=0.7))
    weights = {name: tensor.clone() for name, tensor in named_weights(model)}
    return {"metrics": metrics, "canary": canary, "weights": weights, "start": start}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    together = dist.is_initialized()
    done = {}
    for case in CASES:
        ranks = join(context=2 if together and case == "context" else 1)
        done[case] = train(case, ranks, out.with_suffix(".snapshots"))
    if not together or dist.get_rank() == 0:
        torch.save(done, out)
    if together:
        own = kit.model() if dist.get_rank() else kit.older(kit.model())
        copy_weights(broadcast(named_weights(own) if not dist.get_rank() else None, bucket_mib=0), own)
        sums: list[str] = ["", ""]
        dist.all_gather_object(sums, checksum(named_weights(own)))
        assert sums[0] == sums[1] != checksum(named_weights(kit.model())), sums
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
