"""Cost model, calibration and workload: what a run folder tells is found again, and sessions depend on nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine import cli
from uniagent.engine.errors import UserError
from uniagent.engine.simulate import costs
from uniagent.engine.simulate.costs import Costs, calibrate
from uniagent.engine.simulate.workload import Workload


def episode(step: int, answers: int, tokens: int, **more: Any) -> dict[str, Any]:
    timings = {"total": 9.0, "engine": 0.02 * 10 * answers, "sandbox": 3.0, "verify": 0.5}
    return {
        "v": 1,
        "kind": "episode",
        "use": {"step": step, "evaluation": None},
        "result": {"failure": None},
        "timings": {**timings, "agent": timings["engine"] + 0.25 * answers},
        "fates": ["live"] * answers,
        "ledger": {"sampled": 10 * answers},
        "trajectories": [{"token_ids": [0] * tokens}],
        **more,
    }


def write(folder: Path, episodes: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    (folder / "episodes.jsonl").write_text("".join(json.dumps(e) + "\n" for e in episodes))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))


def test_calibration_finds_what_a_run_cost(tmp_path: Path) -> None:
    sizes = {1: 100, 2: 200, 3: 400}
    episodes = [episode(step, 4, size) for step, size in sizes.items()]
    episodes.append(episode(1, 4, 10_000, result={"failure": "infra"}))
    episodes.append(episode(0, 4, 10_000, use={"step": 0, "evaluation": "before"}))
    write(tmp_path, episodes, [{"step": k, "training_s": 2.0 + 0.01 * n} for k, n in sizes.items()])
    found, seen = calibrate(tmp_path)
    assert found.learner_step_s == pytest.approx(2.0)
    assert found.learner_token_s == pytest.approx(0.01)
    assert found.sandbox_start_s == pytest.approx(3.5)
    assert found.sandbox_exec_s == pytest.approx(0.25)
    assert found.step_s(1, sum(sizes.values()) / 3) == pytest.approx(0.02)
    assert seen["episodes"] == 3
    assert seen["learner_error"] == pytest.approx(0, abs=1e-9)


def test_calibrated_costs_are_what_the_config_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [episode(1, 4, 100)], [{"step": 1, "training_s": 2.0}])
    assert cli.main(["simulate", "--calibrate", str(tmp_path)]) == 0
    file = tmp_path / "costs.json"
    file.write_text(capsys.readouterr().out)
    assert costs.read(file) == calibrate(tmp_path)[0]


def test_what_cannot_be_calibrated_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        calibrate(tmp_path)
    write(tmp_path, [], [{"step": 1, "training_s": 2.0}])
    with pytest.raises(UserError, match="1 steps and 0 trained episodes"):
        calibrate(tmp_path)
    (tmp_path / "costs.json").write_text('{"decode_s": 1}')
    with pytest.raises(UserError, match="decode_s"):
        costs.read(tmp_path / "costs.json")


def test_a_token_at_a_full_batch_costs_its_share_of_the_step() -> None:
    model = Costs(accelerators=2, decode_base_s=1.0, decode_request_s=0.1, decode_kv_s=0.001, kv_tokens=1000)
    assert model.token_s(100) == pytest.approx(2 * (1.0 + 0.1 * 10 + 1.0) / 10)
    assert model.token_s(5000) == pytest.approx(2 * model.step_s(1, 5000))  # never less than one request


@given(seed=st.integers(0, 99), sample=st.integers(0, 500), replica=st.integers(0, 9))
def test_a_plan_is_a_function_of_its_place_and_within_bounds(seed: int, sample: int, replica: int) -> None:
    load = Workload(samples=500, drift_turns=2, drift_tokens=2, context=20_000)
    plan = load.plan(seed, sample, replica)
    assert plan == load.plan(seed, sample, replica)
    assert 1 <= len(plan.turns) <= load.turns_max
    assert plan.length <= load.context


def test_the_workload_drifts() -> None:
    load = Workload(samples=400, drift_turns=2, drift_tokens=2)
    early, late = (sum(load.plan(0, s, 0).sampled for s in range(a, a + 100)) for a in (0, 400))
    assert 2.5 < late / early < 6
