"""Sessions that end are freed at once, and full collections wait for quiet moments."""

from __future__ import annotations

import gc
import weakref

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


async def test_full_collections_wait_until_nothing_runs(autojump_clock, monkeypatch):
    made: list[float] = []
    thresholds = gc.get_threshold()
    monkeypatch.setattr(gc, "collect", lambda: made.append(trio.current_time()))
    start = trio.current_time()
    busy_until = start + 300
    with trio.move_on_after(400):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collector.at_quiet_moments, lambda: trio.current_time() < busy_until)
            await trio.sleep(1)
            assert gc.get_threshold()[2] == collector.NEVER
    assert [round((t - start) / 10) * 10 for t in made] == [0, 300, 360]
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0
    made.clear()
    with trio.move_on_after(2 * collector.LATEST_S + 10):
        await collector.at_quiet_moments(lambda: True)
    assert len(made) == 3
