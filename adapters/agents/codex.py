"""Codex, headless: the Responses dialect, streamed. Its prompt comes on stdin, its conversation as JSON lines."""

from __future__ import annotations

from uniagent.adapters.agents.command import Harness
from uniagent.adapters.agents.recipe import Recipe

CONFIG = """\
model = "{model}"
model_provider = "uniagent"

[model_providers.uniagent]
name = "uniagent"
base_url = "{openai_base_url}"
env_key = "UNIAGENT_API_KEY"
wire_api = "responses"
"""

CODEX = Harness(
    Recipe(
        command=(
            "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", "-",
        ),
        stdin="{prompt}",
        env={"UNIAGENT_API_KEY": "{api_key}"},
        files={".codex/config.toml": CONFIG},
        transcript="codex_events",
    ),
    "npm",
    ("@openai/codex@0.171.0",),
)  # fmt: skip
