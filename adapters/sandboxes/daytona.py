"""Sandboxes of Daytona, through its SDK (daytona >= 0.200). Not run against the service."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from uniagent.adapters.sandboxes.cloud import (
    LABEL,
    AsyncLine,
    CloudConfig,
    CloudOptions,
    CloudProvider,
    Received,
    require,
)
from uniagent.engine.ports import Json

SESSION = "uniagent"
SNAPSHOT_S = 600.0


class DaytonaProvider(CloudProvider):
    def __init__(self, given: Mapping[str, Json] | None = None) -> None:
        super().__init__("daytona", connect, given)


def connect(options: CloudOptions) -> DaytonaService:
    """Raises UserError without the SDK or credentials."""
    environment = os.environ
    token = environment.get("DAYTONA_JWT_TOKEN") and environment.get("DAYTONA_ORGANIZATION_ID")
    require(
        "daytona",
        bool(environment.get("DAYTONA_API_KEY") or token),
        "set DAYTONA_API_KEY, or DAYTONA_JWT_TOKEN and DAYTONA_ORGANIZATION_ID",
    )
    import daytona

    return DaytonaService(daytona)


class DaytonaService:
    """``cloud.Service``."""

    def __init__(self, sdk: Any) -> None:
        self.sdk = sdk
        self.refused: tuple[type[Exception], ...] = (sdk.DaytonaAuthenticationError, sdk.DaytonaValidationError)
        self.expected: tuple[type[Exception], ...] = (*self.refused, sdk.DaytonaError, OSError)
        self._client: Any = None

    @property
    def client(self) -> Any:
        """Made on the portal's thread, where its connections live."""
        if self._client is None:
            self._client = self.sdk.AsyncDaytona()
        return self._client

    async def start(self, config: CloudConfig, labels: Mapping[str, str]) -> Any:
        shared: dict[str, Any] = {
            "labels": dict(labels),
            "network_block_all": config.network == "none",
            "ttl_minutes": math.ceil(config.lifetime_s / 60),
            "auto_stop_interval": 0,
        }
        if config.image and not config.snapshot:
            memory = math.ceil(config.memory_mib / 1024) if config.memory_mib else None
            cpus = math.ceil(config.cpus) if config.cpus else None
            resources = self.sdk.Resources(cpu=cpus, memory=memory)
            params = self.sdk.CreateSandboxFromImageParams(image=config.image, resources=resources, **shared)
        else:
            params = self.sdk.CreateSandboxFromSnapshotParams(snapshot=config.snapshot, **shared)
        return await self.client.create(params, timeout=config.start_timeout_s)

    async def line(self, box: Any, command: str) -> AsyncLine:
        await box.process.create_session(SESSION)
        request = self.sdk.SessionExecuteRequest(command=command, run_async=True, suppress_input_echo=True)
        started = await box.process.execute_session_command(SESSION, request)
        return _Line(box, started.cmd_id, self.expected)

    async def stop(self, box: Any) -> None:
        await self.client.delete(box)

    async def snapshot(self, box: Any, name: str) -> str:
        await box.create_snapshot(name, timeout=SNAPSHOT_S)
        return name

    async def forget(self, snapshot: str) -> None:
        await self.client.snapshot.delete(snapshot)

    async def labelled(self) -> Sequence[tuple[str, Any]]:
        return [(box.labels[LABEL], box) async for box in self.client.list() if LABEL in (box.labels or {})]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


class _Line:
    def __init__(self, box: Any, command: str, problems: tuple[type[Exception], ...]) -> None:
        self.box, self.command, self.problems = box, command, problems
        self.received = Received()
        self.end = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            await self.box.process.get_session_command_logs_async(
                SESSION, self.command, self.received.put, lambda text: None
            )
        except self.problems:  # the sandbox ended, or the connection did: either way there is no more to read
            pass
        finally:
            self.received.end()

    async def send(self, text: str) -> None:
        await self.box.process.send_session_command_input(SESSION, self.command, text)

    async def receive(self) -> str:
        return await self.received.get()
