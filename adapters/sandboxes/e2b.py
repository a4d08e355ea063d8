"""Sandboxes of E2B, through its SDK (e2b >= 2.60). Not run against the service. CPU and memory are the template's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from uniagent.adapters.sandboxes.cloud import (
    LABEL,
    AsyncLine,
    CloudConfig,
    CloudOptions,
    CloudProvider,
    Received,
    require,
)
from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json


class E2bProvider(CloudProvider):
    def __init__(self, given: Mapping[str, Json] | None = None) -> None:
        super().__init__("e2b", connect, given)


def connect(options: CloudOptions) -> E2bService:
    """Raises UserError without the SDK or credentials."""
    require("e2b", bool(os.environ.get("E2B_API_KEY")), "set E2B_API_KEY")
    import e2b

    return E2bService(e2b)


class E2bService:
    """``cloud.Service``."""

    def __init__(self, sdk: Any) -> None:
        self.sdk = sdk
        self.refused: tuple[type[Exception], ...] = (sdk.AuthenticationException, sdk.InvalidArgumentException)
        self.expected: tuple[type[Exception], ...] = (*self.refused, sdk.SandboxException, httpx.HTTPError, OSError)

    async def start(self, config: CloudConfig, labels: Mapping[str, str]) -> Any:
        if config.cpus or config.memory_mib:
            raise UserError("the sandbox section (provider e2b): cpus and memory_mib are set by the template (image)")
        return await self.sdk.AsyncSandbox.create(
            template=config.snapshot or config.image or None,
            timeout=config.lifetime_s,
            metadata=dict(labels),
            allow_internet_access=config.network == "internet",
        )

    async def line(self, box: Any, command: str) -> AsyncLine:
        received = Received()
        handle = await box.commands.run(
            command, background=True, stdin=True, timeout=0, on_stdout=received.put, retain_output=False
        )
        return _Line(box, handle, received, self.expected)

    async def stop(self, box: Any) -> None:
        if isinstance(box, str):
            await self.sdk.AsyncSandbox.kill(box)
        else:
            await box.kill()

    async def snapshot(self, box: Any, name: str) -> str:
        return str((await box.create_snapshot()).snapshot_id)

    async def forget(self, snapshot: str) -> None:
        await self.sdk.AsyncSandbox.delete_snapshot(snapshot)

    async def labelled(self) -> Sequence[tuple[str, Any]]:
        pages = self.sdk.AsyncSandbox.list()
        found: list[tuple[str, Any]] = []
        while pages.has_next:
            found += [(i.metadata[LABEL], i.sandbox_id) for i in await pages.next_items() if LABEL in i.metadata]
        return found

    async def close(self) -> None:
        """Each sandbox has connections of its own."""


class _Line:
    def __init__(self, box: Any, handle: Any, received: Received, problems: tuple[type[Exception], ...]) -> None:
        self.box, self.handle, self.received, self.problems = box, handle, received, problems
        self.end = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        try:
            await self.handle.wait()
        except self.problems:  # it failed or the sandbox ended: either way there is no more to read
            pass
        finally:
            self.received.end()

    async def send(self, text: str) -> None:
        await self.box.commands.send_stdin(self.handle.pid, text)

    async def receive(self) -> str:
        return await self.received.get()
