"""The task ``kernel``: its samples, its protocol with the sandboxes, the reward, tolerances, and the whole in a real
sandbox."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

from uniagent.adapters.sandboxes.local import LocalProvider
from uniagent.engine.errors import InfraError, UserError
from uniagent.engine.ports import AgentResult, Completed
from uniagent.tasks import TaskConfigResolver
from uniagent.tasks.base import open_sandbox
from uniagent.tasks.check import check_sample
from uniagent.tasks.config import ENDPOINT
from uniagent.tasks.kernel.inside.meter import Meter, on_device, poisoned, seconds
from uniagent.tasks.kernel.inside.referee import compare, difference
from uniagent.tasks.kernel.problems import built_in, sample, samples
from uniagent.tasks.kernel.task import Kernel

PROBLEM = built_in()["row_sum"]
ROW = sample(PROBLEM, [{"ROWS": 2, "COLS": 8}])


def task(row: dict[str, Any], providers: Any = None, *, provider: str = "image", **verifier: Any) -> Kernel:
    image = {} if provider == "local" else {"image": "torch"}
    resolver = TaskConfigResolver([{"name": "kernel", "sandbox": {"provider": "local", **image}, "verifier": verifier}])
    return Kernel(resolver.resolve(json.loads(json.dumps(row)), dict.fromkeys(ENDPOINT, "x")), providers)


# ---------------------------------------------------------------- samples


def test_rows_are_a_function_of_split_and_seed_and_the_splits_share_none() -> None:
    train, held_out = (list(islice(samples(split, 1), 60)) for split in ("train", "heldout"))
    assert train == list(islice(samples("train", 1), 60)) != list(islice(samples("train", 2), 60))
    texts = [{row["prompt"][0]["content"] for row in rows} for rows in (train, held_out)]
    assert not texts[0] & texts[1]
    assert [row["metadata"]["name"] for row in train[:12]] == list(built_in())
    assert len(built_in()) == 12


def test_the_prompt_has_the_reference_at_its_first_shape_and_names_all_of_them() -> None:
    row = sample(PROBLEM, [{"ROWS": 3, "COLS": 50}, {"ROWS": 24, "COLS": 300}])
    said = row["prompt"][0]["content"]
    assert "ROWS = 3\nCOLS = 50\n" in said
    assert "ROWS = 24, COLS = 300" in said
    assert "@triton.jit" not in said, "the kernel is the answer"
    assert row["metadata"]["code"] in said


def test_rows_of_kernel_bench_are_taken_as_they_are(tmp_path: Path) -> None:
    rows = [{"code": PROBLEM.reference, "level": 1, "name": f"{n}_Sum", "problem_id": n} for n in range(30)]
    path = tmp_path / "level_1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, held_out = (list(samples(split, 0, file=str(path))) for split in ("train", "heldout"))
    assert len(train) + len(held_out) == 30
    assert len(train) > len(held_out) > 0
    made = task(train[0])
    assert made.case.code == PROBLEM.reference
    assert made.shapes == [{}]
    assert set(made.attempts()) == {"reference_called"}
    path.write_text(json.dumps({"code": 3}) + "\n")
    with pytest.raises(UserError, match="no text code and no name"):
        next(samples("train", 0, file=str(path)))


def test_mistakes_are_told() -> None:
    with pytest.raises(UserError, match="did you mean 'train'"):
        next(samples("trian", 0))
    with pytest.raises(UserError, match="did you mean 'softmax'"):
        next(samples("train", 0, problems=["sotfmax"]))
    with pytest.raises(UserError, match="torch_ops"):
        task(ROW, torch_ops="maybe")
    with pytest.raises(UserError, match=r"device.*tpu"):
        task(ROW, device="tpu")


# ---------------------------------------------------------------- the protocol


class Box:
    """A sandbox whose programs say what a test wants. ``left`` are the agent's files."""

    workdir = PurePosixPath("/box")

    def __init__(self, say: Callable[[str, bytes], Completed] | None = None, **left: bytes) -> None:
        self.say, self.left, self.written = say, left, dict[str, bytes]()

    async def files(self, root: PurePosixPath) -> dict[PurePosixPath, bytes]:
        return {PurePosixPath(name.replace("_py", ".py")): text for name, text in self.left.items()}

    async def write(self, target: PurePosixPath, data: bytes) -> None:
        self.written[str(target)] = data

    async def read(self, source: PurePosixPath, *, limit: int = 0) -> bytes:
        return b"output"

    async def exec(self, argv: list[str], *, stdin: bytes, **_: Any) -> Completed:
        assert self.say is not None
        return self.say(argv[-2].rpartition(".")[2], stdin)


class Boxes:
    """Providers that open one kind of box, and keep those they opened."""

    def __init__(self, say: Callable[[str, bytes], Completed]) -> None:
        self.say, self.opened = say, list[Box]()

    def sandbox(self, name: str) -> Boxes:
        return self

    def sandbox_options(self, name: str) -> dict[str, Any]:
        return {}

    @asynccontextmanager
    async def open(self, config: Any) -> Any:
        self.opened.append(Box(self.say))
        yield self.opened[-1]


def signed(stdin: bytes, *said: Any) -> bytes:
    key = bytes.fromhex(json.loads(stdin)["key"])
    bodies = [json.dumps(one).encode() for one in said]
    return b"".join(hmac.new(key, b, "sha256").hexdigest().encode() + b" " + b + b"\n" for b in bodies)


def record(**changes: Any) -> dict[str, Any]:
    output = {"file": "0-0-0", "shape": [2], "dtype": "float32", "sha256": hashlib.sha256(b"output").hexdigest()}
    counted = {"bytes": 1000, "flops": 0, "launches": 0, "kernels": 1, "computed": {}}
    call = {"shape": 0, "turn": 0, "outputs": [output], **counted}
    return {"calls": [call], "flags": [], "patched": [], "error": None, "seconds": [], **changes}


VERDICT = {"wrong": [], "remembered": False, "costs": [{"bytes": 1500, "flops": 0, "launches": 0}], "seconds": []}


async def judged(*lines: Any, code: int | None = 0, verdict: dict[str, Any] = VERDICT, **options: Any) -> Any:
    """The result where the worker says the lines (bytes: as they are)."""

    def say(program: str, stdin: bytes) -> Completed:
        if program == "referee":
            return Completed(0, json.dumps(verdict).encode())
        output = b"".join(line if isinstance(line, bytes) else signed(stdin, line) for line in lines)
        return Completed(code, output, b"some error")

    return await task(ROW, Boxes(say), **options).judged("pass")


@pytest.mark.parametrize(
    ("speedup", "reward", "outcome"),
    [(0.5, 0.3, False), (1.0, 0.3, True), (2**0.5, 0.65, True), (2.0, 1.0, True), (9.0, 1.0, True)],
)
async def test_the_reward_of_a_right_kernel_grows_with_the_logarithm_of_its_speed(
    speedup: float, reward: float, outcome: bool
) -> None:
    cost = {"bytes": 1000 * speedup + 1e-6, "flops": 0, "launches": 0}
    found = await judged({"ready": True}, record(), verdict={**VERDICT, "costs": [cost]})
    assert found.reward == pytest.approx(reward)
    assert found.outcome is outcome
    assert found.metrics["speedup_proxy"] == pytest.approx(speedup)
    strict = await judged({"ready": True}, record(), verdict={**VERDICT, "costs": [cost]}, threshold=3.0)
    assert strict.outcome is (speedup > 3)


async def test_the_proxy_weighs_operations_and_launches_by_the_config() -> None:
    costs = [{"bytes": 0, "flops": 600, "launches": 4}]
    found = await judged(
        {"ready": True}, record(), verdict={**VERDICT, "costs": costs}, flops_per_byte=2.0, launch_bytes=300.0
    )
    assert found.metrics["speedup_proxy"] == pytest.approx((600 / 2 + 4 * 300) / 1000)


async def test_a_wrong_output_earns_nothing_however_fast() -> None:
    found = await judged({"ready": True}, record(), verdict={**VERDICT, "wrong": ["inputs 1: differs"]})
    assert (found.reward, found.outcome, found.flags) == (0.0, False, ("wrong",))
    assert found.metrics["speedup_proxy"] == 0


async def test_a_record_that_is_not_signed_is_none() -> None:
    forged = b"0" * 64 + b" " + json.dumps(record()).encode() + b"\n"
    found = await judged({"ready": True}, json.dumps(record()).encode() + b"\n", forged)
    assert (found.reward, found.outcome, found.flags) == (0.0, False, ("ended_early",))


async def test_outputs_that_are_not_what_the_model_gave_are_forged() -> None:
    other = record()
    other["calls"][0]["outputs"][0]["sha256"] = "0" * 64
    assert (await judged({"ready": True}, other)).flags == ("forged_outputs",)


async def test_a_solution_that_hangs_or_raises_has_itself_to_blame_and_a_reference_that_does_not_run_has_not() -> None:
    assert (await judged({"ready": True}, code=None)).flags == ("timed_out",)
    raised = await judged({"ready": True}, record(error="Traceback: boom", flags=["host_reads"]))
    assert (raised.reward, raised.flags, raised.details["wrong"]) == (
        0.0,
        ("raised", "host_reads"),
        ["Traceback: boom"],
    )
    with pytest.raises(InfraError, match=r"could not be started.*some error"):
        await judged(code=1)


@pytest.mark.parametrize(
    ("left", "flag"),
    [
        ({}, "no_solution"),
        ({"solution_py": b"<symlink>"}, "no_solution"),
        ({"solution_py": b"import os"}, "refused_code"),
        ({"solution_py": b"\xff\x00"}, "refused_code"),
        ({"solution_py": b"#" * (300 << 10)}, "refused_code"),
    ],
)
async def test_what_was_left_is_looked_at_before_any_of_it_runs(left: dict[str, bytes], flag: str) -> None:
    found = await task(ROW).verify(Box(**left), AgentResult(True))  # type: ignore[arg-type]
    assert (found.reward, found.outcome, found.flags) == (0.0, False, (flag,))


async def test_no_code_of_the_solution_is_in_the_sandbox_that_compares() -> None:
    boxes = Boxes(
        lambda program, stdin: Completed(
            0, signed(stdin, {"ready": True}, record()) if program == "worker" else json.dumps(VERDICT).encode()
        )
    )
    await task(ROW, boxes).judged("MARK = 1")
    worker, referee = boxes.opened
    assert worker.written["/box/run/solution.py"] == b"MARK = 1"
    assert not any(b"MARK = 1" in text for text in referee.written.values())
    assert referee.written["/box/run/outputs/0-0-0"] == b"output"


# ---------------------------------------------------------------- comparing and measuring


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        (torch.ones(3) + 5e-5, torch.ones(3), None),
        (torch.ones(3) + 5e-4, torch.ones(3), "largest difference 0.0005"),
        (torch.full((3,), 1001.0), torch.full((3,), 1000.0), "largest difference 1"),
        (torch.ones(3, dtype=torch.bfloat16) * 1.0078, torch.ones(3, dtype=torch.bfloat16), None),
        (torch.ones(2), torch.ones(3), "its shape is [2], not [3]"),
        (torch.ones(3).double(), torch.ones(3), "its type is torch.float64"),
        (torch.tensor([1.0, float("nan")]), torch.ones(2), "1 of 2 elements are NaN"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), None),
        (torch.tensor([float("inf")]), torch.tensor([float("inf")]), None),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 elements differ"),
    ],
)
def test_outputs_are_compared_by_their_type(found: torch.Tensor, wanted: torch.Tensor, said: str | None) -> None:
    assert (difference(found, wanted) or "").startswith(said or "")
    assert (difference(found, wanted) is None) == (said is None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.bool])
def test_fresh_memory_is_poisoned(dtype: torch.dtype) -> None:
    with Meter(poison=True) as meter:
        made = [torch.empty(4, dtype=dtype), torch.ones(4, dtype=dtype).new_empty(4)]
        made.append(torch.empty_like(made[0]))
    for one in made:
        assert bool(one.isnan().all()) if one.is_floating_point() else torch.equal(one, poisoned(one.clone()))
    assert not meter.computed


def test_views_are_free_movement_costs_and_computing_is_named() -> None:
    x = torch.ones(4, 8)
    with Meter() as meter:
        x.t()[1:3].reshape(8).unsqueeze(0)
    free = meter.as_json()
    assert free["computed"] == {}
    with Meter() as meter:
        x.t().contiguous()
    assert (meter.bytes, dict(meter.computed)) == (2 * 4 * 32, {})
    with Meter() as meter:
        x @ x.t()
    assert (meter.bytes, meter.flops, dict(meter.computed)) == (4 * (32 + 32 + 16), 2 * 4 * 4 * 8, {"mm": 1})
    with Meter() as meter:
        x.sum().item()
    assert set(meter.computed) == {"sum", "_local_scalar_dense"}


def test_all_streams_are_waited_for_before_the_clock_starts_and_before_it_stops() -> None:
    said: list[str] = []
    ticks: Iterator[int] = iter(range(0, 10**12, 10**6))

    def clock() -> int:
        said.append("clock")
        return next(ticks)

    found = seconds(
        lambda: said.append("call"),
        prepare=lambda number: said.append(f"prepare {number}"),
        wait=lambda: said.append("wait"),
        clock=clock,
        warm_up=1,
        repeats=2,
    )
    once = ["wait", "clock", "call", "wait", "clock"]
    assert said == ["prepare 0", *once, "prepare 1", *once, "prepare 2", *once]
    assert found == pytest.approx(1e-3)


def test_what_timed_calls_give_is_kept_to_be_compared() -> None:
    sets = [[torch.full((4,), float(n)), n] for n in range(3)]
    out = torch.empty(4)

    def reuses(x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.add(x, n, out=out)

    kept: dict[int, torch.Tensor] = {}

    def remembers(x: torch.Tensor, n: int) -> torch.Tensor:
        return kept.setdefault(x.data_ptr(), x + n)

    _, given = on_device(reuses, sets, "cpu", warm_up=2, repeats=5)
    assert [one[0].item() for one in given] == [0.0, 2.0, 4.0]
    _, given = on_device(remembers, sets, "cpu", warm_up=2, repeats=5)
    assert [one[0].item() for one in given] == [0.0, 0.0, 0.0]


def test_a_call_that_was_left_out_is_wrong(tmp_path: Path) -> None:
    found = compare(PROBLEM.reference, [{"ROWS": 2, "COLS": 8}], [1, 2], "cpu", [], tmp_path)
    assert found["wrong"] == ["shape {'ROWS': 2, 'COLS': 8}: it was not called with all inputs"]


# ---------------------------------------------------------------- the whole


class Local:
    def __init__(self, provider: LocalProvider) -> None:
        self.provider = provider

    def sandbox(self, name: str) -> Any:
        return self.provider

    def sandbox_options(self, name: str) -> dict[str, Any]:
        return {}


@pytest.mark.slow
@pytest.mark.usefixtures("confined")
async def test_in_a_sandbox_the_oracle_succeeds_and_mistakes_do_not() -> None:
    pytest.importorskip("triton")
    row = sample(built_in()["softmax"], [{"ROWS": 3, "COLS": 50}, {"ROWS": 4, "COLS": 96}])
    async with LocalProvider({"warm": 0}) as provider:
        made = task(row, Local(provider), provider="local")
        checked = await check_sample(0, row, made.config, Local(provider), runs=1)
    assert checked.problems == ()
    assert checked.rewards == {"nothing": 0.0, "oracle": 1.0, "wrong_result": 0.0, "reference_called": 0.0}


@pytest.mark.slow
@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize(
    ("text", "flag", "said"),
    [
        ("open('../run/reference.py')", "raised", "No such file or directory: '../run/reference.py'"),
        ("import uniagent.tasks.kernel.problems", "raised", "No module named 'uniagent.tasks.kernel.problems'"),
        ("import os\nos.write(1, b'{}')\nos.write(3, b'0 {}')\nos._exit(0)", "ended_early", "exit status 0"),
    ],
)
async def test_in_a_sandbox_there_is_nothing_to_read_and_a_process_that_ends_itself_has_no_record(
    text: str, flag: str, said: str
) -> None:
    """Past the scan, which refuses all of these."""
    pytest.importorskip("triton")
    async with LocalProvider({"warm": 0}) as provider:
        found = await task(ROW, Local(provider), provider="local").judged(text)
    assert (found.reward, found.outcome, found.flags) == (0.0, False, (flag,))
    assert said in found.details["wrong"][0]


TRY = """
import importlib.util, torch
from reference import Model, get_inputs
from solution import ModelNew
inputs = get_inputs()
print(torch.allclose(Model()(*inputs), ModelNew()(*inputs), atol=1e-4), importlib.util.find_spec("uniagent"))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("confined")
async def test_an_agent_can_try_its_kernel_in_its_sandbox_and_finds_no_answers_there() -> None:
    pytest.importorskip("triton")
    async with LocalProvider({"warm": 0}) as provider:
        made = task(ROW, Local(provider), provider="local")
        async with open_sandbox(made.config, Local(provider)) as box:
            await made.setup(box)
            await box.write(box.workdir / "solution.py", PROBLEM.kernel.encode())
            await box.write(box.workdir / "try.py", TRY.encode())
            done = await (await box.shell()).run("python3 try.py", timeout_s=120)
    assert done.output.decode().splitlines()[-1] == "True None"
