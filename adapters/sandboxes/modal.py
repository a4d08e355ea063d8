"""Sandboxes of Modal, through its SDK (modal >= 1.1). Not run against the service."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from uniagent.adapters.sandboxes.cloud import LABEL, AsyncLine, CloudConfig, CloudOptions, CloudProvider, require
from uniagent.engine.ports import Json

STDIN_PIECE = 1 << 20  # the SDK buffers at most 2 MiB
SNAPSHOT_S = 600
SNAPSHOT_KEPT_S = 7 * 86400


class ModalProvider(CloudProvider):
    def __init__(self, given: Mapping[str, Json] | None = None) -> None:
        super().__init__("modal", connect, given)


def connect(options: CloudOptions) -> ModalService:
    """Raises UserError without the SDK or credentials."""
    config = Path(os.environ.get("MODAL_CONFIG_PATH") or "~/.modal.toml").expanduser()
    require(
        "modal",
        bool(os.environ.get("MODAL_TOKEN_ID") and os.environ.get("MODAL_TOKEN_SECRET")) or config.exists(),
        "set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or run `modal token new`",
    )
    import modal

    return ModalService(modal, options.app)


class ModalService:
    """``cloud.Service``."""

    def __init__(self, sdk: Any, app: str) -> None:
        self.sdk, self.app_name = sdk, app
        self.refused: tuple[type[Exception], ...] = (sdk.exception.AuthError, sdk.exception.InvalidError)
        self.expected: tuple[type[Exception], ...] = (*self.refused, sdk.exception.Error, OSError)
        self.app: Any = None

    async def _app(self) -> Any:
        if self.app is None:
            self.app = await self.sdk.App.lookup.aio(self.app_name, create_if_missing=True)
        return self.app

    async def start(self, config: CloudConfig, labels: Mapping[str, str]) -> Any:
        """With no image, the SDK's own Debian with Python."""
        images = self.sdk.Image
        if config.snapshot:
            image = images.from_id(config.snapshot)
        else:
            image = images.from_registry(config.image) if config.image else images.debian_slim()
        return await self.sdk.Sandbox.create.aio(
            "sleep",
            "infinity",
            app=await self._app(),
            image=image,
            tags=dict(labels),
            timeout=config.lifetime_s,
            cpu=config.cpus,
            memory=config.memory_mib,
            block_network=config.network == "none",
        )

    async def line(self, box: Any, command: str) -> AsyncLine:
        return _Line(await box.exec.aio("sh", "-c", command, text=True))

    async def stop(self, box: Any) -> None:
        await box.terminate.aio()

    async def snapshot(self, box: Any, name: str) -> str:
        image = await box.snapshot_filesystem.aio(SNAPSHOT_S, ttl=SNAPSHOT_KEPT_S)
        return str(image.object_id)

    async def forget(self, snapshot: str) -> None:
        """The service removes it at the end of its time to live."""

    async def labelled(self) -> Sequence[tuple[str, Any]]:
        app = await self._app()
        found = []
        async for box in self.sdk.Sandbox.list.aio(app_id=app.app_id):
            tags = await box.get_tags.aio()
            if LABEL in tags:
                found.append((tags[LABEL], box))
        return found

    async def close(self) -> None:
        """The SDK's client is the process's."""


class _Line:
    def __init__(self, process: Any) -> None:
        self.process, self.output = process, process.stdout.__aiter__()

    async def send(self, text: str) -> None:
        for start in range(0, len(text), STDIN_PIECE):
            self.process.stdin.write(text[start : start + STDIN_PIECE])
            await self.process.stdin.drain.aio()

    async def receive(self) -> str:
        return str(await anext(self.output, ""))
