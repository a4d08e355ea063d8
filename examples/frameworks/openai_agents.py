"""A shell agent on openai-agents: OpenAI Responses."""

import os
import subprocess
import sys

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def bash(command: str) -> str:
    """Run a command."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr or f"exit code {done.returncode}"


def main(task: str) -> None:
    set_tracing_disabled(True)  # it would send traces to its maker
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
    model = OpenAIResponsesModel(model=os.environ["MODEL"], openai_client=client)
    agent = Agent(name="shell", instructions="You work in a shell.", tools=[bash], model=model)
    print(Runner.run_sync(agent, task, max_turns=20).final_output)


main(sys.argv[1])
