"""The sandbox providers of a node: opened when first used, kept for all sessions, closed with the node.

Invariants: a provider is opened once; it is closed after every sandbox of it. Knows no backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import trio
from attrs import define, field, frozen

from uniagent.engine.ports import Json, Sandbox, SandboxProvider
from uniagent.engine.registry import load


@define(eq=False)
class NodeProviders:
    """``options`` are the run's, by provider: they lie under every task's sandbox section."""

    nursery: trio.Nursery
    options: Mapping[str, Mapping[str, Json]]
    _opened: dict[str, SandboxProvider] = field(factory=dict)
    _opening: trio.Lock = field(factory=trio.Lock)

    def sandbox(self, name: str) -> SandboxProvider:
        return _Deferred(self, name)

    def sandbox_options(self, name: str) -> Mapping[str, Json]:
        return self.options.get(name, {})

    async def opened(self, name: str) -> SandboxProvider:
        """The provider, opened now if it is the first time."""
        async with self._opening:
            if name not in self._opened:
                self._opened[name] = await self.nursery.start(_keep, name, self.sandbox_options(name))
        return self._opened[name]


@frozen
class _Deferred:
    """Stands for a provider until a sandbox is wanted."""

    node: NodeProviders
    name: str

    def open(self, config: Mapping[str, Json]) -> AbstractAsyncContextManager[Sandbox]:
        return self._open(config)

    @asynccontextmanager
    async def _open(self, config: Mapping[str, Json]) -> AsyncIterator[Sandbox]:
        provider = await self.node.opened(self.name)
        async with provider.open(config) as sandbox:
            yield sandbox


async def _keep(
    name: str, options: Mapping[str, Json], *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED
) -> None:
    async with load("sandboxes", name)(options) as provider:
        task_status.started(provider)
        await trio.sleep_forever()
