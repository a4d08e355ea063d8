"""Every legal config ends: no combination of group sizes, bounds and limits makes a run wait for nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, note, settings
from hypothesis import strategies as st

from uniagent.engine import config_file
from uniagent.engine.errors import UserError
from uniagent.engine.ports import KvPolicy
from uniagent.engine.simulate.scenario import Mode, Scenario, from_config
from uniagent.engine.simulate.workload import Workload
from uniagent.engine.simulate.world import simulate

RUN = Path(__file__).with_name("run.toml")
BASE = from_config(config_file.load(RUN), seed=0)

SETTINGS = st.fixed_dictionaries(
    {
        "rollout.mode": st.sampled_from(["sync", "colocated", "separate"]),
        "rollout.groups_per_step": st.integers(1, 4),
        "rollout.group_size": st.integers(1, 4),
        "rollout.max_sessions": st.integers(1, 24),
        "rollout.staleness_threshold": st.sampled_from([0, 0.1, 0.5, 1, 3]),
        "rollout.max_staleness": st.integers(0, 5),
        "rollout.sync_every": st.integers(1, 3),
        "rollout.partial_rollout": st.sampled_from(["true", "false"]),
        "rollout.memory_share": st.sampled_from([0, 0.001, 0.5]),
        "engine.kv": st.sampled_from(list(KvPolicy)),
        "learner.minibatches": st.integers(1, 2),
        "run.steps": st.integers(1, 5),
    }
)


@settings(max_examples=80, deadline=None)
@given(given=SETTINGS, seed=st.integers(0, 10**6))
def test_what_validation_lets_pass_ends(given: dict[str, object], seed: int) -> None:
    sets = [f"{name}={value}" for name, value in given.items()]
    try:
        config = config_file.load(RUN, sets)
    except UserError as refused:
        reason = str(refused)
        assert any(name.split(".")[1] in reason for name in given)
        return
    note("uniagent simulate tests/simulate/run.toml --seed " + " --set ".join([str(seed), *sets]))
    short = Workload(turns=3, turns_min=1, turns_max=6, samples=20)
    run = simulate(evolve(from_config(config, seed=seed), workload=short, deadline_s=1e6))
    assert run.problems == ()
    assert run.steps == given["run.steps"]
    assert run.tokens_lost == 0


@pytest.mark.slow
def test_ten_thousand_sessions_on_512_accelerators() -> None:
    """Seconds of a core; the wall-clock is in docs/simulation.md, the sizes are here."""
    big = Scenario(
        mode=Mode.COLOCATED,
        accelerators=512,
        steps=1,
        groups_per_step=420,
        group_size=8,
        staleness_threshold=2.0,
        workload=Workload(turns=8, samples=420),
    )
    run = simulate(big)
    assert run.sessions >= 10_000
    assert run.problems == ()
