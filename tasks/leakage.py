"""The leak guard of a task: everything between a verifier and an agent that would rather find the fix than make it.

Three calls in the life of an episode. ``prepare`` before the agent acts: history after the base commit is gone, copies
of the fix are gone, the network's rules are made, what judges is remembered on this side. ``seal`` after it acted: its
processes are ended, what it did to its judge is found, tests and runner files are put back. ``grade`` runs the tests in
a fresh process. ``settle`` lays what was found on a result. Findings name no model; knows no benchmark.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import PurePosixPath

import trio
from attrs import evolve, field, frozen

from uniagent.engine.egress.record import Access, Egress, egress_of
from uniagent.engine.errors import InfraError
from uniagent.engine.ports import AgentResult, Sandbox, TaskResult
from uniagent.tasks.guards import commands, copies, history, registries, tampering
from uniagent.tasks.guards.findings import Consequence, Finding, apply
from uniagent.tasks.guards.grader import PASSED, Graded, Tests, run_tests
from uniagent.tasks.guards.network import Guarded
from uniagent.tasks.guards.origin import Origin, origin
from uniagent.tasks.guards.registries import HOLDS_A_COPY
from uniagent.tasks.guards.scan import Snapshot, interpreter, run, scan
from uniagent.tasks.guards.turning import turned

__all__ = ["Consequence", "Finding", "Graded", "Guard", "Origin", "Prepared", "Tests", "grade", "origin", "prepare",
           "seal", "settle"]  # fmt: skip

TEMPORARY = "/tmp"
# what ``Sandbox.files`` says of what it gives no content of
DESCRIBED = re.compile(rb"<(symlink|fifo|socket|device|special|unreadable|\d+ bytes)>")
KEPT_OUT = (".git", "node_modules", ".venv", "venv", ".tox")  # not remembered by content
COPY_PLACES = ("/usr/lib/python3", "/usr/local/lib", "/opt", "/root", "/home", "/tmp", "/usr/lib/node_modules")


@frozen
class Guard:
    """What a task asks for. ``tests``: the files that grading uses (paths, directories or globs, relative to the
    repository): they are put back before it, and so is every runner file. ``problem`` is the statement that the agent
    reads: the URLs in it may be read. ``root``: the repository, the working directory when left out. ``history``: it
    has one to be cut at ``origin.base_commit`` (HEAD when that is empty)."""

    origin: Origin = field(factory=Origin)
    tests: tuple[str, ...] = ()
    problem: str = ""
    root: PurePosixPath | None = None
    history: bool = True
    consequence: Consequence = field(factory=Consequence)


@frozen
class Prepared:
    """What is remembered of a sandbox, out of the agent's reach."""

    guard: Guard
    root: PurePosixPath
    python: str
    before: Snapshot = field(repr=False)
    files: Mapping[PurePosixPath, bytes] = field(repr=False)  # of the repository
    token: str = ""
    base: str = ""
    decoys: tuple[str, ...] = ()  # stand where copies were
    deep: tuple[str, ...] = ()  # what is scanned and may be changed: all of it is the sandbox's own


async def prepare(sandbox: Sandbox, guard: Guard) -> Prepared:
    """Before the agent acts, when the repository stands as it shall find it. Raises InfraError when the history cannot
    be cut, or when a copy of the fix lies where it cannot be removed. Outside the repository only a sandbox whose file
    system is its own (``private``) is changed."""
    root = guard.root or sandbox.workdir
    egress = egress_of(sandbox)
    if egress is not None and egress.policy == "guarded":
        egress.rules = Guarded.of(guard.origin, guard.problem)
    python = await interpreter(sandbox)
    base = await history.rebuild(sandbox, root, guard.origin.base_commit or "HEAD") if guard.history else ""
    token = f"decoy-{secrets.token_hex(8)}"
    decoys: list[str] = []
    private = bool(getattr(sandbox, "private", False))
    deep = (str(root), TEMPORARY) if private else (str(root),)
    if private and (guard.origin.names or guard.origin.packages):
        await copies.empty_caches(sandbox)
        found = await copies.find(sandbox, guard.origin, root, COPY_PLACES)
        decoys, left = await copies.take_away(sandbox, found, token)
        if left:
            raise InfraError(
                f"the sandbox holds {left[0]}, a copy of what the task is about, and it cannot be removed: use an "
                "image without it"
            )
    before = await scan(sandbox, python, deep, keep=_kept_out(root))
    files = {path: content for path, content in (await sandbox.files(root)).items() if path.parts[0] not in KEPT_OUT}
    await copies.arm(sandbox, decoys)
    return Prepared(guard, root, python, before, files, token, base, tuple(decoys), deep)


async def seal(sandbox: Sandbox, prepared: Prepared, acted: AgentResult | None = None) -> tuple[Finding, ...]:
    """After the agent acted: end its processes, find what it did, put back what judges it. ``acted`` gives the commands
    that it ran; the egress proxy's record is the sandbox's own."""
    guard, root = prepared.guard, prepared.root
    running = await _running(sandbox)
    await end_processes(sandbox)
    egress = egress_of(sandbox)
    if egress is not None:
        egress.closed = True
    hidden = await run(sandbox, ["find", str(root), "!", "-perm", "-u+r", "-print", "-quit"])
    # what the agent made unreadable is its own
    await run(sandbox, ["chmod", "-R", "u+rwX", "--", *prepared.deep])
    looked = await copies.disturbed(sandbox, prepared.decoys)
    after = await scan(
        sandbox,
        prepared.python,
        prepared.deep,
        site=prepared.before.site,
        path=prepared.before.path,
        keep=_kept_out(root),
    )
    after = evolve(after, processes=running)
    now = {path: content for path, content in (await sandbox.files(root)).items() if path.parts[0] not in KEPT_OUT}
    path_files = await _path_files(sandbox, prepared, after)
    found = tampering.tampering(prepared.before, after, root, guard.tests, path_files)
    found += _file_findings(prepared, now)
    found += [Finding("decoy", path, "it stands for a package that was taken away", leak=False) for path in looked]
    found += [
        Finding("hidden", p, "made unreadable", False) for p in hidden.output.decode(errors="replace").splitlines()
    ]
    found += _copy_findings(prepared, after, egress)
    found += network_findings(egress.accesses if egress is not None else ())
    if acted is not None:
        found += commands.audit(commands.commands_of(acted), guard.origin)
    await restore(sandbox, prepared, now)
    return tuple(dict.fromkeys(found))


async def grade(sandbox: Sandbox, prepared: Prepared, tests: Tests) -> Graded:
    """Run tests in a fresh process; after ``seal``. Findings of the run itself are in the answer: the judge was ended
    or changed, or tests pass whatever they assert, and did not so before the agent acted (a leak where most do)."""
    graded = await run_tests(sandbox, prepared.python, prepared.root, tests)
    if graded.findings or not any(how in PASSED for how in graded.tests.values()):
        return graded
    graded = await _turned(sandbox, prepared, tests, prepared.root, graded)
    if not graded.vacuous:
        return graded
    before = await _as_it_was(sandbox, prepared, tests)
    fooled = [name for name in graded.vacuous if name not in before.vacuous]
    if not fooled:
        return graded
    most = 2 * len(fooled) > len(graded.turned)
    finding = Finding(
        "passes_both_ways", fooled[0], f"{len(fooled)} tests also pass with their assertions turned", most
    )
    return evolve(graded, findings=(*graded.findings, finding))


async def _turned(sandbox: Sandbox, prepared: Prepared, tests: Tests, root: PurePosixPath, graded: Graded) -> Graded:
    """The same run with the test files turned, in a process of its own; the files are put back."""
    names: set[str] = set()
    kept = {}
    for name in tests.files:
        source = prepared.files.get(PurePosixPath(name), b"")
        try:
            changed, found = turned(source)
        except (SyntaxError, ValueError):  # not Python as it is known here
            continue
        names |= found
        kept[root / name] = source
        await sandbox.write(root / name, changed)
    if not kept:
        return graded
    try:
        again = await run_tests(sandbox, prepared.python, root, tests)
    finally:
        with trio.CancelScope(shield=True):
            for path, source in kept.items():
                await sandbox.write(path, source)
    outcomes = {test: how for test, how in again.tests.items() if _function(test) in names}
    return evolve(graded, turned=outcomes, findings=again.findings)


def _function(test: str) -> str:
    """The name of the function in a test's id."""
    return test.replace("::", ".").partition("[")[0].rpartition(".")[2]


async def _as_it_was(sandbox: Sandbox, prepared: Prepared, tests: Tests) -> Graded:
    """The same tests, as they are and turned, on the repository as it was before the agent acted, in a place of its
    own."""
    root = sandbox.workdir / f".before-{secrets.token_hex(6)}"
    for path, content in prepared.files.items():
        if not DESCRIBED.fullmatch(content):
            await sandbox.write(root / path, content)
    try:
        graded = await run_tests(sandbox, prepared.python, root, tests)
        return await _turned(sandbox, prepared, tests, root, graded)
    finally:
        await run(sandbox, ["rm", "-rf", "--", str(root)])


def settle(result: TaskResult, findings: Iterable[Finding], consequence: Consequence) -> TaskResult:
    """Flags, details and the consequence of what was found (``Guard.consequence``)."""
    return apply(result, findings, consequence)


async def end_processes(sandbox: Sandbox) -> None:
    """End everything that runs inside but what the backend needs; where the backend cannot, nothing happens."""
    end = getattr(sandbox, "end_processes", None)
    if end is not None:
        await end()


async def restore(sandbox: Sandbox, prepared: Prepared, now: Mapping[PurePosixPath, bytes]) -> list[str]:
    """Put tests and runner files back as they were: changed ones are written again, new runner files removed."""
    judges = {p: c for p, c in prepared.files.items() if _judges(p, prepared.guard)}
    changed = [p for p, content in judges.items() if now.get(p) != content and not DESCRIBED.fullmatch(content)]
    strange = [p for p in now if p not in prepared.files and _runner_file(p)]
    compiled = [p for p in now if p.suffix == ".pyc"]
    doomed = [str(prepared.root / p) for p in [*changed, *strange, *compiled]]
    if changed:  # a link or a file may stand where a directory was
        parents = {parent for p in changed for parent in p.parents if parent.parts}
        doomed += [str(prepared.root / p) for p in parents if p in now]
    for start in range(0, len(doomed), 500):
        await run(sandbox, ["rm", "-rf", "--", *doomed[start : start + 500]])
    for path in changed:
        await sandbox.write(prepared.root / path, judges[path])
    return [str(p) for p in [*changed, *strange]]


def _judges(path: PurePosixPath, guard: Guard) -> bool:
    return tampering.matches(str(path), guard.tests) or _runner_file(path)


def _runner_file(path: PurePosixPath) -> bool:
    return any(path.match(pattern) for pattern in tampering.RUNNER_FILES)


def _file_findings(prepared: Prepared, now: Mapping[PurePosixPath, bytes]) -> list[Finding]:
    """From contents: rewritten tests, steering code, the decoys' token."""
    found = []
    for path, content in now.items():
        old = prepared.files.get(path, b"")
        if content == old:
            continue
        if prepared.token.encode() in content:
            found.append(Finding("copied", str(path), "holds a copy of a package that was taken away"))
        judged = tampering.matches(str(path), prepared.guard.tests)
        if judged and old and not _only_added(old, content):
            found.append(Finding("tests_changed", str(path), "put back before grading", leak=False))
        if path.name in tampering.RUNNER_SECTIONS and tampering.section_changed(old, content):
            found.append(Finding("runner_file", str(path), "its part for the test runner was changed"))
        found += commands.audit_code(str(path), old, content)
    for path in prepared.files.keys() - now.keys():
        if tampering.matches(str(path), prepared.guard.tests):
            found.append(Finding("tests_changed", str(path), "removed; put back before grading", leak=False))
    return found


def _only_added(old: bytes, new: bytes) -> bool:
    """Whether every old line is still there, in order."""
    lines = iter(new.splitlines())
    return all(line in lines for line in old.splitlines())


def _copy_findings(prepared: Prepared, after: Snapshot, egress: Egress | None) -> list[Finding]:
    """Releases of the task's own distribution that came while the agent acted and are younger than the base commit. Its
    own builds, and what the proxy let through, are none."""
    source = prepared.guard.origin
    rules = egress.rules if egress is not None else None
    permitted = rules.versions() if isinstance(rules, Guarded) else frozenset()
    new = set(tampering.changed(prepared.before.files, after.files))
    found = []
    for path, version in copies.copies({p: after.files[p] for p in new}, source, prepared.root):
        if not version or version in permitted or (source.version and not registries.newer(version, source.version)):
            continue
        sure = bool(source.version)
        found.append(Finding("copy", path, f"version {version} of the task's own distribution", leak=sure))
    return found


def network_findings(accesses: Iterable[Access]) -> list[Finding]:
    """What a sandbox's record of requests says: one finding an address that a leak rule refused."""
    accesses = tuple(accesses)
    leaks = {access.url: access for access in accesses if access.leak}
    found = [Finding("egress", url, f"{a.rule} (turn {a.turn})") for url, a in leaks.items()]
    held = {access.url: access for access in accesses if access.rule == HOLDS_A_COPY}
    return found + [Finding("egress_copy", url, f"{a.rule} (turn {a.turn})", leak=False) for url, a in held.items()]


async def _path_files(sandbox: Sandbox, prepared: Prepared, after: Snapshot) -> dict[str, bytes]:
    """Contents of new .pth files; one that cannot be read counts as one that runs code."""
    found = {}
    for path in tampering.changed(prepared.before.files, after.files):
        if path.endswith(".pth") and after.files[path].kind == "file":
            with suppress(OSError):
                found[path] = await sandbox.read(PurePosixPath(path))
    return found


async def _running(sandbox: Sandbox) -> tuple[str, ...]:
    """Command lines inside, as they are before everything is ended."""
    script = 'for f in /proc/[0-9]*/cmdline; do tr "\\0" " " <"$f" 2>/dev/null | head -c 500; echo; done'
    done = await run(sandbox, ["sh", "-c", script])
    lines = done.output.decode(errors="replace").splitlines()
    return tuple(line.strip() for line in lines if line.strip() and "/proc/[0-9]*/cmdline" not in line)


def _kept_out(root: PurePosixPath) -> list[str]:
    return [str(root / name) for name in KEPT_OUT]
