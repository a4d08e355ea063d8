"""A sandbox made of channels: commands, and files as tar streams."""

from __future__ import annotations

import errno
import io
import os
import posixpath
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path, PurePosixPath

import trio

from uniagent.adapters.sandboxes.channels import Channel, ChannelShell, Keeper, Opener, run_program
from uniagent.adapters.sandboxes.hostfiles import LARGEST
from uniagent.engine.errors import InfraError
from uniagent.engine.ports import Completed, ModelEndpoint

TREE_BYTES = 1 << 30  # of a whole tree that is read
FILES_S = 600.0
# no link on the way, the last step included
PLAIN = (
    'P=$(cd -- "$(dirname -- "$1")" && pwd -P); [ "${P%/}/$(basename -- "$1")" = "$1" ] && [ ! -L "$1" ] || exit 40; '
)
READ = '[ -d "$1" ] && exit 21; [ -e "$1" ] || exit 2; ' + PLAIN + 'exec head -c "$2" -- "$1"'
WRITE = 'mkdir -p -- "$(dirname -- "$1")" || exit 1; ' + PLAIN + 'exec cat > "$1"'
PACK = (
    '[ -e "$1" ] || exit 2; ' + PLAIN + 'if [ -d "$1" ]; then exec tar -cf - -C "$1" .; fi; '
    'exec tar -cf - -C "$(dirname -- "$1")" -- "$(basename -- "$1")"'
)
UNPACK = 'mkdir -p -- "$1" && exec tar -xf - -C "$1"'
KINDS = {tarfile.SYMTYPE: b"<symlink>", tarfile.FIFOTYPE: b"<fifo>", tarfile.CHRTYPE: b"<device>",
         tarfile.BLKTYPE: b"<device>"}  # fmt: skip
ERRORS = {2: errno.ENOENT, 21: errno.EISDIR, 40: errno.ELOOP}


Reach = Callable[[ModelEndpoint], AbstractAsyncContextManager[ModelEndpoint]]


class ChannelSandbox:
    """``engine.ports.Sandbox`` over an ``Opener``. File methods raise OSError as the calls of the same name do.
    ``private``: all that can be written to inside is this sandbox's own."""

    def __init__(self, opener: Opener, workdir: PurePosixPath, output_bytes: int, reach: Reach = nullcontext) -> None:
        """``reach`` is the port's method of that name: how programs inside get to an endpoint."""
        self.opener, self.workdir, self.output_bytes, self.reach = opener, workdir, output_bytes, reach
        self.keeper = Keeper(opener)
        self.private = False
        self._shell = ChannelShell(opener, self.keeper, output_bytes)

    async def close(self) -> None:
        """Close its channels; what runs inside is the provider's to end."""
        await self._shell.close()
        await self.keeper.close()

    async def end_processes(self) -> None:
        """End what runs inside a private sandbox and carries its mark; the next command finds a fresh shell.
        What cleared its environment is not found."""
        if self.private:  # in two steps: what looks for the marked carries the mark itself
            pids = await self.keeper.ask("marked ''")
            await self.keeper.ask(f"end {pids}")
            await self._shell.close()

    async def open(self, argv: Sequence[str]) -> Channel:
        """A program with its standard streams, in the working directory, until it is closed."""
        return await self.opener.open(["sh", "-c", 'cd -- "$1" && shift && exec "$@"', "sh", str(self.workdir), *argv])

    async def shell(self) -> ChannelShell:
        return self._shell

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        cwd: PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """See the port."""
        return await self._program(argv, self.output_bytes, stdin=stdin, timeout_s=timeout_s, cwd=cwd, env=env)

    async def _program(
        self,
        argv: Sequence[str],
        output_bytes: int,
        *,
        stdin: bytes = b"",
        timeout_s: float = FILES_S,
        cwd: PurePosixPath | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        place = str(self.workdir / (cwd or ""))
        return await run_program(
            self.opener,
            self.keeper,
            argv,
            cwd=place,
            stdin=stdin,
            timeout_s=timeout_s,
            output_bytes=output_bytes,
            env=env,
        )

    # ------------------------------------------------------------ files

    def _path(self, path: PurePosixPath) -> str:
        return posixpath.normpath(self.workdir / path)

    async def read(self, source: PurePosixPath, *, limit: int = 1 << 20) -> bytes:
        """At most the first ``limit`` bytes of a regular file."""
        path = self._path(source)
        done = await self._program(["sh", "-c", READ, "sh", path, str(limit)], 2 * limit + 2)
        self._check(done, path)
        return done.output

    async def write(self, target: PurePosixPath, data: bytes) -> None:
        """Directories above it are made."""
        path = self._path(target)
        self._check(await self._program(["sh", "-c", WRITE, "sh", path], self.output_bytes, stdin=data), path)

    async def files(self, root: PurePosixPath) -> Mapping[PurePosixPath, bytes]:
        """See the port; a file above 8 MiB is described by its size."""
        archive = await self._pack(root)
        return await trio.to_thread.run_sync(_listing, archive)

    async def upload(self, source: Path, target: PurePosixPath) -> None:
        """A file or a whole tree of the host; links inside the tree are left out."""
        path = self._path(target)
        archive = await trio.to_thread.run_sync(_archive, source, posixpath.basename(path))
        argv = ["sh", "-c", UNPACK, "sh", posixpath.dirname(path)]
        self._check(await self._program(argv, self.output_bytes, stdin=archive), path)

    async def download(self, source: PurePosixPath, target: Path) -> None:
        """A file or a whole tree to the host; links and special files are left out."""
        archive = await self._pack(source)
        await trio.to_thread.run_sync(partial(_unpack, archive, target))

    async def _pack(self, root: PurePosixPath) -> bytes:
        """A tar of what is at root, its names beginning with ``./`` for a directory."""
        path = self._path(root)
        done = await self._program(["sh", "-c", PACK, "sh", path], TREE_BYTES)
        if done.dropped:
            raise OSError(errno.EFBIG, f"more than {TREE_BYTES >> 20} MiB", path)
        if done.code != 1 or not done.output:  # 1: a file changed or went away while it was read
            self._check(done, path)
        return done.output

    def _check(self, done: Completed, path: str) -> None:
        """Raises for a program that failed on a path."""
        if done.timed_out:
            raise InfraError(f"the sandbox did not answer within {FILES_S:g} s about {path}")
        if done.code:
            number = ERRORS.get(done.code, errno.EIO)
            raise OSError(number, done.errors.decode(errors="replace").strip() or os.strerror(number), path)


def _listing(archive: bytes) -> dict[PurePosixPath, bytes]:
    found: dict[PurePosixPath, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if member.isdir():
                continue
            if member.islnk():  # a second name of a file
                found[name] = found.get(PurePosixPath(member.linkname), b"<symlink>")
            elif member.isreg():
                content = tar.extractfile(member)
                assert content is not None
                found[name] = content.read() if member.size <= LARGEST else b"<%d bytes>" % member.size
            else:
                found[name] = KINDS.get(member.type, b"<special>")
    return found


def _archive(source: Path, name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in [source, *sorted(source.rglob("*"))] if source.is_dir() else [source]:
            if path != source and path.is_symlink():
                continue
            info = tar.gettarinfo(path.resolve() if path == source else path, str(name / path.relative_to(source)))
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            if info.isreg():
                with path.open("rb") as file:
                    tar.addfile(info, file)
            elif info.isdir():
                tar.addfile(info)
    return buffer.getvalue()


def _unpack(archive: bytes, target: Path) -> None:
    """Regular files and directories below target; a single file becomes target itself."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [m for m in tar if m.isreg() or m.isdir()]
        single = len(members) == 1 and members[0].isreg() and not members[0].name.startswith("./")
        for member in members:
            path = target if single else target / _inside(member.name)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None
            path.write_bytes(content.read())
            path.chmod(member.mode & 0o755 | 0o600)


def _inside(name: str) -> str:
    clean = posixpath.normpath(f"/{name}").lstrip("/")
    return clean or "."
