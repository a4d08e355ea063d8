"""Claude Code, headless: the Anthropic dialect, streamed. Its prompt comes on stdin, its conversation as JSON lines."""

from __future__ import annotations

from uniagent.adapters.agents.command import Harness
from uniagent.adapters.agents.recipe import Recipe

CLAUDE_CODE = Harness(
    Recipe(
        command=(
            "claude", "-p", "--model", "{model}", "--output-format", "stream-json", "--verbose",
            "--dangerously-skip-permissions",
        ),
        stdin="{prompt}",
        env={
            "ANTHROPIC_BASE_URL": "{base_url}",
            "ANTHROPIC_API_KEY": "{api_key}",
            "IS_SANDBOX": "1",  # it may run as root
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # the prefix of a conversation stays as it was: no moving betas, no header that counts, no hidden thinking
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "MAX_THINKING_TOKENS": "0",
            "DISABLE_PROMPT_CACHING": "1",
        },
        transcript="claude_events",
    ),
    "npm",
    ("@anthropic-ai/claude-code@2.1.332",),
)  # fmt: skip
