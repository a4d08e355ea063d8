"""The record loses no sampled token: what stands in no trajectory is kept with its turn."""

from __future__ import annotations

from gateway_kit import session_of

from uniagent.engine.messages import Message, ModelCall

HI = Message("user", "hi there")


async def test_an_answer_that_stands_in_a_trajectory_is_recorded_once():
    session = session_of(["one"])
    await session.ask(ModelCall((HI,)))
    await session.finish()
    (turn,) = session.turns
    assert turn["reply"]["text"] == "one"
    assert "tokens" not in turn


async def test_a_retried_answer_keeps_its_tokens_in_the_record():
    session = session_of(["one", "two"])
    await session.ask(ModelCall((HI,)))
    await session.ask(ModelCall((HI,)))
    export = await session.finish()
    assert export.fates == ("retried", "live")
    first, second = session.turns
    assert first["reply"]["text"] == "one"
    assert len(first["tokens"]["ids"]) == len(first["tokens"]["logprobs"]) == export.ledger.discarded["retried"]
    assert first["tokens"]["versions"] == [[0, 0, len(first["tokens"]["ids"])]]
    assert "tokens" not in second
