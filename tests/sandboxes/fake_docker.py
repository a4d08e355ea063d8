"""Stands for docker in the tests: containers are folders under $FAKE_DOCKER, programs run in bubblewrap on the host's
root with the container's folder as /mnt/work. It knows the words that ContainerProvider uses and refuses all others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

ROOT = Path(os.environ["FAKE_DOCKER"])


def take(words: list[str], flags: dict[str, bool]) -> tuple[dict[str, list[str]], list[str]]:
    """Options (name -> values) before the first plain word, and the rest. ``flags``: whether it takes a value."""
    found: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        name = words.pop(0)
        if name not in flags:
            sys.exit(f"unknown flag: {name}")
        found.setdefault(name, []).append(words.pop(0) if flags[name] else "")
    return found, words


def run(words: list[str]) -> None:
    valued = (
        "--label",
        "--network",
        "--pull",
        "--user",
        "--memory",
        "--pids-limit",
        "--cpus",
        "-e",
        "--entrypoint",
    )
    given, rest = take(words, {**dict.fromkeys(valued, True), "-d": False, "--rm": False, "--init": False})
    if rest[0].startswith("localhost/uniagent-") and rest[0] not in kept():
        sys.exit(f"no such image: {rest[0]}")
    if rest[0] == "nosuchimage":
        sys.exit("Unable to find image 'nosuchimage:latest' locally")
    name = f"c{os.getpid()}"
    if rest[0] in kept():
        shutil.copytree(ROOT.parent / "images" / kept()[rest[0]], ROOT / name)
    else:
        (ROOT / name / "work").mkdir(parents=True)
    (ROOT / name / "given").write_text(json.dumps({"options": given, "image": rest[0], "command": rest[1:]}))
    print(name)


def execute(words: list[str]) -> None:
    given, (name, *argv) = take(words, {"-i": False, "-e": True, "-w": True, "-u": True})
    record = json.loads((ROOT / name / "given").read_text())
    env = [pair.partition("=") for pair in (*record["options"].get("-e", []), *given.get("-e", []))]
    options = ["--dev-bind", "/", "/", "--tmpfs", "/mnt", "--bind", str(ROOT / name / "work"), "/mnt/work"]
    options += ["--chdir", given.get("-w", ["/"])[0], "--setenv", "FAKE_CONTAINER", str(ROOT / name)]
    for key, _, value in env:
        options += ["--setenv", key, value]
    bwrap = os.environ["FAKE_BWRAP"]
    os.execv(bwrap, [bwrap, *options, "--", *argv])


def remove(words: list[str]) -> None:
    _, names = take(words, {"-f": False, "-v": False})
    for name in names:
        mark = f"FAKE_CONTAINER={ROOT / name}".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in entry.read_bytes().split(b"\0"):
                    os.kill(int(entry.parent.name), signal.SIGKILL)
            except OSError:
                continue
        shutil.rmtree(ROOT / name)


def show(words: list[str]) -> None:
    for folder in sorted(ROOT.iterdir()):
        record = json.loads((folder / "given").read_text())
        print(folder.name, ",".join(record["options"].get("--label", [])))


def kept() -> dict[str, str]:
    """Images that were committed: name -> folder."""
    index = ROOT.parent / "images/index"
    return json.loads(index.read_text()) if index.exists() else {}


def commit(words: list[str]) -> None:
    _, (container, image) = take(words, {"--change": True})
    images = ROOT.parent / "images"
    folder = f"i{len(kept())}"
    shutil.copytree(ROOT / container, images / folder)
    (images / "index").write_text(json.dumps({**kept(), image: folder}))
    print("sha256:0")


def images(words: list[str]) -> None:
    given, _ = take(words, {"--filter": True, "--format": True})
    assert given["--filter"] == ["label=uniagent.node"]
    print("\n".join(kept()))


def forget(words: list[str]) -> None:
    _, names = take(words, {"-f": False})
    (ROOT.parent / "images/index").write_text(json.dumps({k: v for k, v in kept().items() if k not in names}))


def inspect(words: list[str]) -> None:
    print(os.getppid())  # on the host's network, as every fake container is


{
    "commit": commit,
    "images": images,
    "rmi": forget,
    "inspect": inspect,
    "run": run,
    "exec": execute,
    "rm": remove,
    "ps": show,
}[sys.argv[1]](sys.argv[2:])
