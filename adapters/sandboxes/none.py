"""No sandbox: for tasks whose agent only talks. Costs nothing; every use of it is the user's mistake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, NoReturn

from uniagent.engine.errors import UserError
from uniagent.engine.ports import Json, ModelEndpoint, Sandbox


class NoneProvider:
    """``SandboxProvider`` named none."""

    def __init__(self, options: Mapping[str, Json] | None = None) -> None:
        if options:
            raise UserError(f"[sandbox.options.none] takes no key, but {sorted(options)} are set")

    async def __aenter__(self) -> NoneProvider:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @asynccontextmanager
    async def open(self, config: Mapping[str, Json]) -> AsyncIterator[Sandbox]:
        if config:
            raise UserError(f"sandbox.provider = 'none' takes no other key, but {sorted(config)} are set")
        yield NoSandbox()


class NoSandbox:
    """Refuses everything, with a sentence."""

    workdir = PurePosixPath("/")

    async def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise UserError(
            "this task has sandbox.provider = 'none', but a tool, its setup or its verifier needs a sandbox; "
            "set sandbox.provider = 'local'"
        )

    exec = shell = upload = download = write = read = files = _refuse

    def reach(self, model: ModelEndpoint) -> AbstractAsyncContextManager[ModelEndpoint]:
        return nullcontext(model)
