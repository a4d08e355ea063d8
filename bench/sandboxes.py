"""Speed of the sandbox backends that work here, beside swe-rex's local deployment on the same commands.

    python bench/sandboxes.py [--quick] [--out PATH] [--swe-rex PYTHON] [--container SECTION]

``--swe-rex`` names an interpreter that has swe-rex (``pip install swe-rex`` into an environment of its own); without
one ``vs_swe_rex`` is null. ``--container`` is the JSON of a sandbox section with an image: the container backend too,
with fewer repetitions and 20 together. The last line printed is JSON. Times: start_ms and start_p99_ms from opening a
sandbox to the end of its first command; start_200_s the same for 200 opened together; exec_ms and exec_p99_ms one
command in the persistent shell, program_ms one program beside it; up_50_s and down_50_s 50 MiB; teardown_200_s
closing 200 until nothing of them is left; cpu_ms this process's CPU for a sandbox's life with two commands.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import trio

from uniagent.adapters.sandboxes.container import ContainerProvider
from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.errors import InfraError, UserError

SWE_REX = """
import asyncio, json, logging, statistics, sys, time
logging.disable(logging.CRITICAL)
from swerex.deployment.local import LocalDeployment
from swerex.exceptions import SwerexException
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
async def main(commands, sessions):
    deployment = LocalDeployment()
    await deployment.start()
    runtime, times, errors = deployment.runtime, [], 0
    began = time.perf_counter()
    await runtime.create_session(CreateBashSessionRequest(session="one"))
    start = time.perf_counter() - began
    for _ in range(commands):
        began = time.perf_counter()
        try:
            await runtime.run_in_session(BashAction(command="true", session="one"))
            times.append(time.perf_counter() - began)
        except SwerexException:
            errors += 1
    began = time.perf_counter()
    await asyncio.gather(*(runtime.create_session(CreateBashSessionRequest(session=f"s{i}")) for i in range(sessions)))
    many = time.perf_counter() - began
    await deployment.stop()
    print(json.dumps({"start_ms": 1e3 * start, "exec_ms": 1e3 * statistics.median(times), "sessions": sessions,
                      "start_sessions_s": many, "errors": errors}))
asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
"""


async def timed(action: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await action()
    return time.perf_counter() - began


def spread(seconds: list[float]) -> tuple[float, float]:
    """(median, 99th percentile) in milliseconds."""
    ordered = sorted(seconds)
    return 1e3 * statistics.median(ordered), 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


async def figures(
    provider: Any, section: dict[str, Any], starts: int, commands: int, together: int, mib: int
) -> dict[str, float]:
    """All figures of one backend. A local provider buries what is closed in the background: waited for."""
    found: dict[str, float] = {}
    async with provider:

        async def first_command() -> None:
            async with provider.open(section) as box:
                await (await box.shell()).run("true", timeout_s=60)

        await first_command()
        found["start_ms"], found["start_p99_ms"] = spread([await timed(first_command) for _ in range(starts)])

        async with provider.open(section) as box:
            shell = await box.shell()
            runs = [await timed(lambda: shell.run("true", timeout_s=60)) for _ in range(commands)]
            found["exec_ms"], found["exec_p99_ms"] = spread(runs)
            runs = [await timed(lambda: box.exec(["true"], timeout_s=60)) for _ in range(starts)]
            found["program_ms"], _ = spread(runs)
            with tempfile.TemporaryDirectory() as folder:
                up, down = Path(folder, "up"), Path(folder, "down")
                up.write_bytes(bytes(mib << 20))
                found["up_50_s"] = await timed(lambda: box.upload(up, box.workdir / "big")) * 50 / mib
                found["down_50_s"] = await timed(lambda: box.download(box.workdir / "big", down)) * 50 / mib
                assert down.stat().st_size == mib << 20

        async with AsyncExitStack() as stack:

            async def open_one() -> None:
                box = await stack.enter_async_context(provider.open(section))
                await (await box.shell()).run("true", timeout_s=120)

            async def open_all() -> None:
                async with trio.open_nursery() as nursery:
                    for _ in range(together):
                        nursery.start_soon(open_one)

            found[f"start_{together}_s"] = await timed(open_all)
            began = time.perf_counter()
        while getattr(provider, "retired", None):
            await trio.sleep(0.002)
        found[f"teardown_{together}_s"] = time.perf_counter() - began

        cpu = time.process_time()
        for _ in range(starts):
            async with provider.open(section) as box:
                shell = await box.shell()
                await shell.run("ls", timeout_s=60)
                await shell.run("true", timeout_s=60)
        found["cpu_ms"] = 1e3 * (time.process_time() - cpu) / starts
    return found


def swe_rex(python: str, commands: int, sessions: int) -> dict[str, Any] | None:
    done = subprocess.run(
        [python, "-c", SWE_REX, str(commands), str(sessions)], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        print(f"swe-rex was not measured: {(done.stderr.strip().splitlines() or ['no output'])[-1]}", file=sys.stderr)
        return None
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, the same fields")
    parser.add_argument("--out", type=Path, help="also write the JSON line here")
    parser.add_argument("--swe-rex", default=sys.executable, metavar="PYTHON", help="an interpreter with swe-rex")
    parser.add_argument("--container", metavar="SECTION", help="a sandbox section as JSON: measure containers too")
    arguments = parser.parse_args()
    starts, commands, mib = (20, 200, 10) if arguments.quick else (200, 2000, 50)
    backends: dict[str, dict[str, float]] = {}
    for isolation in ("bwrap", "none"):
        try:
            provider = LocalProvider({"isolation": isolation, "warm": 0})
            backends[f"local-{isolation}"] = trio.run(figures, provider, {}, starts, commands, 200, mib)
        except (UserError, InfraError) as problem:
            print(f"local-{isolation}: {problem}", file=sys.stderr)
    if arguments.container:
        section = json.loads(arguments.container)
        backends["container"] = trio.run(figures, ContainerProvider(), section, starts // 20, commands // 4, 20, mib)
    other = swe_rex(arguments.swe_rex, 20 if arguments.quick else 200, 5 if arguments.quick else 20)
    versus = None
    if other is not None and (ours := backends.get("local-bwrap")):
        versus = {**other, "start_times_faster": other["start_ms"] / ours["start_ms"],
                  "exec_times_faster": other["exec_ms"] / ours["exec_ms"]}  # fmt: skip

    print(f"{'':<20}" + "".join(f"{name:>16}" for name in backends))
    for field in dict.fromkeys(field for found in backends.values() for field in found):
        print(f"{field:<20}" + "".join(f"{found.get(field, math.nan):>16.3f}" for found in backends.values()))
    if versus:
        print(f"swe-rex: a session starts in {versus['start_ms']:.0f} ms, a command takes {versus['exec_ms']:.1f} ms")
    line = json.dumps({"bench": "sandboxes", "quick": arguments.quick, "backends": backends, "vs_swe_rex": versus})
    if arguments.out:
        arguments.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
