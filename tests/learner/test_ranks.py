"""Two ranks train exactly like one process: sharded weights, dealt rows, a row over two ranks, a rank without a row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.config import Learner
from uniagent.engine.learner import snapshots
from uniagent.engine.learner.batch import build
from uniagent.engine.learner.context import part
from uniagent.engine.learner.packing import Cost, Item, Row, pack, pack_row
from uniagent.engine.learner.planning import Needs, Work, plan
from uniagent.engine.learner.ranks import ALONE, Ranks, join
from uniagent.engine.learner.trainer import Trainer

PROGRAM = Path(__file__).with_name("two_ranks.py")


def run(out: Path, ranks: int) -> Any:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAM), str(out)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_ranks_train_like_one(kit: Any, tmp_path: Path) -> None:
    alone, together = run(tmp_path / "1.pt", 1), run(tmp_path / "2.pt", 2)
    for case, expected in alone.items():
        found = together[case]
        assert [m["train_step"] for m in found["metrics"]] == [m["train_step"] for m in expected["metrics"]]
        for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5), case
            assert abs(mine["loss"] - theirs["loss"]) < 1e-5, case
        moved = 0.0
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-5, msg=f"{case} {name}")
            moved += float((weight - expected["start"][name]).abs().max())
        assert moved > 1e-3, case  # the steps were real ones
        torch.testing.assert_close(found["canary"], expected["canary"], rtol=0, atol=3e-5)
    # what two ranks saved, one process goes on from
    after = []
    for name in ("1", "2"):
        trainer = Trainer(kit.model(), Learner(lr=1e-3, warmup_steps=0), seed=0, steps=9)
        assert snapshots.load(trainer, tmp_path / f"{name}.snapshots" / "dapo") == {"version": 5}
        trainer.step(build(kit.groups(seed=9), "mean"))
        assert trainer.train_step == 6
        after.append(dict(trainer.policy.model.named_parameters()))
    for name, weight in after[0].items():
        torch.testing.assert_close(after[1][name], weight, rtol=0, atol=1e-5)


rows = st.lists(st.integers(2, 40), min_size=1, max_size=9)


@given(sizes=rows, size=st.integers(1, 4), budget=st.integers(16, 80))
def test_every_rank_has_as_many_pieces_and_every_token_is_trained_once(
    kit: Any, sizes: list[int], size: int, budget: int
) -> None:
    episodes = [
        [kit.episode([kit.Turn([1, 2], [3] * n)], float(i % 2), sample=g, replica=i) for i in range(2)]
        for g, n in enumerate(sizes)
    ]
    batch = build(episodes, "mean")
    plans = [
        plan(
            batch,
            minibatches=2,
            micro_tokens=budget,
            share=False,
            cost=Cost(),
            needs=Needs(reference=True, old=True, sessions=True),
            rng=np.random.default_rng(0),
            ranks=evolve(ALONE, rank=r, size=size),
        )
        for r in range(size)
    ]
    shapes = {tuple((p.work, p.minibatch, p.row is None) for p in made.pieces) for made in plans}
    assert len(shapes) == 1
    trained = [p.row.tokens for made in plans for p in made.pieces if p.work is Work.TRAIN and p.row and not p.idle]
    assert sorted(np.concatenate(trained).tolist()) == list(range(batch.tokens))


def forest_row(sizes: list[int]) -> Row:
    shared = np.full(17, 9)
    items, at = [], 0
    for i, n in enumerate(sizes):
        ids = np.concatenate([shared if i % 2 else shared[:0], np.arange(n) + 100 * i]).astype(np.int32)
        trained = np.arange(1, len(ids))
        items.append(Item(ids, trained, at + np.arange(len(trained)), 0))
        at += len(trained)
    return pack_row(items, Cost(), least=16)


@given(sizes=rows, parts=st.integers(1, 4))
def test_the_parts_of_a_row_attend_together_as_the_row_does(sizes: list[int], parts: int) -> None:
    row = forest_row(sizes)
    length = len(row.forest.ids)
    whole = np.zeros((length, length), int)
    for c in row.forest.calls:
        block = np.ones((c.q1 - c.q0, c.k1 - c.k0), int)
        whole[c.q0 : c.q1, c.k0 : c.k1] += np.tril(block) if c.causal else block
    kept = []
    for number in range(parts):
        made = part(row, number, parts)
        place = np.argsort(made.order)[number * len(made.ids) :][: len(made.ids)]  # global place of each local token
        sees = np.zeros((len(made.ids), len(made.order)), int)
        for c in made.calls:
            block = np.ones((c.q1 - c.q0, c.k1 - c.k0), int)
            sees[c.q0 : c.q1, c.k0 : c.k1] += np.tril(block) if c.causal else block
        real = place < length
        np.testing.assert_array_equal(sees[real][:, :length], whole[place[real]])
        assert sees[:, length:][real].sum() == 0
        np.testing.assert_array_equal(made.ids[real], row.forest.ids[place[real]])
        np.testing.assert_array_equal(place[made.sources], row.sources[made.kept])
        kept += made.kept.tolist()
    assert sorted(kept) == list(range(len(row.tokens)))


def test_parts_share_the_attention_evenly() -> None:
    (row,) = pack([Item(np.arange(4000, dtype=np.int32), np.array([1]), np.array([0]), 0)], 10)
    calls = [part(row, i, 4).calls for i in range(4)]
    pairs = [sum((c.q1 - c.q0) * (c.k1 - c.k0) / (2 if c.causal else 1) for c in mine) for mine in calls]
    assert max(pairs) < 1.01 * min(pairs)


def test_a_row_cannot_be_shared_by_ranks_that_are_not_there() -> None:
    assert join() is ALONE
    with pytest.raises(ValueError, match=r"context_parallel = 2 does not divide .*\(1\)"):
        join(context=2)


def test_ranks_along_context_share_a_row() -> None:
    ranks = [Ranks(rank=r, size=4, context=2) for r in range(4)]
    assert [(r.share, r.part, r.shares) for r in ranks] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
