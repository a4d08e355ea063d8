"""Samples of shell_quest: short file jobs in a directory of 3 to 6 small files.

Train and held-out samples differ by their combination: the family, the file it is about and the set of files in the
directory (for a renaming: the two names); a hash of it decides. Sizes and line counts within a directory are distinct,
so that every job has one answer. ``backup/`` is there from the start; its ``.keep`` makes it part of the tree.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

from uniagent.engine.errors import UserError, nearest
from uniagent.tasks.shell_quest.words import FAMILIES, NAMES, PROMPTS, WORDS

SPLITS = ("train", "heldout")
HELD_OUT = 5  # one combination in five
KEEP = "backup/.keep"


def samples(split: str, seed: int, *, families: tuple[str, ...] = FAMILIES) -> Iterator[dict[str, Any]]:
    """An endless stream of sample rows, a function of its arguments. Training draws families at random; held-out
    samples go round the families, so that the first n hold equal numbers of each."""
    if split not in SPLITS:
        raise UserError(f"shell_quest has no split {split!r}: {nearest(split, SPLITS)}")
    for family in families:
        if family not in FAMILIES:
            raise UserError(f"shell_quest has no family {family!r}: {nearest(family, FAMILIES)}")
    draw = random.Random(f"shell_quest/{split}/{seed}")
    count = 0
    while True:
        yield sample(draw, split, draw.choice(families) if split == "train" else families[count % len(families)])
        count += 1


def sample(draw: random.Random, split: str, family: str) -> dict[str, Any]:
    """One row: the prompt, and in its metadata the files before and after the job is done."""
    while True:
        *names, other = draw.sample(NAMES, draw.randint(3, 6) + 1)
        name, word = draw.choice(names), draw.choice(WORDS)
        if held_out(family, name, other, names) != (split == "heldout"):
            continue
        files = contents(draw, names, word)
        if family in ("find", "delword"):
            files[name] = with_word(draw, files[name], word)
        by_size = sorted(names, key=lambda n: len(files[n]))
        if len({len(text) for text in files.values()}) < len(names):
            continue
        if family in ("largest", "smallest"):
            name = by_size[-1 if family == "largest" else 0]
        job = {"name": name, "other": other, "word": word}
        before = {**files, KEEP: ""}
        return {
            "name": "shell_quest",
            "prompt": [{"role": "user", "content": draw.choice(PROMPTS[family]).format(**job)}],
            "metadata": {"family": family, "job": job, "files": before, "expected": expected(family, job, before)},
        }


def held_out(family: str, name: str, other: str, names: list[str]) -> bool:
    """Which side a combination is on, by hash; stable across processes and versions."""
    about = {"copy": (name,), "count": (name,), "rename": (name, other)}.get(family, ())
    key = (family, *about) if family == "rename" else (family, *about, *sorted(names))
    return int(hashlib.md5(" ".join(key).encode(), usedforsecurity=False).hexdigest(), 16) % HELD_OUT == 0


def contents(draw: random.Random, names: list[str], word: str) -> dict[str, str]:
    """Lines of two or three words, none of them ``word``; every file has another number of lines."""
    others = [w for w in WORDS if w != word]
    counts = draw.sample(range(1, 10), len(names))
    return {
        name: "".join(" ".join(draw.choices(others, k=draw.randint(2, 3))) + "\n" for _ in range(count))
        for name, count in zip(names, counts, strict=True)
    }


def with_word(draw: random.Random, text: str, word: str) -> str:
    lines = text.splitlines()
    lines[draw.randrange(len(lines))] += f" {word}"
    return "\n".join(lines) + "\n"


def expected(family: str, job: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """The tree after the job, by path; ``answer.txt`` is compared without the white space around it."""
    name, after = job["name"], dict(before)
    match family:
        case "largest" | "smallest" | "delword":
            del after[name]
        case "copy":
            after[f"backup/{name}"] = after[name]
        case "count":
            after["answer.txt"] = str(after[name].count("\n"))
        case "find":
            after["answer.txt"] = name
        case "rename":
            after[job["other"]] = after.pop(name)
    return after
