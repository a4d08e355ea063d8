"""Scores of trained tokens: as sampled, differentiable, and never more than one chunk of logits at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from uniagent.engine.learner import logprobs as module
from uniagent.engine.learner.logprobs import Kept, chunk_tokens, logprobs

N, H, V = 23, 8, 50


def data(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=g)
    temperature = torch.rand(N, generator=g, dtype=dtype) + 0.5
    return hidden, weight, targets, temperature


def keep(targets: torch.Tensor) -> tuple[Kept, torch.Tensor]:
    """Kept sets of 1..6 tokens with the target in; every fourth token keeps all. And the same as a mask [N, V]."""
    g = torch.Generator().manual_seed(1)
    sets = []
    for i, t in enumerate(targets.tolist()):
        others = torch.randperm(V, generator=g)[: i % 6].tolist()
        sets.append([] if i % 4 == 3 else sorted({t, *others}))
    mask = torch.tensor([[not s or v in s for v in range(V)] for s in sets])
    starts = torch.tensor([0, *[len(s) for s in sets]]).cumsum(0)
    return Kept(torch.tensor([v for s in sets for v in s]), starts), mask


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "chunk_tokens", lambda vocabulary, device: 7)


@pytest.mark.parametrize("with_kept", [False, True])
@pytest.mark.parametrize("with_temperature", [False, True])
def test_equals_log_softmax_with_its_gradients(with_kept: bool, with_temperature: bool) -> None:
    hidden, weight, targets, temperature = data()
    kept, mask = keep(targets)
    x = hidden @ weight.t()
    x = x / temperature[:, None] if with_temperature else x
    x = torch.where(mask, x, -1e30) if with_kept else x
    full = x.log_softmax(-1)
    expected = full.gather(-1, targets[:, None])[:, 0], -(full.exp() * torch.where(full > -1e20, full, 0.0)).sum(-1)
    found = logprobs(
        hidden, weight, targets, temperature=temperature if with_temperature else None, kept=kept if with_kept else None
    )
    a, b = torch.randn(2, N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for e, f in zip(expected, found, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-12)
    for wa, wb in ((a, b), (a, b * 0), (a * 0, b)):
        wanted = torch.autograd.grad((expected[0] * wa + expected[1] * wb).sum(), [hidden, weight], retain_graph=True)
        made = torch.autograd.grad((found[0] * wa + found[1] * wb).sum(), [hidden, weight], retain_graph=True)
        for e, f in zip(wanted, made, strict=True):
            torch.testing.assert_close(f, e, rtol=1e-11, atol=1e-11)


def test_a_kept_set_of_one_token_has_probability_one() -> None:
    hidden, weight, targets, _ = data()
    kept = Kept(targets.clone(), torch.arange(N + 1))
    lp, entropy = logprobs(hidden, weight, targets, kept=kept)
    assert lp.abs().max() == 0
    assert entropy.abs().max() == 0


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements of any floating-point tensor made while active."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.size = max(self.size, t.numel())
        return out


def test_memory_does_not_grow_with_trained_tokens() -> None:
    def largest(n: int) -> int:
        hidden, weight = torch.randn(n, 2).requires_grad_(), torch.randn(400, 2).requires_grad_()
        with _Largest() as seen:  # type: ignore[no-untyped-call]
            lp, _ = logprobs(hidden, weight, torch.zeros(n, dtype=torch.long))
            torch.autograd.backward(lp.sum())
        return int(seen.size)

    assert largest(500) == largest(50) == 7 * 400


def test_chunks_are_bounded_and_not_too_thin() -> None:
    assert chunk_tokens(151_936, "cpu") == 64
    assert chunk_tokens(151_936, "cuda") * 151_936 <= 1 << 27
