"""A shell agent on the plain ``anthropic`` SDK: Anthropic Messages."""

import os
import subprocess
import sys

from anthropic import Anthropic

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"name": "bash", "description": "Run a command.", "input_schema": SCHEMA}


def bash(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr or f"exit code {done.returncode}"


def main(task: str) -> None:
    client = Anthropic(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
    messages = [{"role": "user", "content": task}]
    while True:
        answer = client.messages.create(model=os.environ["MODEL"], max_tokens=2048, messages=messages, tools=[TOOL])
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            print("".join(block.text for block in answer.content if block.type == "text"))
            return
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": bash(**c.input)} for c in calls]
        messages.append({"role": "user", "content": results})


main(sys.argv[1])
