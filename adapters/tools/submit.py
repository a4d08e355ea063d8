"""``submit``: the model says that it is done, with an answer where the task wants one."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from uniagent.adapters.options import options
from uniagent.engine.config import key
from uniagent.engine.ports import Json, Observation, Sandbox, ToolSchema


@frozen
class SubmitOptions:
    """Keys of this tool in ``agent.tools``."""

    as_: str = key("submit", "the name the model sees")
    description: str = key("End the task. Call it once, when the work is done.", "what the model is told")
    argument: str | None = key(None, "name of a required text argument, such as answer; left out: none")


class Submit:
    """``engine.ports.Tool`` that ends the episode; its observation is the argument's text."""

    def __init__(self, sandbox: Sandbox, given: Mapping[str, Json]) -> None:
        self.options = options(SubmitOptions, given, "tool submit")
        names = [self.options.argument] if self.options.argument else []
        parameters = {
            "type": "object",
            "properties": {name: {"type": "string"} for name in names},
            "required": names,
            "additionalProperties": False,
        }
        self.schema = ToolSchema(self.options.as_, self.options.description, parameters)

    async def __call__(self, arguments: Mapping[str, Json]) -> Observation:
        answer = arguments[self.options.argument] if self.options.argument else ""
        return Observation(answer or "submitted", done=True)
