"""A shell agent on langchain: OpenAI chat."""

import os
import subprocess
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def bash(command: str) -> str:
    """Run a command."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr or f"exit code {done.returncode}"


def main(task: str) -> None:
    model = ChatOpenAI(
        model=os.environ["MODEL"], base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], max_retries=5
    )
    agent = create_agent(model, tools=[bash], system_prompt="You work in a shell.")
    answer = agent.invoke({"messages": [{"role": "user", "content": task}]}, {"recursion_limit": 50})
    print(answer["messages"][-1].content)


main(sys.argv[1])
