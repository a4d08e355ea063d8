"""The quickstart in small, for tests: the same files, a few episodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

ROOT = Path(__file__).parents[2]
SMALL = ("rollout.groups_per_step=2", "rollout.group_size=4", "eval.n=8", "eval.greedy=false", "engine.slots=16")


@frozen
class Quickstart:
    """Runs ``uniagent train`` as a user would."""

    config: Path = ROOT / "examples" / "quickstart.toml"

    def arguments(self, run: Path, *sets: str) -> list[str]:
        settings = [part for s in (*SMALL, *sets) for part in ("--set", s)]
        return ["train", str(self.config), "--run-dir", str(run), *settings]

    def command(self, run: Path, *sets: str) -> list[str]:
        return [sys.executable, "-m", "uniagent.engine", *self.arguments(run, *sets)]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def train(self, run: Path, *sets: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
        """``prelude`` is Python run in the process before the command line is read."""
        command = self.command(run, *sets)
        if prelude:
            code = f"import sys\n{prelude}\nfrom uniagent.engine import cli\nsys.exit(cli.main(sys.argv[1:]))\n"
            command = [sys.executable, "-c", code, *self.arguments(run, *sets)]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=300)

    @staticmethod
    def summary(run: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((run / "summary.json").read_text())
        return found


@pytest.fixture(scope="session")
def quickstart() -> Quickstart:
    return Quickstart()
