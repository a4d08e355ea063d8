"""mini-swe-agent, headless: the chat dialect, not streamed; one tool, bash. It submits by a command of its own."""

from __future__ import annotations

from uniagent.adapters.agents.command import Harness
from uniagent.adapters.agents.recipe import Recipe

MINI_SWE_AGENT = Harness(
    Recipe(
        command=(
            "mini", "-m", "openai/{model}", "-t", "{prompt}", "-y", "--exit-immediately",
            "-o", "{home}/trajectory.json",
        ),
        env={
            "OPENAI_API_BASE": "{openai_base_url}",
            "OPENAI_API_KEY": "{api_key}",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        transcript="mini_trajectory",
        transcript_file="trajectory.json",
    ),
    "pip",
    ("mini-swe-agent==2.4.6",),
    ends_by="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)  # fmt: skip
