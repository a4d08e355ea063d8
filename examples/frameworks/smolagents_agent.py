"""A shell agent on smolagents: OpenAI chat. It ends with the tool ``final_answer``."""

import os
import subprocess
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def bash(command: str) -> str:
    """Run a command.

    Args:
        command: what to run
    """
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr or f"exit code {done.returncode}"


def main(task: str) -> None:
    model = OpenAIModel(model_id=os.environ["MODEL"], api_base=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
    agent = ToolCallingAgent(tools=[bash], model=model, max_steps=20, verbosity_level=0)
    print(agent.run(task))


main(sys.argv[1])
