"""Placements that could never roll out are refused with what to do."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from uniagent.engine import config
from uniagent.engine.config import RunConfig, check
from uniagent.engine.errors import UserError
from uniagent.engine.separate import formation


def run(train_ranks: int = 1, joining: bool = False, **rollout: Any) -> RunConfig:
    return RunConfig(
        rollout=config.Rollout(mode="separate", **rollout), placement=config.Placement(train_ranks, joining)
    )


def job(ranks: int, **environment: str) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "box", "MASTER_PORT": "2000", **environment}


@pytest.mark.parametrize(
    ("made", "environment", "why"),
    [
        (run(), {}, "torchrun --nproc-per-node 2"),
        (run(2), job(2), "all ranks would train"),
        (run(4, joining=True), job(3), "the job has 3 ranks"),
        (run(1), job(4, GROUP_WORLD_SIZE="2"), "rollout.bind is not set"),
        (evolve(run(), engine=config.Engine(options={"tensor_parallel": 2})), job(2), "engine of its own"),
        (evolve(run(3), learner=config.Learner(context_parallel=2)), job(4), "does not divide the 3 ranks"),
    ],
)
def test_a_placement_without_a_way_to_roll_out_is_refused(made: RunConfig, environment: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        formation.refuse(made, environment)


def test_legal_placements_pass() -> None:
    formation.refuse(run(), job(2))
    formation.refuse(run(1, joining=True), {})
    formation.refuse(run(2, joining=True), job(2))
    formation.refuse(RunConfig(), {})


def test_the_head_is_one_port_behind_torchrun_unless_the_config_says() -> None:
    assert formation.head_url(run(), job(2)) == "http://127.0.0.1:2001"
    assert formation.head_url(run(bind="10.0.0.1"), job(2)) == "http://box:2001"
    url = "http://10.0.0.1:7"
    assert formation.head_url(run(head_url=url), job(2)) == url
    assert formation.door(run(head_url=url), url) == ("127.0.0.1", 7)


def test_the_token_is_for_its_owner_only(tmp_path: Path) -> None:
    formation.keep("secret", tmp_path / "token")
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_the_config_refuses_what_a_separate_run_cannot_do() -> None:
    assert [key for key, _, _ in check(run(partial_rollout=False))] == ["rollout.partial_rollout"]
    assert [key for key, _, _ in check(run(head_url="box:1"))] == ["rollout.head_url"]
    assert [key for key, _, _ in check(RunConfig(placement=config.Placement(2)))] == ["placement.train_ranks"]
    assert check(run()) == []
