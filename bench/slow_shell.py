"""The shell tool with a latency of its own, slept inside the sandbox: for ``bench/async_modes.py``. Each call takes
``latency_s`` times a lognormal of median 1 and this ``sigma`` longer; the order of the draws is that of the calls."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from uniagent.adapters.tools.shell import StatefulShell
from uniagent.engine.ports import Json, Observation, Sandbox

DRAWS = random.Random(0)


class SlowShell:
    """``engine.ports.Tool``."""

    def __init__(self, sandbox: Sandbox, given: Mapping[str, Json]) -> None:
        options: dict[str, Any] = dict(given)
        self._median, self._sigma = float(options.pop("latency_s")), float(options.pop("sigma"))
        self._sandbox = sandbox
        self._shell = StatefulShell(sandbox, options)
        self.schema = self._shell.schema

    async def __call__(self, arguments: Mapping[str, Json]) -> Observation:
        if self._median:
            seconds = self._median * DRAWS.lognormvariate(0, self._sigma)
            shell = await self._sandbox.shell()
            await shell.run(f"sleep {seconds:.3f}", timeout_s=seconds + 5)
        return await self._shell(arguments)
