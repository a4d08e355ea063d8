"""uniagent sandbox doctor and reap."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from uniagent.adapters.sandboxes import cli
from uniagent.adapters.sandboxes.node_dir import NodeFolder


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No container engine and no credentials."""
    for name in ("MODAL_TOKEN_ID", "E2B_API_KEY", "DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN", "MODAL_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("uniagent.adapters.sandboxes.container.PROGRAMS", ("nosuchengine",))


def test_doctor_says_what_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, confined: None
) -> None:
    monkeypatch.setattr(cli, "STARTS", 2)
    monkeypatch.setattr(cli, "COMMANDS", 2)
    assert cli.main(["doctor", "--json", "--root", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    found = {b["backend"]: b for b in json.loads(line)["backends"]}
    assert found["local (bwrap)"]["works"]
    assert found["local (bwrap)"]["start_ms"] > 0
    assert found["local (none)"]["detail"].startswith("no confinement")
    assert "local (bwrap)" in captured.err
    for name, variable in (("modal", "MODAL_TOKEN_ID"), ("e2b", "E2B_API_KEY"), ("daytona", "DAYTONA_API_KEY")):
        advice = found[name]["advice"]
        assert variable in advice or f"uniagent[{name}]" in advice


def test_doctor_gives_the_way_out_where_it_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "STARTS", 1)
    monkeypatch.setattr(cli, "COMMANDS", 1)
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr("uniagent.adapters.sandboxes.bwrap.find_bwrap", lambda path=None: str(fake))
    assert cli.main(["doctor", "--root", str(tmp_path)]) == 0, "isolation none still works"
    out = capsys.readouterr().out
    assert "local (bwrap)         no" in out
    assert "setting up uid map: Permission denied" in out


def test_reap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = NodeFolder(tmp_path)
    os.close(dead.lock)
    assert cli.main(["reap", "--root", str(tmp_path), "--json"]) == 0
    assert dead.path.name in json.loads(capsys.readouterr().out)["reaped"]
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]
