"""Installs what the tests marked ``harness`` run, pinned, from npm and PyPI: ``python tests/harness/install.py DIR``.

Each into a folder of its own in DIR, which UNIAGENT_HARNESSES then names. What is there in the right version stays.
"""

from __future__ import annotations

import sys
from pathlib import Path

from uniagent.adapters.agents.installs import harnesses, install, install_packages
from uniagent.engine.errors import UserError

EXTRA = {  # beside the named harnesses: the Claude Agent SDK, and the frameworks of examples/frameworks
    "claude_agent_sdk": ("claude-agent-sdk==0.2.189",),
    "frameworks": (
        "anthropic==2.14.0",
        "langchain==1.5.2",
        "langchain-openai==1.7.4",
        "openai==3.57.0",
        "openai-agents==0.24.0",
        "smolagents==1.26.0",
    ),
}


def main(folder: Path, wanted: list[str]) -> None:
    for name in wanted or [*harnesses(), *EXTRA]:
        if name in EXTRA:
            install_packages(folder / name, "pip", EXTRA[name])
        else:
            install(folder, name)
        print(f"{name} is in {folder / name}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python tests/harness/install.py DIR [NAME ...]")
    try:
        main(Path(sys.argv[1]).absolute(), sys.argv[2:])
    except UserError as problem:
        sys.exit(f"harnesses: {problem}")
