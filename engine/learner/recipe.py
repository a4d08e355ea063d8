"""Named losses: surrogate, advantage, aggregation, clip and correction, with what the config sets on top."""

from __future__ import annotations

from attrs import frozen

from uniagent.engine.config import Learner


@frozen
class Recipe:
    """A resolved loss. The names are those of ``losses``, ``advantages`` and ``corrections``."""

    surrogate: str
    advantage: str
    aggregation: str
    clip_low: float
    clip_high: float
    correction_high: float = 2.0


RECIPES = {
    "grpo": Recipe("clipped", "mean_std", "seq_mean_token_mean", 0.2, 0.2),
    "dapo": Recipe("clipped", "mean_std", "token_mean", 0.2, 0.28),
    "dr_grpo": Recipe("clipped", "mean", "seq_mean_token_sum_norm", 0.2, 0.2),
    "gspo": Recipe("gspo", "mean_std", "seq_mean_token_mean", 3e-4, 4e-4),
    "cispo": Recipe("cispo", "mean_std", "token_mean", 1.0, 4.0),  # no lower bound; ratios up to 5
    "rloo": Recipe("reinforce", "rloo", "seq_mean_token_sum_norm", 0.2, 0.2),
    "decoupled_ppo": Recipe("clipped", "mean_std", "token_mean", 0.2, 0.2, correction_high=5.0),
}


def recipe(config: Learner) -> Recipe:
    """The recipe of ``config.loss``, where the config does not say otherwise (``auto``, 0)."""
    own = RECIPES[config.loss]
    return Recipe(
        surrogate=own.surrogate,
        advantage=own.advantage if config.advantage == "auto" else config.advantage,
        aggregation=own.aggregation if config.aggregation == "auto" else config.aggregation,
        clip_low=config.clip_low or own.clip_low,
        clip_high=config.clip_high or own.clip_high,
        correction_high=config.correction_high or own.correction_high,
    )
