"""``stateful_shell``: commands in the sandbox's persistent shell.

The observation is what an agent would see in a terminal: the output, then ``exit code N`` where it is not 0. Both are
kept short for the model: head and tail, with the number of characters between. Knows nothing of models or rewards.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from attrs import frozen

from uniagent.adapters.options import options
from uniagent.adapters.tools.text import shorten
from uniagent.engine.config import key
from uniagent.engine.ports import Completed, Json, Observation, Sandbox, ToolSchema

DESCRIPTION = (
    "Run a bash command. The working directory, variables and background processes stay between calls; "
    "commands get no input. A long output is cut in the middle."
)


@frozen
class ShellOptions:
    """Keys of this tool in ``agent.tools``."""

    as_: str = key("shell", "the name the model sees")
    description: str = key(DESCRIPTION, "what the model is told")
    env: Mapping[str, str] = key(dict, "environment variables, exported before the first command")
    timeout_s: float = key(60.0, "of one command; then its processes are killed", at_least=0.01)
    max_chars: int = key(10000, "of an observation's output: the rest is cut out of its middle", at_least=16)
    empty: str = key("(no output)", "stands for an empty observation")


class StatefulShell:
    """``engine.ports.Tool``."""

    def __init__(self, sandbox: Sandbox, given: Mapping[str, Json]) -> None:
        self.sandbox = sandbox
        self.fresh = True  # the shell has run nothing of ours
        self.options = options(ShellOptions, given, "tool stateful_shell")
        command = {"type": "string", "description": "the bash command to run"}
        parameters = {
            "type": "object",
            "properties": {"command": command},
            "required": ["command"],
            "additionalProperties": False,
        }
        self.schema = ToolSchema(self.options.as_, self.options.description, parameters)

    async def __call__(self, arguments: Mapping[str, Json]) -> Observation:
        shell = await self.sandbox.shell()
        if self.fresh and (words := [shlex.quote(f"{name}={value}") for name, value in self.options.env.items()]):
            await shell.run("export " + " ".join(words), timeout_s=self.options.timeout_s)
        done = await shell.run(arguments["command"], timeout_s=self.options.timeout_s)
        self.fresh = done.restarted
        return Observation(self._text(done), problem="timeout" if done.timed_out else None)

    def _text(self, done: Completed) -> str:
        output = done.output.decode("utf-8", errors="replace").rstrip("\n")
        parts = [shorten(output, self.options.max_chars)]
        if done.timed_out:
            parts.append(f"the command was stopped: it ran longer than {self.options.timeout_s:g} s")
        elif done.code:
            parts.append(f"exit code {done.code}")
        if done.restarted:
            parts.append("the shell ended and was started again: its variables and working directory are lost")
        return "\n".join(part for part in parts if part) or self.options.empty
