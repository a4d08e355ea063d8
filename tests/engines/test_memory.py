"""What fits on a device: figures that a reader can check by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from uniagent.adapters.engines.cli import main
from uniagent.adapters.engines.memory import Sizes, kv_bytes, of_run, plan, table
from uniagent.engine import config

GIB = 2**30


def sizes(**changed: object) -> Sizes:
    given: dict[str, object] = {
        "parameters": 10**9,
        "trained": 10**9,
        "kv_token": 1000,
        "width": 2,
        "device": 80 * GIB,
    }
    return Sizes(**{**given, **changed})  # type: ignore[arg-type]


def by_part(found: object) -> dict[str, tuple[int, int]]:
    return {row.part: (row.sampling, row.training) for row in found.rows}  # type: ignore[attr-defined]


def test_every_part_is_counted_in_its_phase() -> None:
    found = plan(sizes(), tokens=10**6)
    assert by_part(found) == {
        "learner weights": (4 * 10**9, 4 * 10**9),
        "optimizer": (8 * 10**9, 8 * 10**9),
        "gradients": (0, 4 * 10**9),
        "engine weights": (2 * 10**9, 2 * 10**9),
        "K/V": (10**9, 10**9),
    }
    assert (found.sampling, found.training) == (15 * 10**9, 19 * 10**9)
    assert found.problem == ""
    assert found.kv_left == int(80 * GIB * 0.9) - 14 * 10**9
    assert table(found).endswith("it fits")


def test_a_sleeping_engine_leaves_the_device_to_the_learner() -> None:
    found = by_part(plan(sizes(sleeps=True), tokens=10**6))
    assert found["engine weights"] == (2 * 10**9, 0)
    assert found["K/V"] == (10**9, 0)


def test_ranks_share_the_learner_and_parallel_ranks_the_engine() -> None:
    found = by_part(plan(sizes(ranks=4, parallel=2), tokens=10**6))
    assert found["optimizer"] == (2 * 10**9, 2 * 10**9)
    assert found["engine weights"] == (10**9, 10**9)
    assert found["K/V"] == (5 * 10**8, 5 * 10**8)


def test_one_module_is_counted_once_and_adapters_train_little() -> None:
    assert by_part(plan(sizes(shared=True), tokens=1))["engine weights"] == (0, 0)
    adapters = by_part(plan(sizes(trained=10**7), tokens=1))
    assert adapters["optimizer"] == (8 * 10**7, 8 * 10**7)
    assert adapters["learner weights"][0] == 4 * 10**7 + 2 * 99 * 10**7


@pytest.mark.parametrize(
    ("changed", "tokens", "said"),
    [
        ({"device": 8 * GIB}, 1, "the weights alone do not fit"),
        ({"device": 8 * GIB, "trains": False}, 10**7, "K/V of at most"),
        ({"device": 20 * 10**9}, 10**6, "sleep"),
    ],
)
def test_what_does_not_fit_is_said_with_what_to_do(changed: dict[str, object], tokens: int, said: str) -> None:
    assert said in plan(sizes(**changed), tokens=tokens).problem


def test_a_run_is_measured_from_its_config_alone() -> None:
    found = of_run(config.RunConfig(engine=config.Engine("vllm", slots=4, context=256)), device=GIB)
    kv = next(row for row in found.rows if row.part == "K/V")
    shape = SimpleNamespace(num_hidden_layers=4, num_key_value_heads=2, num_attention_heads=4, head_dim=32)
    assert kv_bytes(shape, 4) == 2 * 4 * 2 * 32 * 4
    assert kv.sampling % (4 * 256) == 0
    assert kv.sampling > 0
    assert found.problem == ""


def test_the_command_prints_the_table_and_says_by_its_status_whether_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[engine]\nname = "transformers"\nslots = 4\ncontext = 256\n')
    assert main(["fit", str(run), "--memory-mib", "4000"]) == 0
    assert "it fits" in capsys.readouterr().out
    assert main(["fit", str(run), "--memory-mib", "5", "--json"]) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["device"] == 5 << 20
    assert "do not fit" in said["problem"]
    assert {row["part"] for row in said["rows"]} >= {"optimizer", "gradients", "K/V"}
