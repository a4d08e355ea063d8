"""Sessions that end are freed at once, and full collections wait for quiet moments."""

from __future__ import annotations

import gc
import weakref

import pytest
import trio
from gateway_kit import call_text, gateway_of

from uniagent.engine import collector
from uniagent.engine.messages import Message, ModelCall
from uniagent.engine.ports import SessionSampling

RUN = ({"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}},)


async def test_a_finished_session_is_freed_without_the_collector():
    gateway = gateway_of(["one", call_text("run", "{}"), "three", "four"])
    session = gateway.open("s", SessionSampling())
    messages = [Message("user", "hi")]
    for _ in range(3):
        reply = await session.ask(ModelCall(tuple(messages), tools=RUN))
        messages += [reply.message(), Message("user", "go on")]
    await session.ask(ModelCall((Message("user", "other"), messages[1], Message("user", "x")), tools=RUN))
    nodes = [weakref.ref(n) for n in session.tree.history.nodes]
    gc.collect()
    gc.disable()
    try:
        await gateway.finish("s", 1.0)
        del session
        assert [n() for n in nodes if n() is not None] == []
    finally:
        gc.enable()


@pytest.fixture
def _restored():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("_restored")
async def test_full_collections_wait_until_nothing_runs(autojump_clock, monkeypatch):
    collector.quiet_only()
    assert gc.get_threshold()[2] == collector.NEVER
    made: list[float] = []
    monkeypatch.setattr(gc, "collect", lambda: made.append(trio.current_time()))
    busy_until = trio.current_time() + 300
    start = trio.current_time()
    with trio.move_on_after(400):
        await collector.watch(lambda: trio.current_time() < busy_until)
    assert [round((t - start) / 10) * 10 for t in made] == [300, 360]
    made.clear()
    with trio.move_on_after(2 * collector.LATEST_S + 10):
        await collector.watch(lambda: True)
    assert len(made) == 2
