"""kernel: the agent writes ``ModelNew`` into solution.py; it must be right on inputs it has never seen, then fast.

What it left is one file. Its text is scanned; then it runs alone in a fresh sandbox, on inputs drawn from new seeds,
and a second fresh sandbox, where none of its code ever is, draws the inputs again and compares. A cheat earns 0 and a
flag. The speed-up is a ratio to the reference: of a counted cost on a CPU (a proxy, see ``inside.meter``), of seconds
on a GPU; over shapes the geometric mean.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

from attrs import field, frozen
from attrs.validators import ge, gt, in_, le

from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import AgentResult, Completed, Json, ModelEndpoint, Providers, Sandbox, TaskResult
from uniagent.tasks.base import open_sandbox, run_episode
from uniagent.tasks.bugfix.place import python
from uniagent.tasks.check import Attempt
from uniagent.tasks.config import TaskConfig
from uniagent.tasks.kernel.place import shown
from uniagent.tasks.kernel.problems import FILE
from uniagent.tasks.kernel.scan import refused
from uniagent.tasks.structure import structure

LARGEST = 256 << 10  # bytes of a solution
OUTPUT_LIMIT = 64 << 20
INSIDE = "uniagent.tasks.kernel.inside"
PROGRAMS = ("__init__", "problem", "meter", "watch", "worker", "referee")
CHEATS = ("patched", "no_kernel", "host_reads", "not_a_tensor", "streams", "inputs_changed")  # the worker's flags
DECOY = """
import triton
import triton.language as tl


@triton.jit
def decoy(out_ptr):
    tl.store(out_ptr, tl.load(out_ptr))


class ModelNew(Model):
    def forward(self, *inputs):
        out = super().forward(*inputs)
        decoy[(1,)](out)
        return out
"""


@frozen
class Case:
    """The metadata of a sample: a row of KernelBench, and of built-in problems the shapes, a kernel that is right and
    an edit that makes it wrong. ``shapes`` replace constants of the code; none: the code's own."""

    name: str
    code: str = field(repr=False)
    problem_id: str = ""
    level: int = 0
    shapes: tuple[Mapping[str, Json], ...] = ()
    kernel: str = field(default="", repr=False)
    mistake: tuple[str, ...] = ()


@frozen
class KernelOptions:
    """Keys of the section ``verifier``. Reward of a right kernel: ``correct_reward``, and the rest in proportion to
    log(speed-up), all of it from ``target_speedup`` on. The outcome: right, and not slower than ``threshold``."""

    device: str = field(default="cpu", validator=in_(("cpu", "cuda")))
    seeds: int = field(default=3, validator=ge(2))  # input sets of each shape
    torch_ops: str = field(default="refuse", validator=in_(("refuse", "allow")))
    threshold: float = field(default=1.0, validator=gt(0))
    target_speedup: float = field(default=2.0, validator=gt(1))
    correct_reward: float = field(default=0.3, validator=[ge(0), le(1)])
    flops_per_byte: float = field(default=16.0, validator=gt(0))  # of the proxy: operations that cost as much as a byte
    launch_bytes: float = field(default=1024.0, validator=ge(0))  # of the proxy: what a launch costs
    run_timeout_s: float = field(default=120.0, validator=gt(0))  # of the solution


class Kernel:
    """One reference to be made faster."""

    def __init__(self, config: TaskConfig, providers: Providers) -> None:
        where = f"task {config.name!r}"
        self.case = structure(Case, config.metadata, f"{where}: metadata")
        self.options = structure(KernelOptions, config.verifier.options, f"{where}: verifier")
        self.config, self.providers = shown(config, self.options.device), providers
        self.shapes = [dict(shape) for shape in self.case.shapes] or [{}]

    async def run(self, model: ModelEndpoint) -> TaskResult:
        return await run_episode(self.config, self.providers, model, setup=self.setup, verify=self.verify)

    async def setup(self, sandbox: Sandbox) -> None:
        await sandbox.write(sandbox.workdir / "reference.py", self.case.code.encode())

    # ------------------------------------------------------------ after the agent

    async def verify(self, sandbox: Sandbox, acted: AgentResult) -> TaskResult:
        left = await sandbox.files(sandbox.workdir)
        solution = left.get(PurePosixPath(FILE))
        if solution is None or solution == b"<symlink>":
            return failed("no_solution", f"there is no file {FILE}")
        text = solution.decode(errors="replace")
        reasons = refused(text, cuda=self.options.device == "cuda")
        if len(solution) > LARGEST:
            reasons = [f"it is larger than {LARGEST >> 10} KiB"]
        return failed("refused_code", *reasons) if reasons else await self.judged(text)

    async def judged(self, solution: str) -> TaskResult:
        """The verdict on a text that may run. Raises InfraError for what is not the solution's fault."""
        seeds = [secrets.randbits(31) for _ in range(self.options.seeds)]
        job = {"shapes": self.shapes, "seeds": seeds, "device": self.options.device}
        record, outputs = await self.worked(solution, job)
        if (settled := over(record)) is not None:
            return settled
        verdict = await self.compared({**job, "calls": record["calls"]}, outputs)
        return self.result(record, verdict, seeds)

    async def worked(self, solution: str, job: Mapping[str, Json]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The worker's record and the outputs it names; no ``calls`` where the solution kept it from writing one."""
        key = secrets.token_bytes(32)
        async with open_sandbox(self.config, self.providers) as box:
            await self.placed(box, {"reference.py": self.case.code.encode(), FILE: solution.encode()})
            done = await self.called(box, "worker", {**job, "key": key.hex()}, self.options.run_timeout_s)
            lines = [said for said in map(partial(_signed, key), done.output.splitlines()) if said is not None]
            if not lines:
                raise InfraError(f"the solution could not be started: {_tail(done)}")
            if len(lines) < 2:
                flag = "timed_out" if done.timed_out else "ended_early"
                return {"flag": flag, "error": f"no record was written. {_tail(done)}"}, {}
            record = lines[1]
            outputs: dict[str, bytes] = {}
            for output in (output for call in record["calls"] for output in call["outputs"]):
                place = box.workdir / "run" / "outputs" / output["file"]
                outputs[output["file"]] = await box.read(place, limit=OUTPUT_LIMIT)
                if hashlib.sha256(outputs[output["file"]]).hexdigest() != output["sha256"]:
                    return {"flag": "forged_outputs", "error": f"{output['file']} is not what the model gave"}, {}
        return record, outputs

    async def compared(self, job: Mapping[str, Json], outputs: Mapping[str, bytes]) -> dict[str, Any]:
        async with open_sandbox(self.config, self.providers) as box:
            await self.placed(box, {"reference.py": self.case.code.encode()})
            for name, content in outputs.items():
                await box.write(box.workdir / "run" / "outputs" / name, content)
            done = await self.called(box, "referee", job, self.config.verifier.timeout_s)
            if done.code != 0:
                raise InfraError(f"the reference could not be run: {_tail(done)}")
        verdict: dict[str, Any] = json.loads(done.output.splitlines()[-1])
        return verdict

    async def placed(self, box: Sandbox, given: Mapping[str, bytes]) -> None:
        package, inside = PurePosixPath(*INSIDE.split(".")), files(INSIDE)
        for empty in package.parents:
            await box.write(box.workdir / "grader" / empty / "__init__.py", b"")
        for name in PROGRAMS:
            await box.write(box.workdir / "grader" / package / f"{name}.py", (inside / f"{name}.py").read_bytes())
        for name, content in given.items():
            await box.write(box.workdir / "run" / name, content)

    async def called(self, box: Sandbox, program: str, job: Mapping[str, Json], timeout_s: float) -> Completed:
        argv = [python(self.config.sandbox), "-u", "-m", f"{INSIDE}.{program}", str(box.workdir / "run")]
        stdin = json.dumps(job).encode()
        return await box.exec(argv, stdin=stdin, timeout_s=timeout_s, cwd=box.workdir / "grader")

    # ------------------------------------------------------------ the verdict

    def result(self, record: Mapping[str, Any], verdict: Mapping[str, Any], seeds: Sequence[int]) -> TaskResult:
        computed = sorted({name for call in record["calls"] for name in call["computed"]})
        flags = [flag for flag in record["flags"] if flag in CHEATS]
        flags += ["torch_ops"] if computed and self.options.torch_ops == "refuse" else []
        flags += ["remembered"] if verdict["remembered"] else []
        flags += ["wrong"] if verdict["wrong"] else []
        speedup = self.speedup(record, verdict)
        right = not flags
        share = min(1.0, max(0.0, math.log(speedup) / math.log(self.options.target_speedup)))
        reward = self.options.correct_reward + (1 - self.options.correct_reward) * share if right else 0.0
        details: dict[str, Json] = {
            "problem": self.case.problem_id or self.case.name,
            "seeds": list(seeds),
            "wrong": verdict["wrong"][:5],
            "torch_ops": computed,
            "reference": verdict["costs"],
            "solution": [{k: v for k, v in call.items() if k != "outputs"} for call in record["calls"]],
        }
        return TaskResult(
            reward,
            components={"correct": float(right), "speed": share if right else 0.0},
            outcome=right and speedup >= self.options.threshold,
            flags=tuple(flags),
            metrics={"correct": float(right), self.measure: speedup if right else 0.0},
            details=details,
        )

    @property
    def measure(self) -> str:
        return "speedup" if self.options.device != "cpu" else "speedup_proxy"

    def speedup(self, record: Mapping[str, Any], verdict: Mapping[str, Any]) -> float:
        """The reference's cost (a proxy) or seconds over the solution's: the geometric mean over shapes."""
        if self.options.device == "cpu":
            reference = [self.cost(one) for one in verdict["costs"]]
            own = [max(self.cost(c) for c in record["calls"] if c["shape"] == n) for n in range(len(self.shapes))]
        else:
            reference, own = verdict["seconds"], record["seconds"]
        ratios = [max(r, 1e-12) / max(o, 1e-12) for r, o in zip(reference, own, strict=True)]
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    def cost(self, counted: Mapping[str, Any]) -> float:
        """The proxy, in bytes: traffic, operations at ``flops_per_byte``, and launches."""
        options = self.options
        computing = float(counted["flops"]) / options.flops_per_byte
        return float(counted["bytes"]) + computing + float(counted["launches"]) * options.launch_bytes

    # ------------------------------------------------------------ checking

    def attempts(self) -> Mapping[str, Attempt]:
        """A kernel that is right, one that is not, where the sample has them; the reference with a kernel beside it."""
        case = self.case
        found: dict[str, Attempt] = {"reference_called": partial(_writes, f"{case.code}\n{DECOY}")}
        if case.kernel:
            found["oracle"] = partial(_writes, case.kernel)
        if case.kernel and case.mistake:
            if len(case.mistake) != 2 or case.mistake[0] not in case.kernel:
                raise UserError(f"task kernel: {case.name}: mistake must be [a text of the kernel, another]")
            found["wrong_result"] = partial(_writes, case.kernel.replace(*case.mistake))
        return found


def over(record: Mapping[str, Any]) -> TaskResult | None:
    """The result where a worker's record alone settles it. What was counted beside patched functions says nothing."""
    if "calls" not in record:
        return failed(record["flag"], record["error"])
    if record["patched"]:
        return failed("patched", f"changed: {', '.join(record['patched'])}", others=record["flags"])
    return failed("raised", record["error"], others=record["flags"]) if record["error"] else None


def failed(flag: str, *reasons: str, others: Sequence[str] = ()) -> TaskResult:
    """Nothing earned."""
    details = {"wrong": list(reasons)}
    metrics = {"correct": 0.0}
    components = {"correct": 0.0, "speed": 0.0}
    flags = tuple(dict.fromkeys([flag, *(one for one in others if one in CHEATS)]))
    return TaskResult(0.0, components, outcome=False, flags=flags, metrics=metrics, details=details)


def _signed(key: bytes, line: bytes) -> dict[str, Any] | None:
    """What a line says, if it was signed with the key."""
    signature, _, body = line.partition(b" ")
    if not hmac.compare_digest(hmac.new(key, body, "sha256").hexdigest().encode(), signature):
        return None
    said: dict[str, Any] = json.loads(body)
    return said


def _tail(done: Completed) -> str:
    how = "it was stopped at its time limit" if done.timed_out else f"exit status {done.code}"
    return f"{how}: {done.errors.decode(errors='replace').strip()[-1500:]}"


async def _writes(text: str, sandbox: Sandbox) -> AgentResult:
    await sandbox.write(sandbox.workdir / FILE, text.encode())
    return AgentResult(finished=True)
