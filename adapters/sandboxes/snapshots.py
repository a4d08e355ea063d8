"""A sandbox's files as they are now, kept to start others from, where a backend can.

A snapshot's name is a value of the key ``snapshot`` in sandbox sections of the same provider, while the node lives: its
provider removes the snapshots it made. Files are kept; of processes nothing may be relied on.
"""

from __future__ import annotations

from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import CanSnapshot, Sandbox

PREPARE_S = 3600.0
OUTPUT_TOLD = 2000


async def snapshot(sandbox: Sandbox) -> str:
    """The name of a new snapshot. Raises UserError where the backend keeps none, InfraError when it failed."""
    if not isinstance(sandbox, CanSnapshot):
        raise UserError(
            f"{type(sandbox).__name__} keeps no snapshots: use provider local, container, modal, e2b or daytona, or "
            "download what is to be kept"
        )
    return await sandbox.snapshot()


async def prepared(sandbox: Sandbox, script: str) -> str:
    """A snapshot of a sandbox after a script. Raises UserError with the script's last output when it fails."""
    done = await (await sandbox.shell()).run(script, timeout_s=PREPARE_S)
    if done.timed_out:
        raise InfraError(f"prepare took longer than {PREPARE_S:g} s")
    if done.code != 0:
        told = done.output.decode(errors="replace")[-OUTPUT_TOLD:].strip()
        raise UserError(f"the sandbox section: prepare ended with {done.code}: {told or '(no output)'}")
    return await snapshot(sandbox)
