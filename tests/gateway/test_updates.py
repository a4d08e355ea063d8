"""A client that streams over HTTP while the policy changes under it, or while its answer moves to another node, sees
one uninterrupted answer; the record says which policy sampled which token."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
import trio
from gateway_kit import END, codec, encode, serving, sse

from uniagent.engine.gateway.session import SessionParts
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.ports import Capacity, Finish, Generation, KvPolicy, SessionSampling, VersionSpan
from uniagent.engine.rollout.gate import GatedEngine
from uniagent.engine.rollout.router import Router
from uniagent.engine.separate.moving import MovingEngine

TEXT = "one answer, sampled by two policies and heard as one"
ANSWER = encode(TEXT + END)
HALF = len(ANSWER) // 2
USER = {"role": "user", "content": "hi"}
BODIES = {
    "/v1/chat/completions": {"model": "m", "messages": [USER], "stream": True},
    "/v1/messages": {"model": "m", "max_tokens": 500, "messages": [USER], "stream": True},
    "/v1/responses": {"model": "m", "input": [USER], "stream": True},
}


class Engine:
    """Says the answer, from where the prompt has it; stands still at its half until ``go``, or until interrupted."""

    def __init__(self, start: dict[str, int]) -> None:
        self.version = 0
        self.half, self.go, self.stop = trio.Event(), trio.Event(), trio.Event()
        self._start = start  # of every session: how long its prompt was

    async def generate(self, prompt, sampling, *, session, on_tokens=None, on_abort=None):
        begun = len(prompt) - self._start.setdefault(session.partition("+")[0], len(prompt))
        versions: list[int] = []
        while begun + len(versions) < len(ANSWER) and not self.stop.is_set():
            at = begun + len(versions)
            if at == HALF and not begun:
                self.half.set()
                async with trio.open_nursery() as either:
                    for event in (self.go, self.stop):
                        either.start_soon(self._until, event, either.cancel_scope)
                if self.stop.is_set():
                    break
            versions.append(self.version)
            if on_tokens is not None:
                on_tokens(ANSWER[at : at + 1])
            await trio.lowlevel.checkpoint()
        ids = ANSWER[begun : begun + len(versions)]
        spans = tuple(VersionSpan(v, i, i + 1) for i, v in enumerate(versions))
        whole = begun + len(versions) == len(ANSWER)
        logprobs = np.full(len(ids), -1.0, np.float32)
        return Generation(ids, logprobs, spans, (), Finish.STOP if whole else Finish.ABORTED, 0)

    @staticmethod
    async def _until(event: trio.Event, scope: trio.CancelScope) -> None:
        await event.wait()
        scope.cancel()

    async def update(self, weights, version, kv):
        self.version = version

    def capacity(self):
        return Capacity(1 << 20, 1 << 20, 0, 0, 1 << 16)

    def resident(self, prompt):
        return 0


def text_of(path: str, data: Any) -> str:
    if data == "[DONE]":
        return ""
    if path == "/v1/chat/completions":
        return "".join(c["delta"].get("content") or "" for c in data["choices"])
    if path == "/v1/messages":
        return data.get("delta", {}).get("text", "") if data["type"] == "content_block_delta" else ""
    return data["delta"] if data["type"] == "response.output_text.delta" else ""


async def inline(function: Any, *args: Any) -> Any:
    return function(*args)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("path", list(BODIES))
async def test_a_client_that_streams_sees_one_answer(path: str, moves: bool) -> None:
    start: dict[str, int] = {}
    here, there = Engine(start), Engine(start)
    there.go.set()
    engine = MovingEngine(Router([here]), here.stop.set)

    async def elsewhere(prompt, sampling, session):
        return await there.generate(prompt, sampling, session=session)

    engine.elsewhere = elsewhere
    gate = GatedEngine(engine)
    gateway = Gateway(SessionParts(codec(), gate, inline), secret=b"secret")

    async def change() -> None:
        """In the middle of the answer."""
        await here.half.wait()
        await there.update(None, 1, KvPolicy.RECOMPUTE)
        await gate.update(None, 1, KvPolicy.RECOMPUTE)
        if moves:
            await engine.close()
        here.go.set()

    with trio.fail_after(30):
        async with (
            serving(gateway),
            httpx.AsyncClient(timeout=20, verify=False) as http,
            trio.open_nursery() as nursery,
        ):
            session = gateway.open("s", SessionSampling())
            nursery.start_soon(change)
            content = json.dumps(BODIES[path]).encode()
            answer = await http.post(session.address.base_url + path, content=content)
            events = [data for _, data in sse(answer.text)]
            export = await session.finish()
    assert answer.status_code == 200
    pieces = [piece for data in events if (piece := text_of(path, data))]
    assert "".join(pieces) == TEXT
    assert len(pieces) > 2
    ended = [d for d in events if d != "[DONE]" and (d.get("type") in ("message_stop", "response.completed"))]
    stops = [
        c["finish_reason"] for d in events if d != "[DONE]" for c in d.get("choices", ()) if c.get("finish_reason")
    ]
    assert len(ended) + len(stops) == 1
    (trajectory,) = export.trajectories
    assert export.fates == ("live",)
    versions = trajectory.versions[trajectory.versions >= 0].tolist()
    assert versions == [0] * HALF + [1] * (len(ANSWER) - HALF)
    assert engine.moved == moves
