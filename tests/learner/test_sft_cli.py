"""uniagent sft: learns from the recorded sessions that were rewarded, exactly the tokens the model sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uniagent.engine import fingerprint, journal, model_files
from uniagent.engine.config import Learner
from uniagent.engine.errors import UserError
from uniagent.engine.learner.sft_cli import examples, main
from uniagent.engine.learner.trainer import Trainer
from uniagent.engine.ports import Failure


@pytest.fixture
def folder(kit: Any, tmp_path: Path) -> Path:
    made = tmp_path / "model"
    kit.model().save_pretrained(made)
    (made / "tokenizer.json").write_text("{}")
    return made


def record(path: Path, episodes: list[Any], *, evaluation: str | None = None, tokenizer: str = "") -> Path:
    header = {"v": 1, "kind": "header", "hashes": {"tokenizer": tokenizer}}
    lines = [journal.encode(journal.Record(e, journal.Use(1, evaluation))) for e in episodes]
    path.write_bytes(json.dumps(header).encode() + b"\n" + b"".join(lines))
    return path


def episodes(kit: Any) -> list[Any]:
    """Right: 3 4 5 after 1 2; wrong: 6 7; failed outside the model: 8."""
    right, wrong, broken = ([kit.Turn([1, 2], ids)] for ids in ([3, 4, 5], [6, 7], [8]))
    return [
        *[kit.episode(right, 1.0, replica=i) for i in range(4)],
        kit.episode(wrong, 0.0, replica=4),
        kit.episode(broken, 1.0, replica=5, failure=Failure.INFRA),
    ]


def test_it_learns_what_was_rewarded(kit: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    record(run / "episodes.jsonl", episodes(kit), tokenizer=fingerprint.of_files(folder, fingerprint.TOKENIZER))
    arguments = [str(run), "--model", str(folder), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--steps", "30", "--lr", "1e-2", "--tokens-per-step", "20", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["steps"], result["trajectories"]) == (30, 4)
    assert result["loss_last"] < 0.1 < result["loss_first"]
    model = model_files.load(tmp_path / "out", dtype="float32", device="cpu")
    lp = Trainer(model, Learner(), seed=0, steps=1).logprobs(np.array([1, 2, 3, 4, 5], np.int32), np.arange(2, 5))
    assert lp.sum() > -0.5
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_sessions_are_chosen_by_reward_and_use(kit: Any, tmp_path: Path) -> None:
    training = record(tmp_path / "a.jsonl", episodes(kit))
    evaluation = record(tmp_path / "b.jsonl", episodes(kit), evaluation="before")

    def count(least: float, evaluations: bool = False) -> int:
        return sum(1 for _ in examples([training, evaluation], least, evaluations))

    assert [count(1.0), count(0.0), count(2.0), count(1.0, True)] == [4, 5, 0, 8]
    ids, mask = next(iter(examples([training], 1.0, False)))
    assert ids[mask].tolist() == [3, 4, 5]


def test_what_cannot_work_is_said(kit: Any, folder: Path, tmp_path: Path) -> None:
    good = record(tmp_path / "a.jsonl", episodes(kit), tokenizer=fingerprint.of_files(folder, fingerprint.TOKENIZER))
    arguments = ["--model", str(folder), "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match=r"reward of at least 2\.0"):
        main([str(good), *arguments, "--min-reward", "2"])
    other = record(tmp_path / "b.jsonl", episodes(kit), tokenizer="another")
    with pytest.raises(UserError, match="recorded with another tokenizer"):
        main([str(other), *arguments])
    large = [kit.episode([kit.Turn([1], [1000])], 1.0)]
    own = fingerprint.of_files(folder, fingerprint.TOKENIZER)
    with pytest.raises(UserError, match="the records hold token 1000"):
        main([str(record(tmp_path / "c.jsonl", large, tokenizer=own)), *arguments])
    (tmp_path / "d.jsonl").touch()
    with pytest.raises(UserError, match="is empty"):
        main([str(tmp_path / "d.jsonl"), *arguments])
