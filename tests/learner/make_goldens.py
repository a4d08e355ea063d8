"""Makes goldens.json: what verl 0.9.1 and trl 1.16.0 compute for losses, corrections and advantages, in float64.

Two independent programs give the values that ``test_goldens.py`` holds ours against; CI needs neither of them. To make
them again: ``pip install '.[oracles]' && pip install --no-deps verl==0.9.1 && python tests/learner/make_goldens.py``
(verl pins an older transformers, which what is used here does not need).
"""

from __future__ import annotations

import argparse
import json
import types
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

B, T = 5, 11
LOW, HIGH = 0.2, 0.28
GROUPS = ["a", "a", "a", "b", "b"]
REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0]


def inputs() -> dict[str, torch.Tensor]:
    """[B, T] log-probabilities now, of the proximal, behaviour and reference policies; mask; advantages [B]."""
    g = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(B, T, generator=g, dtype=torch.float64)

    logprobs = -3 * torch.rand(B, T, generator=g, dtype=torch.float64)
    old = logprobs + 0.3 * noise()
    mask = (torch.rand(B, T, generator=g) > 0.3).double()
    mask[:, 0] = 1
    behaviour, reference = old + 0.4 * noise(), logprobs + 0.5 * noise()
    advantages = torch.tensor([1.1, -0.7, 0.4, -0.9, 0.8], dtype=torch.float64)
    return {
        "logprobs": logprobs,
        "old": old,
        "behaviour": behaviour,
        "reference": reference,
        "mask": mask,
        "advantages": advantages,
    }


def with_gradient(loss: Any, logprobs: torch.Tensor) -> dict[str, Any]:
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {"value": loss.item(), "gradient": gradient.tolist()}


def verl(x: dict[str, torch.Tensor]) -> dict[str, Any]:
    from verl.trainer.ppo import core_algos as core
    from verl.trainer.ppo import rollout_corr_helper as corrections
    from verl.workers.config import ActorConfig

    def config(**more: float) -> Any:
        clip = {"clip_ratio": LOW, "clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": 1e9, **more}
        return ActorConfig(
            strategy="fsdp",
            rollout_n=2,
            ppo_mini_batch_size=2,
            ppo_micro_batch_size_per_gpu=1,
            use_dynamic_bsz=True,
            **clip,
        )

    logprobs = x["logprobs"].clone().requires_grad_()
    shared = {
        "old_log_prob": x["old"],
        "log_prob": logprobs,
        "advantages": x["advantages"][:, None].expand(B, T),
        "response_mask": x["mask"],
    }

    def loss(how: Any, aggregation: str, settings: Any, **more: Any) -> dict[str, Any]:
        value, _ = how(**shared, loss_agg_mode=aggregation, config=settings, **more)
        return with_gradient(value, logprobs)

    d = x["old"] - x["behaviour"]

    def weights(level: str, threshold: Any) -> torch.Tensor:
        found: torch.Tensor = corrections.compute_rollout_correction_weights(d, x["mask"], level, threshold)[0]
        return found

    kept, _ = corrections.compute_rollout_rejection_mask(d, x["mask"], "seq_mean_k1", "0.9_1.1")
    returns = torch.zeros(B, T, dtype=torch.float64)
    returns[:, -1] = torch.tensor(REWARDS, dtype=torch.float64)
    ones, index = torch.ones(B, T, dtype=torch.float64), np.array(GROUPS)
    grpo, _ = core.compute_grpo_outcome_advantage(returns, ones, index)
    mean, _ = core.compute_grpo_outcome_advantage(returns, ones, index, norm_adv_by_std_in_grpo=False)
    rloo, _ = core.compute_rloo_outcome_advantage(returns, ones, index)
    vanilla, plain = core.compute_policy_loss_vanilla, config()
    return {
        "clipped/token_mean": loss(vanilla, "token-mean", plain),
        "clipped/seq_mean_token_mean": loss(vanilla, "seq-mean-token-mean", plain),
        "clipped/seq_mean_token_sum_norm": loss(vanilla, "seq-mean-token-sum-norm", plain),
        "clipped/dual": loss(vanilla, "token-mean", config(clip_ratio_c=1.05)),
        "clipped/tis": loss(vanilla, "token-mean", plain, rollout_is_weights=weights("token", 1.5)),
        "gspo/seq_mean_token_mean": loss(core.compute_policy_loss_gspo, "seq-mean-token-mean", plain),
        "cispo/token_mean": loss(core.compute_policy_loss_cispo, "token-mean", config(clip_ratio_low=10.0)),
        "weights/tis": weights("token", 1.5).tolist(),
        "weights/tis_sequence": weights("sequence", 1.5).tolist(),
        "weights/icepop": weights("token", "0.8_1.25").tolist(),
        "weights/geometric": kept.tolist(),
        "kl": {k: core.kl_penalty_forward(x["logprobs"], x["reference"], k).tolist() for k in ("k1", "k2", "k3")},
        "advantages": {"mean_std": grpo[:, 0].tolist(), "mean": mean[:, 0].tolist(), "rloo": rloo[:, 0].tolist()},
    }


def trl(x: dict[str, torch.Tensor]) -> dict[str, Any]:
    from trl.trainer.grpo_trainer import GRPOTrainer

    class OneProcess:
        num_processes = 1
        sync_gradients = True

        def gather(self, value: Any) -> Any:
            return value

        gather_for_metrics = gather

        def reduce(self, value: Any, reduction: str = "mean") -> Any:
            return value

    logprobs = x["logprobs"].clone().requires_grad_()

    def loss(kind: str, level: str = "token", high: float = HIGH, beta: float = 0.0) -> dict[str, Any]:
        trainer = types.SimpleNamespace(
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level=level,
            beta=beta,
            loss_type=kind,
            epsilon_low=LOW,
            epsilon_high=high,
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            model=types.SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1,
            steps_per_generation=1,
            num_iterations=1,
            max_completion_length=T,
            accelerator=OneProcess(),
            _entropy_bonus_enabled=False,
            aux_loss_enabled=False,
            _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
            args=types.SimpleNamespace(
                delta=None, use_bias_correction_kl=False, steps_per_generation=1, gradient_accumulation_steps=1
            ),
            _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None),
        )
        given = {
            "prompt_ids": torch.zeros(B, 2, dtype=torch.long),
            "prompt_mask": torch.ones(B, 2),
            "completion_ids": torch.zeros(B, T, dtype=torch.long),
            "completion_mask": x["mask"],
            "advantages": x["advantages"],
            "old_per_token_logps": x["old"],
            "ref_per_token_logps": x["reference"],
            "num_items_in_batch": x["mask"].sum(),
        }
        return with_gradient(GRPOTrainer._compute_loss(trainer, None, given), logprobs)

    return {
        "clipped/token_mean": loss("dapo"),
        "clipped/seq_mean_token_mean": loss("grpo"),
        "clipped/seq_mean_token_sum_norm": loss("dr_grpo"),
        "clipped/kl": loss("dapo", beta=0.1),
        "gspo/seq_mean_token_mean": loss("grpo", level="sequence"),
        "cispo/token_mean": loss("cispo", high=1 + HIGH),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path(__file__).with_name("goldens.json"))
    x = inputs()
    made = {
        "versions": {name: version(name) for name in ("verl", "trl", "torch")},
        "settings": {"low": LOW, "high": HIGH, "length": T, "groups": GROUPS, "rewards": REWARDS},
        "inputs": {name: tensor.tolist() for name, tensor in x.items()},
        "verl": verl(x),
        "trl": trl(x),
    }
    arguments.parse_args().out.write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
