"""The task ``function``: any Python callable as its verifier.

``verifier.function`` names it as ``module:attribute``; other keys of the section are its keyword arguments. It gets an
``Attempt`` and gives a number, a truth value or a whole ``TaskResult``. A plain function runs in a thread, an async
one on the loop. ``metadata.files`` (path -> text) are written before the agent starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trio
from attrs import frozen

from uniagent.engine.errors import UserError, nearest
from uniagent.engine.ports import AgentResult, Json, ModelEndpoint, Providers, Sandbox, TaskResult
from uniagent.engine.registry import load
from uniagent.tasks.base import run_episode
from uniagent.tasks.config import TaskConfig
from uniagent.tasks.verify import last_words


@frozen
class Attempt:
    """What a verifier may look at: the agent's last words, all of its messages, the sample, and the sandbox (whose
    methods are async)."""

    answer: str
    transcript: Sequence[Mapping[str, Json]]
    prompt: Sequence[Mapping[str, Json]]
    metadata: Mapping[str, Json]
    sandbox: Sandbox


class Function:
    """Scores with ``verifier.function``."""

    def __init__(self, config: TaskConfig, providers: Providers) -> None:
        self.config, self.providers = config, providers
        options = dict(config.verifier.options)
        where = f"task {config.name!r}: verifier"
        name = options.pop("function", None)
        if not isinstance(name, str) or ":" not in name:
            raise UserError(f"{where}.function = {name!r}: name a callable as 'module:attribute'")
        function: Callable[..., Any] = load("tasks", name)
        known = list(inspect.signature(function).parameters.values())[1:]
        for option in options:
            if option not in [p.name for p in known] and not any(p.kind is p.VAR_KEYWORD for p in known):
                raise UserError(
                    f"{where}.{option}: {name} takes no such argument: {nearest(option, [p.name for p in known])}"
                )
        self.function = partial(function, **options)

    async def run(self, model: ModelEndpoint) -> TaskResult:
        return await run_episode(self.config, self.providers, model, setup=self.setup, verify=self.verify)

    async def setup(self, sandbox: Sandbox) -> None:
        for path, text in self.config.metadata.get("files", {}).items():
            await sandbox.write(sandbox.workdir / path, text.encode())

    async def verify(self, sandbox: Sandbox, acted: AgentResult) -> TaskResult:
        config = self.config
        attempt = Attempt(last_words(acted), acted.transcript, config.messages, config.metadata, sandbox)
        if inspect.iscoroutinefunction(self.function.func):
            found = await self.function(attempt)
        else:
            found = await trio.to_thread.run_sync(self.function, attempt, abandon_on_cancel=True)
        return found if isinstance(found, TaskResult) else TaskResult(float(found))
