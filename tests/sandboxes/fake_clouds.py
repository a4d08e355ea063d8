"""Stands for the SDKs of cloud sandboxes. Every call is bound to the signature of the installed SDK's own function
first, so a wrong keyword fails here; a machine is a /tmp of its own in bubblewrap, its programs are processes here."""

from __future__ import annotations

import asyncio
import functools
import inspect
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from uniagent.adapters.sandboxes.bwrap import find_bwrap


def like(real: Callable[..., Any], *, method: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function refuses what the real one does not take. ``method``: the real one's self is not given."""
    signature = inspect.signature(real)

    def wrap(fake: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fake)
        def call(*words: Any, **named: Any) -> Any:
            signature.bind(*([None] if method else []), *words, **named)
            return fake(*words, **named)

        return call

    return wrap


class Cloud:
    """The service: its machines and snapshots, as folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machines: dict[str, Machine] = {}
        self.snapshots: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.count = 0

    def start(self, labels: dict[str, str], snapshot: str | None, **asked: Any) -> Machine:
        self.count += 1
        machine = Machine(f"m{self.count}", self.folder / f"m{self.count}", labels)
        self.asked.append({**asked, "snapshot": snapshot})
        if snapshot:
            shutil.copytree(self.folder / snapshot, machine.folder)
        else:
            machine.folder.mkdir()
        self.machines[machine.name] = machine
        return machine

    async def stop(self, name: str) -> None:
        await self.machines.pop(name).kill()

    def keep(self, machine: Machine) -> str:
        name = f"kept-{len(self.snapshots)}"
        shutil.copytree(machine.folder, self.folder / name)
        self.snapshots.append(name)
        return name


class Machine:
    def __init__(self, name: str, folder: Path, labels: dict[str, str]) -> None:
        self.name, self.folder, self.labels = name, folder, labels
        self.processes: list[asyncio.subprocess.Process] = []

    async def run(self, command: str) -> asyncio.subprocess.Process:
        words = ["--dev-bind", "/", "/", "--proc", "/proc", "--bind", str(self.folder), "/tmp", "--unshare-pid"]
        process = await asyncio.create_subprocess_exec(
            find_bwrap(), *words, "--die-with-parent", "--", "bash", "-c", command,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.processes.append(process)
        return process

    async def kill(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
            assert process.stdin is not None
            process.stdin.close()


async def pieces(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    assert process.stdout is not None
    while data := await process.stdout.read(1 << 16):
        yield data.decode()


async def follow(process: asyncio.subprocess.Process, tell: Callable[[str], None]) -> None:
    async for text in pieces(process):
        tell(text)


async def feed(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text.encode())
    await process.stdin.drain()


# ---------------------------------------------------------------- Modal


def aio(real: Any, fake: Callable[..., Any], *, method: bool = False) -> SimpleNamespace:
    """A function of the SDK as it is called from asyncio."""
    return SimpleNamespace(aio=like(real.aio, method=method)(fake))


def fake_modal(cloud: Cloud) -> Any:
    import modal
    from modal.container_process import ContainerProcess
    from modal.io_streams import StreamReader, StreamWriter

    assert hasattr(ContainerProcess, "stdin")
    assert hasattr(ContainerProcess, "stdout")
    assert hasattr(StreamReader, "__aiter__")
    assert hasattr(StreamReader, "__anext__")
    assert hasattr(modal.Image, "object_id")
    assert hasattr(modal.App, "app_id")

    def process_of(process: asyncio.subprocess.Process) -> Any:
        buffer: list[str] = []

        async def drain() -> None:
            text = "".join(buffer)
            buffer.clear()
            await feed(process, text)

        stdin = SimpleNamespace(
            write=like(StreamWriter.write, method=True)(buffer.append),
            drain=aio(StreamWriter.drain, drain, method=True),
        )
        return SimpleNamespace(stdin=stdin, stdout=pieces(process))

    def box_of(machine: Machine) -> Any:
        async def execute(*words: str, **given: Any) -> Any:
            assert words[:2] == ("sh", "-c")
            return process_of(await machine.run(words[2]))

        async def terminate(*, wait: bool = False) -> None:
            await cloud.stop(machine.name)

        async def keep(timeout: int, *, ttl: int) -> Any:
            return SimpleNamespace(object_id=cloud.keep(machine))

        async def tags() -> dict[str, str]:
            return machine.labels

        return SimpleNamespace(
            exec=aio(modal.Sandbox.exec, execute, method=True),
            terminate=aio(modal.Sandbox.terminate, terminate, method=True),
            snapshot_filesystem=aio(modal.Sandbox.snapshot_filesystem, keep, method=True),
            get_tags=aio(modal.Sandbox.get_tags, tags, method=True),
        )

    async def create(*words: str, app: Any, image: Any, tags: dict[str, str], **given: Any) -> Any:
        assert (words, app.app_id) == (("sleep", "infinity"), "ap-1")
        return box_of(cloud.start(tags, image.get("snapshot"), image=image.get("image"), **given))

    async def every(*, app_id: str) -> AsyncIterator[Any]:
        for machine in list(cloud.machines.values()):
            yield box_of(machine)

    async def lookup(name: str, *, create_if_missing: bool) -> Any:
        return SimpleNamespace(app_id="ap-1", name=name)

    images = SimpleNamespace(
        from_registry=like(modal.Image.from_registry)(lambda tag: {"image": tag}),
        from_id=like(modal.Image.from_id, method=True)(lambda image: {"snapshot": image}),
        debian_slim=like(modal.Image.debian_slim)(dict),
    )
    return SimpleNamespace(
        App=SimpleNamespace(lookup=aio(modal.App.lookup, lookup)),
        Image=images,
        Sandbox=SimpleNamespace(
            create=aio(modal.Sandbox.create, create),
            list=aio(modal.Sandbox.list, every),
        ),
        exception=modal.exception,
    )


# ---------------------------------------------------------------- E2B


def fake_e2b(cloud: Cloud) -> Any:
    import e2b
    from e2b.sandbox_async.commands.command import Commands
    from e2b.sandbox_async.commands.command_handle import AsyncCommandHandle
    from e2b.sandbox_async.paginator import AsyncSandboxPaginator

    real = e2b.AsyncSandbox
    assert {"sandbox_id", "metadata"} <= set(e2b.SandboxInfo.__dataclass_fields__)
    assert "snapshot_id" in e2b.SnapshotInfo.__dataclass_fields__
    assert hasattr(AsyncSandboxPaginator, "has_next")
    assert hasattr(AsyncCommandHandle, "pid")
    known: dict[int, asyncio.subprocess.Process] = {}

    async def create(
        *, template: str | None, timeout: int, metadata: dict[str, str], allow_internet_access: bool
    ) -> Any:
        snapshot = template if template in cloud.snapshots else None
        machine = cloud.start(metadata, snapshot, template=template, internet=allow_internet_access, timeout=timeout)

        async def run(command: str, *, on_stdout: Callable[[str], None], **given: Any) -> Any:
            assert given["background"]
            assert given["stdin"]
            process = await machine.run(command)
            known[process.pid] = process
            task = asyncio.create_task(follow(process, on_stdout))

            async def wait() -> None:
                await task
                raise e2b.CommandExitException(stdout=None, stderr=None, exit_code=137, error=None)

            return SimpleNamespace(pid=process.pid, wait=like(AsyncCommandHandle.wait, method=True)(wait))

        async def send(pid: int, text: str) -> None:
            await feed(known[pid], text)

        async def kill() -> bool:
            await cloud.stop(machine.name)
            return True

        async def keep() -> Any:
            return e2b.SnapshotInfo(snapshot_id=cloud.keep(machine), names=[])

        return SimpleNamespace(
            commands=SimpleNamespace(
                run=like(Commands.run, method=True)(run), send_stdin=like(Commands.send_stdin, method=True)(send)
            ),
            kill=like(real.kill, method=True)(kill),
            create_snapshot=like(real.create_snapshot, method=True)(keep),
        )

    class Pages:
        has_next = True

        async def next_items(self) -> list[Any]:
            self.has_next = False
            return [SimpleNamespace(sandbox_id=m.name, metadata=m.labels) for m in cloud.machines.values()]

    async def kill_by_id(sandbox: str) -> bool:
        await cloud.stop(sandbox)
        return True

    async def forget(snapshot: str) -> bool:
        cloud.snapshots.remove(snapshot)
        return True

    return SimpleNamespace(
        AsyncSandbox=SimpleNamespace(
            create=like(real.create)(create),
            list=like(real.list)(Pages),
            kill=like(real._cls_kill)(kill_by_id),  # what the SDK calls for the class
            delete_snapshot=like(real.delete_snapshot)(forget),
        ),
        AuthenticationException=e2b.AuthenticationException,
        InvalidArgumentException=e2b.InvalidArgumentException,
        SandboxException=e2b.SandboxException,
    )


# ---------------------------------------------------------------- Daytona


def fake_daytona(cloud: Cloud) -> Any:
    import daytona
    from daytona._async.process import AsyncProcess
    from daytona._async.snapshot import AsyncSnapshotService

    real, client = daytona.AsyncSandbox, daytona.AsyncDaytona

    def box_of(machine: Machine) -> Any:
        known: dict[str, asyncio.subprocess.Process] = {}

        async def create_session(name: str) -> None:
            assert name == "uniagent"

        async def execute(name: str, request: Any) -> Any:
            assert request.run_async
            known["cmd-1"] = await machine.run(request.command)
            return SimpleNamespace(cmd_id="cmd-1")

        async def logs(name: str, command: str, out: Callable[[str], None], err: Callable[[str], None]) -> None:
            await follow(known[command], out)

        async def send(name: str, command: str, text: str) -> None:
            await feed(known[command], text)

        async def keep(name: str, timeout: float) -> None:
            shutil.copytree(machine.folder, cloud.folder / name)
            cloud.snapshots.append(name)

        process = SimpleNamespace(
            create_session=like(AsyncProcess.create_session, method=True)(create_session),
            execute_session_command=like(AsyncProcess.execute_session_command, method=True)(execute),
            get_session_command_logs_async=like(AsyncProcess.get_session_command_logs_async, method=True)(logs),
            send_session_command_input=like(AsyncProcess.send_session_command_input, method=True)(send),
        )
        keep_snapshot = like(real.create_snapshot, method=True)(keep)
        return SimpleNamespace(name=machine.name, labels=machine.labels, process=process, create_snapshot=keep_snapshot)

    async def create(params: Any, *, timeout: float) -> Any:
        internet = not params.network_block_all
        image = getattr(params, "image", None)
        return box_of(
            cloud.start(
                params.labels, getattr(params, "snapshot", None), image=image, internet=internet, ttl=params.ttl_minutes
            )
        )

    async def delete(box: Any) -> None:
        await cloud.stop(box.name)

    async def every() -> AsyncIterator[Any]:
        for machine in list(cloud.machines.values()):
            yield box_of(machine)

    async def forget(name: str) -> None:
        cloud.snapshots.remove(name)

    async def close() -> None:
        pass

    made = SimpleNamespace(
        create=like(client.create, method=True)(create),
        delete=like(client.delete, method=True)(delete),
        list=like(client.list, method=True)(every),
        close=like(client.close, method=True)(close),
        snapshot=SimpleNamespace(delete=like(AsyncSnapshotService.delete, method=True)(forget)),
    )
    return SimpleNamespace(
        AsyncDaytona=like(client)(lambda: made),
        CreateSandboxFromImageParams=daytona.CreateSandboxFromImageParams,
        CreateSandboxFromSnapshotParams=daytona.CreateSandboxFromSnapshotParams,
        Resources=daytona.Resources,
        SessionExecuteRequest=daytona.SessionExecuteRequest,
        DaytonaAuthenticationError=daytona.DaytonaAuthenticationError,
        DaytonaValidationError=daytona.DaytonaValidationError,
        DaytonaError=daytona.DaytonaError,
    )
