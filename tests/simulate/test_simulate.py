"""Whole simulated runs: a function of the seed, never hanging, everything that starts ends in one place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, note, settings
from hypothesis import strategies as st

from uniagent.engine import cli, config_file
from uniagent.engine.errors import UserError
from uniagent.engine.ports import KvPolicy
from uniagent.engine.rollout.router import POLICIES
from uniagent.engine.simulate import faults, report
from uniagent.engine.simulate.costs import Costs
from uniagent.engine.simulate.faults import Fault
from uniagent.engine.simulate.scenario import Mode, from_config
from uniagent.engine.simulate.workload import Plan, Turn, Workload
from uniagent.engine.simulate.world import Hung, simulate

RUN = Path(__file__).with_name("run.toml")
SMALL = evolve(from_config(config_file.load(RUN), seed=0), deadline_s=1e6)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_run_is_a_function_of_its_seed(mode: Mode) -> None:
    first, second, other = (simulate(evolve(SMALL, mode=mode, seed=seed)) for seed in (1, 1, 2))
    assert first == second
    assert first.trace != other.trace
    assert first.problems == ()
    assert first.steps == 3


@pytest.mark.parametrize("mode", list(Mode))
def test_no_mode_beats_the_bound_loses_a_token_or_trains_on_older_ones(mode: Mode) -> None:
    run = simulate(evolve(SMALL, mode=mode, steps=6))
    assert 0 < run.eta <= 1
    assert run.tokens_lost == 0
    assert max(run.staleness) <= {Mode.SYNC: 0, Mode.ONE_STEP_OFF: 1}.get(mode, 2)
    assert run.engine_busy + run.learner_busy + run.idle == pytest.approx(1)


def test_sync_waits_for_its_longest_session_and_the_others_do_not() -> None:
    tail = Workload(turns=5, turns_min=2, turns_max=40, tool_s=20, tool_sigma=1.0, samples=1)
    wall = {m: simulate(evolve(SMALL, mode=m, steps=8, workload=tail)).wall_s for m in (Mode.SYNC, Mode.COLOCATED)}
    assert wall[Mode.COLOCATED] < 0.7 * wall[Mode.SYNC]


def test_the_training_mesh_rolls_out_while_it_would_wait() -> None:
    slow = evolve(SMALL, steps=3, accelerators=12, train_accelerators=8, groups_per_step=16)
    cheap = evolve(slow, costs=Costs(switch_s=1.0))
    alone, helped = (simulate(evolve(cheap, mode=m)) for m in (Mode.FULLY_ASYNC, Mode.SEPARATE))
    assert helped.switches >= 2
    assert helped.wall_s < alone.wall_s
    assert simulate(evolve(slow, mode=Mode.SEPARATE, costs=Costs(switch_s=1e5))).switches == 0


def test_the_bound_counts_work_and_the_longest_session() -> None:
    costs = Costs(accelerators=1, sync_s=2.0, learner_step_s=3.0, learner_token_s=0.1)
    short = Plan(100, (Turn(10, 0.0, 0),))
    busy = sum(report.work(short, costs, 1))
    assert busy == pytest.approx(10 * costs.token_s(105) + 100 * costs.prefill_token_s + 110 * 0.1)
    assert report.bound_s([short], costs, size=1, accelerators=1, max_staleness=0) == pytest.approx(busy + 5)
    slow = Plan(100, (Turn(10, 1e6, 5), Turn(1, 0.0, 0)))
    bounds = [report.bound_s([slow], costs, size=1, accelerators=1, max_staleness=s) for s in (0, 3)]
    assert bounds[0] == pytest.approx(4 * bounds[1])
    assert bounds[0] == report.alone_s(slow, costs)


# ---------------------------------------------------------------- faults

SESSION_FAULT = st.builds(
    Fault,
    kind=st.sampled_from(faults.OF_SESSIONS),
    at=st.integers(0, 4),
    target=st.integers(0, 23),
)
ENGINE_FAULT = st.builds(
    Fault,
    kind=st.sampled_from(faults.OF_REPLICAS),
    at=st.floats(0, 600, allow_nan=False),
    target=st.integers(0, 1),
    seconds=st.floats(0, 300, allow_nan=False),
)
STEP_FAULT = st.builds(
    Fault, kind=st.sampled_from(["nan_step", "slow_disk"]), at=st.integers(0, 3), seconds=st.floats(0, 300)
)


@settings(max_examples=60, deadline=None)
@given(
    plan=st.lists(st.one_of(SESSION_FAULT, ENGINE_FAULT, STEP_FAULT), max_size=12),
    mode=st.sampled_from(list(Mode)),
    seed=st.integers(0, 1000),
    kv=st.sampled_from(list(KvPolicy)),
    partial=st.booleans(),
)
def test_whatever_goes_wrong_everything_ends_in_one_place(
    plan: list[Fault], mode: Mode, seed: int, kv: KvPolicy, partial: bool
) -> None:
    config = f"rollout.partial_rollout={str(partial).lower()}", f"engine.kv={kv}", f"simulate.mode={mode}"
    note(f"save the plan as plan.json: {faults.dump(plan)}")
    note(f"uniagent simulate tests/simulate/run.toml --seed {seed} --faults plan.json --set " + " --set ".join(config))
    run = evolve(SMALL, mode=mode, seed=seed, kv=kv, partial_rollout=partial, faults=tuple(plan))
    try:
        result = simulate(run)
    except UserError as refused:  # nothing works any more, said in words: a legal end
        if "a whole batch failed" in str(refused) and {f.kind for f in plan} & {
            "replica_lost",
            "node_lost",
            "sandbox_dies",
        }:
            return
        raise
    assert result.problems == ()
    assert result.tokens_lost == 0
    if not plan:
        assert result.infra_failures == result.agent_failures == result.lost_to_faults == 0


def test_each_fault_does_what_it_says() -> None:
    def run(*plan: Fault) -> report.Report:
        return simulate(evolve(SMALL, mode=Mode.SYNC, faults=plan))

    calm = run()
    assert run(Fault("sandbox_dies", 1, 0)).infra_failures == 1
    hung = run(Fault("sandbox_hangs", 1, 0))
    assert hung.agent_failures == 1
    assert hung.wall_s > calm.wall_s + 0.5 * SMALL.session_timeout_s
    assert run(Fault("client_gone", 1, 0)).agent_failures == 1
    assert run(Fault("engine_stalls", 20.0, 0, 500.0)).wall_s > calm.wall_s + 100
    lost = run(Fault("replica_lost", 20.0, 0))
    assert lost.lost_to_faults > 0
    assert lost.steps == 3
    gone = run(Fault("node_lost", 20.0, 0))
    assert gone.lost_to_faults > 0
    assert gone.sessions > calm.sessions  # those that lived there began anew
    assert gone.infra_failures == 0
    assert gone.steps == 3
    leaky = run(Fault("sandbox_leaks", 0, 0))
    assert leaky.sandboxes_leaked == 1
    assert leaky.wall_s == calm.wall_s
    assert run(Fault("slow_disk", 1, seconds=50.0)).wall_s == pytest.approx(calm.wall_s + 50)
    nan = run(Fault("nan_step", 1))
    assert 0 < nan.tokens_trained < calm.tokens_trained
    whole = run(Fault("sandbox_dies", 0, 2), Fault("sandbox_dies", 0, 3))
    assert whole.groups_given_back == 1  # and another group took its place
    assert whole.steps == 3


def test_a_run_that_hangs_meets_its_deadline() -> None:
    stuck = evolve(SMALL, mode=Mode.SYNC, session_timeout_s=1e9, faults=(Fault("sandbox_hangs", 0, 0),))
    with pytest.raises(Hung, match="at step 0"):
        simulate(stuck)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({}, "JSON list"),
        ([{"kind": "sandbox_dies"}], "needs kind and at"),
        ([{"kind": "sandbox_died", "at": 1}], "sandbox_dies"),
        ([{"kind": "nan_step", "at": -1}], "0 or more"),
        ([{"kind": "nan_step", "at": 1, "when": 2}], "when is no part"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(plan: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        faults.parse(plan)


def test_a_plan_survives_being_written_down() -> None:
    plan = (Fault("replica_lost", 1.5, 1), Fault("nan_step", 2))
    assert faults.parse(json.loads(faults.dump(plan))) == plan


# ---------------------------------------------------------------- the command


def test_the_command_prints_a_table_and_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(faults.dump([Fault("sandbox_dies", 1, 0)]))
    lines = []
    for _ in range(2):
        assert cli.main(["simulate", str(RUN), "--seed", "4", "--faults", str(plan), "--json"]) == 0
        said = capsys.readouterr()
        assert "colocated" in said.err
        lines.append(json.loads(said.out))
    assert lines[0] == lines[1]
    assert lines[0]["infra_failures"] == 1
    assert lines[0]["problems"] == []


def test_the_command_says_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", str(RUN), "--set", "simulate.accelerators=6"]) == 2
    assert "multiple of 4" in capsys.readouterr().err
    assert (
        cli.main(["simulate", str(RUN), "--set", "simulate.mode=separate", "--set", "simulate.train_accelerators=8"])
        == 2
    )
    assert "between 4 and 4" in capsys.readouterr().err
    assert cli.main(["simulate"]) == 2
    assert "CONFIG is missing" in capsys.readouterr().err


def test_the_config_offers_every_mode_and_routing_policy() -> None:
    assert set(config_file.FIELDS["simulate"]["router"].metadata["choices"]) == set(POLICIES)
    assert set(config_file.FIELDS["simulate"]["mode"].metadata["choices"]) == {"", *Mode}
