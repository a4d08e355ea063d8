"""The quickstart's result, checked: it learned, the ledger balances, and a fresh process agrees with it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path


def main(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    print(f"success {before['success']:.3f} -> {after['success']:.3f} (n = {after['n']}), {summary['wall_s']:.0f} s")
    assert before["success"] <= 0.5, before
    assert after["success"] >= 0.87, after
    assert after["n"] >= 448, after
    checkpoint = max((run / "checkpoints").glob("step-*"), key=lambda p: int(p.name.split("-")[1]))
    again = subprocess.run(
        ["uniagent", "eval", "examples/quickstart.toml", "--checkpoint", str(checkpoint), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    fresh = json.loads(again.stdout.splitlines()[-1])
    spread = 2 * math.hypot(after["stderr"], fresh["stderr"])
    print(f"a fresh process: {fresh['success']:.3f} (within {spread:.3f})")
    assert abs(fresh["success"] - after["success"]) <= spread, (fresh, after)


main(Path(sys.argv[1]))
