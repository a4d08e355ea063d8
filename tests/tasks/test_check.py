"""uniagent tasks check: bad samples are found, told and kept apart."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from uniagent.engine import registry
from uniagent.engine.ports import AgentResult, Sandbox, TaskResult
from uniagent.tasks.check import Attempt
from uniagent.tasks.check_cli import main


class Flawed:
    """A task that is wrong in the way that its sample's metadata says."""

    def __init__(self, config: Any, providers: Any) -> None:
        self.flaw = config.metadata.get("flaw")
        self.flips = itertools.cycle([0.0, 1.0])

    async def run(self, model: Any) -> TaskResult:
        raise NotImplementedError

    async def setup(self, sandbox: Sandbox) -> None:
        pass

    def attempts(self) -> Mapping[str, Attempt]:
        async def says(text: str) -> AgentResult:
            return AgentResult(True, [{"role": "assistant", "content": text}])

        attempts: dict[str, Attempt] = {"oracle": lambda _: says("right"), "guess": lambda _: says("wrong")}
        if self.flaw == "no oracle":
            del attempts["oracle"]
        return attempts

    async def verify(self, sandbox: Sandbox, acted: AgentResult) -> TaskResult:
        said = acted.transcript[-1]["content"] if acted.transcript else ""
        if self.flaw == "unstable" and said == "wrong":
            return TaskResult(next(self.flips))
        generous = {"easy": ("", "wrong", "right"), "gullible": ("wrong", "right"), "impossible": ()}
        return TaskResult(float(said in generous.get(self.flaw or "", ("right",))))


class Unscripted:
    def __init__(self, config: Any, providers: Any) -> None:
        pass


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, Path]:
    monkeypatch.setitem(registry.BUILTIN["tasks"], "flawed", f"{__name__}:Flawed")
    (tmp_path / "tasks.yaml").write_text("name: flawed\nsandbox: {provider: none}")
    flaws = [None, "easy", "gullible", "impossible", "unstable", "no oracle"]
    rows = [{"name": "flawed", "metadata": {"flaw": flaw}} for flaw in flaws]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "tasks.yaml"), str(tmp_path / "rows.jsonl"), tmp_path / "out"


def test_each_flaw_is_named_and_its_sample_kept_apart(
    files: tuple[str, str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, data, out = files
    assert main(["check", tasks, data, "--out", str(out), "--json"]) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["samples"], summary["good"], summary["quarantined"]) == (6, 1, 5)
    assert summary["mean_reward"]["oracle"] == pytest.approx(4 / 5)
    quarantined = [json.loads(line) for line in (out / "quarantined.jsonl").read_text().splitlines()]
    problems = {one["sample"]["metadata"]["flaw"]: one["problems"] for one in quarantined}
    assert problems == {
        "easy": ["nothing: earns 1 and counts as success", "guess: earns 1 and counts as success"],
        "gullible": ["guess: earns 1 and counts as success"],
        "impossible": ["oracle: does not succeed"],
        "unstable": ["guess: the verifier changes its mind: rewards [0.0, 1.0, 0.0]"],
        "no oracle": ["no oracle: nothing shows that it can be solved"],
    }
    assert [json.loads(line)["metadata"] for line in (out / "good.jsonl").read_text().splitlines()] == [{"flaw": None}]
    assert "| 2 | guess: earns 1 and counts as success |" in (out / "report.md").read_text()
    assert json.loads((out / "report.json").read_text())["quarantined"] == 5


def test_good_samples_pass(files: tuple[str, str, Path]) -> None:
    tasks, data, _ = files
    assert main(["check", tasks, data, "--n", "1"]) == 0


def test_a_task_that_offers_no_attempts_cannot_be_checked(
    files: tuple[str, str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(registry.BUILTIN["tasks"], "flawed", f"{__name__}:Unscripted")
    tasks, data, _ = files
    assert main(["check", tasks, data, "--n", "1"]) == 1
    assert "offers no attempts()" in capsys.readouterr().out
