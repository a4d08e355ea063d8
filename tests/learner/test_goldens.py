"""Our losses against verl and trl, value and gradient, in float64 (see make_goldens.py).

1e-12 where the aggregation is a sum over a constant; 1e-9 for sequence means, where verl adds 1e-8 to lengths.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from uniagent.engine.learner.advantages import advantages
from uniagent.engine.learner.corrections import Correction, weights
from uniagent.engine.learner.losses import SURROGATES, Clip, Scored, aggregation, kl, session_mean

GOLDENS: dict[str, Any] = json.loads(Path(__file__).with_name("goldens.json").read_text())
SETTINGS = GOLDENS["settings"]
MASK = torch.tensor(GOLDENS["inputs"]["mask"]).bool()
SESSION = torch.arange(len(MASK))[:, None].expand_as(MASK)[MASK]


def flat(name: str) -> torch.Tensor:
    x = torch.tensor(GOLDENS["inputs"][name], dtype=torch.float64)
    return (x[:, None].expand_as(MASK) if x.ndim == 1 else x)[MASK]


def loss(surrogate: str, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(value, gradient [N]) of ours."""
    lp = flat("logprobs").requires_grad_()
    old = flat("old")
    ratio = session_mean((lp - old).detach(), SESSION, len(MASK))
    low = 10.0 if surrogate == "cispo" else SETTINGS["low"]
    clip = Clip(low, SETTINGS["high"], dual=1.05 if how == "dual" else 0.0)
    values = SURROGATES[surrogate](Scored(lp, old, flat("advantages"), ratio), clip)
    if how == "tis":
        values = values * weights(old - flat("behaviour"), SESSION, len(MASK), Correction("tis", 0.0, 1.5))
    if how == "kl":
        values = values + 0.1 * kl(lp, flat("reference"), "k3")
    average = how if how.startswith("seq") else "token_mean"
    total = (values * aggregation(average, SESSION, len(MASK), SETTINGS["length"])).sum()
    return total.detach(), torch.autograd.grad(total, lp)[0]


LOSSES = [
    (oracle, name)
    for oracle in ("verl", "trl")
    for name in GOLDENS[oracle]
    if name.partition("/")[0] in ("clipped", "gspo", "cispo")
]


def test_both_oracles_are_there() -> None:
    assert len(LOSSES) == 13


@pytest.mark.parametrize(("oracle", "name"), LOSSES)
def test_losses(oracle: str, name: str) -> None:
    golden = GOLDENS[oracle][name]
    value, gradient = loss(*name.split("/"))
    tolerance = 1e-9 if name.endswith("token_mean") and "seq" in name else 1e-12
    assert abs(float(value) - golden["value"]) <= tolerance
    expected = torch.tensor(golden["gradient"], dtype=torch.float64)
    assert (gradient - expected[MASK]).abs().max() <= tolerance
    assert not expected[~MASK].any()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("tis", Correction("tis", 0.0, 1.5)),
        ("tis_sequence", Correction("tis_sequence", 0.0, 1.5)),
        ("icepop", Correction("icepop", 0.8, 1.25)),
        ("geometric", Correction("none", 0.0, 0.0, (1 / 1.1, 1 / 0.9))),  # verl bounds the inverse ratio
    ],
)
def test_corrections(name: str, how: Correction) -> None:
    expected = torch.tensor(GOLDENS["verl"][f"weights/{name}"], dtype=torch.float64)[MASK]
    found = weights(flat("old") - flat("behaviour"), SESSION, len(MASK), how)
    assert len(set(found.tolist())) > 1  # the bound was reached
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl(kind: str) -> None:
    expected = torch.tensor(GOLDENS["verl"]["kl"][kind], dtype=torch.float64)[MASK]
    torch.testing.assert_close(kl(flat("logprobs"), flat("reference"), kind), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["mean_std", "mean", "rloo"])
def test_advantages(kind: str) -> None:
    groups, rewards = np.array(SETTINGS["groups"]), np.array(SETTINGS["rewards"])
    for group in set(groups):
        mine = groups == group
        expected = np.array(GOLDENS["verl"]["advantages"][kind])[mine]
        np.testing.assert_allclose(advantages(rewards[mine], np.ones(mine.sum(), bool), kind), expected, atol=1e-12)
