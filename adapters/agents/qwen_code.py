"""Qwen Code, headless: the chat dialect, streamed."""

from __future__ import annotations

from uniagent.adapters.agents.command import Harness
from uniagent.adapters.agents.recipe import Recipe

QWEN_CODE = Harness(
    Recipe(
        command=("qwen", "-p", "{prompt}", "--yolo", "--auth-type", "openai", "--output-format", "json"),
        env={"OPENAI_BASE_URL": "{openai_base_url}", "OPENAI_API_KEY": "{api_key}", "OPENAI_MODEL": "{model}"},
        transcript="claude_events",
    ),
    "npm",
    ("@qwen-code/qwen-code@0.24.4", "node@22.23.3"),  # it needs Node.js 22
)
