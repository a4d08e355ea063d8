"""OpenCode, headless: the chat dialect, streamed, with a call beside the conversation that makes a title."""

from __future__ import annotations

import json

from uniagent.adapters.agents.command import Harness
from uniagent.adapters.agents.recipe import Recipe

CONFIG = {
    "autoupdate": False,
    "share": "disabled",
    "model": "uniagent/{model}",
    "permission": "allow",
    "provider": {
        "uniagent": {
            "npm": "@ai-sdk/openai-compatible",  # @ai-sdk/anthropic and @ai-sdk/openai are the other two dialects
            "name": "uniagent",
            "options": {"baseURL": "{openai_base_url}", "apiKey": "{api_key}"},
            "models": {"{model}": {"name": "{model}", "limit": {"context": 131072, "output": 8192}}},
        }
    },
}

OPENCODE = Harness(
    Recipe(
        command=("opencode", "run", "--format", "json", "{prompt}"),
        env={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        files={".config/opencode/opencode.json": json.dumps(CONFIG, indent=2)},
        transcript="opencode_events",
    ),
    "npm",
    ("opencode-ai@1.18.33",),
)
