"""Learning rates."""

from __future__ import annotations

import pytest

from uniagent.engine.learner.schedule import learning_rate


def rates(kind: str, floor: float = 0.0) -> list[float]:
    return [learning_rate(s, peak=1.0, warmup=2, total=10, kind=kind, floor=floor) for s in range(12)]


def test_warm_up_then_the_schedule() -> None:
    assert rates("constant") == [0.5, 1.0] + [1.0] * 10
    linear = rates("linear")
    assert linear[:3] == [0.5, 1.0, 1.0]
    assert linear[6] == 0.5
    assert linear[10:] == [0.0, 0.0]
    cosine = rates("cosine", floor=0.1)
    assert cosine[6] == pytest.approx(0.55)
    assert cosine[10:] == pytest.approx([0.1, 0.1])


def test_no_warm_up() -> None:
    assert learning_rate(0, peak=2.0, warmup=0, total=5) == 2.0
