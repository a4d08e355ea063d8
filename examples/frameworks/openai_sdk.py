"""A shell agent on the plain ``openai`` SDK: OpenAI chat, streamed."""

import json
import os
import subprocess
import sys

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}}


def bash(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr or f"exit code {done.returncode}"


def main(task: str) -> None:
    client = OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
    messages = [{"role": "user", "content": task}]
    while True:
        with client.chat.completions.stream(model=os.environ["MODEL"], messages=messages, tools=[TOOL]) as stream:
            answer = stream.get_final_completion().choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            print(answer.content)
            return
        for call in answer.tool_calls:
            result = bash(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


main(sys.argv[1])
