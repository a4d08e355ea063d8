"""Episodes of shell_quest recorded with a scripted player in place of the model.

A recorded episode takes the path of any other (agent, tool, sandbox, verifier), so what it shows is what the model
will see.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio
from attrs import frozen

from uniagent.adapters.agents.chat import as_chat
from uniagent.engine.messages import Call, ModelCall, Reply, Usage
from uniagent.engine.ports import Json, ModelEndpoint, Providers, TaskResult
from uniagent.tasks.config import ENDPOINT, TaskConfigResolver
from uniagent.tasks.shell_quest.players import Player, Turn


@frozen
class Demonstration:
    """A whole conversation in chat form, and what the task made of it."""

    messages: Sequence[Mapping[str, Json]]
    result: TaskResult


async def record(
    rows: Sequence[Mapping[str, Any]],
    player: Callable[[int], Player],
    *,
    resolver: TaskConfigResolver,
    providers: Providers,
    at_once: int = 32,
) -> list[Demonstration]:
    """Play every row; ``player(i)`` plays the i-th. The tool is the first of the Task Config."""
    done: dict[int, Demonstration] = {}
    places = trio.CapacityLimiter(at_once)

    async def play(number: int, row: Mapping[str, Any]) -> None:
        async with places:
            stage = _Stage(row["metadata"], player(number))
            task = resolver.resolve(row, dict.fromkeys(ENDPOINT, "scripted")).build(providers)
            result = await task.run(ModelEndpoint("scripted", "scripted", "scripted", complete=stage.complete))
            done[number] = Demonstration(stage.messages, result)

    async with trio.open_nursery() as nursery:
        for number, row in enumerate(rows):
            nursery.start_soon(play, number, row)
    return [done[number] for number in range(len(rows))]


class _Stage:
    """A player behind the model's endpoint; keeps the last request with its answer."""

    def __init__(self, metadata: Mapping[str, Any], player: Player) -> None:
        self.family, self.job, self.player = metadata["family"], metadata["job"], player
        self.messages: list[dict[str, Json]] = []

    async def complete(self, call: ModelCall) -> Reply:
        number = sum(m.role == "assistant" for m in call.messages)
        last = call.messages[-1]
        seen = tuple(last.text.splitlines()) if last.role == "tool" else ()
        command = self.player(Turn(self.family, **self.job, number=number, seen=seen))
        if command is None:
            reply = Reply(f"turn_{number}", "Done.", "", (), "stop", Usage(0, 0))
        else:
            wanted = Call(f"call_{number}", "shell", json.dumps({"command": command}))
            reply = Reply(f"turn_{number}", "", "", (wanted,), "tool_calls", Usage(0, 0))
        self.messages = [as_chat(m) for m in (*call.messages, reply.message())]
        return reply
