"""The judge of statements: what most answers say counts, and how far the answers agree is told."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import httpx
import pytest
import trio
import trio.testing

from uniagent.engine.errors import UserError
from uniagent.tasks.check_judge import Opinion, Reading, agreement, fleiss_kappa, opinion, read
from uniagent.tasks.endpoint import Endpoint

TESTS = {"test_a": "assert f(1) == 2", "test_b": "assert f(2) == 3"}


def answer(a: bool, b: bool, *contradictions: str) -> str:
    tests = {name: {"traced": traced, "sentence": "It adds one."} for name, traced in (("test_a", a), ("test_b", b))}
    return f"Here it is:\n```json\n{json.dumps({'tests': tests, 'contradictions': list(contradictions)})}\n```"


@asynccontextmanager
async def endpoint(answers: Iterator[str], seen: list[Any], status: int = 200) -> AsyncIterator[str]:
    """A chat-completions server on loopback that gives these answers."""

    async def serve(stream: trio.SocketStream) -> None:
        async with stream:
            talk = h11.Connection(h11.SERVER)
            body = b""
            while True:
                event = talk.next_event()
                if event is h11.NEED_DATA:
                    talk.receive_data(await stream.receive_some())
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    break
            seen.append(json.loads(body))
            message = {
                "choices": [{"message": {"content": next(answers)}}],
                "usage": {"prompt_tokens": 7, "completion_tokens": 3},
            }
            said = json.dumps(message).encode()
            headers = [("content-length", str(len(said))), ("connection", "close")]
            await stream.send_all(talk.send(h11.Response(status_code=status, headers=headers)) or b"")
            await stream.send_all(talk.send(h11.Data(data=said)) or b"")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        yield f"http://127.0.0.1:{port}"
        nursery.cancel_scope.cancel()


async def asked(*answers: str, status: int = 200) -> tuple[Opinion, list[Any]]:
    seen: list[Any] = []
    async with endpoint(itertools.cycle(answers), seen, status) as url, httpx.AsyncClient() as client:
        said = await opinion(client, "f adds one.", TESTS, judge=Endpoint(f"{url}/v1", "judge"), runs=3)
    return said, seen


async def test_what_most_answers_find_is_found() -> None:
    said, seen = await asked(answer(True, False), answer(True, False, "adds or takes away"), answer(True, True))
    assert said.untraced == ("test_b",)
    assert said.contradictions == ()
    assert (said.tokens, said.unreadable) == (30, 0)
    prompt = seen[0]["messages"][0]["content"]
    assert "f adds one." in prompt
    assert "assert f(2) == 3" in prompt
    assert sorted(body["seed"] for body in seen) == [0, 1, 2]


async def test_contradictions_need_a_majority_and_talk_without_json_is_counted() -> None:
    said, _ = await asked(answer(True, True, "adds or takes away"), "I cannot say.", answer(True, True, "adds or not"))
    assert len(said.contradictions) == 1
    assert said.unreadable == 1
    assert said.untraced == ()


async def test_an_endpoint_that_refuses_is_a_mistake_the_user_can_mend() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:  # of the endpoint's own nursery
        await asked(answer(True, True), status=404)
    assert caught.group_contains(UserError, match="refuses: status 404")


async def test_an_endpoint_that_stays_away_is_one_too(autojump_clock: trio.testing.MockClock) -> None:
    away = Endpoint("http://127.0.0.1:1", "judge", retries=1)
    async with httpx.AsyncClient() as client:
        with pytest.raises(UserError, match=r"2 attempts.*check the address"):
            await opinion(client, "f adds one.", TESTS, judge=away, runs=2)


@pytest.mark.parametrize("text", ["", "{}", '{"tests": {"test_a": {"traced": true}}}', '{"tests": []}', "{not json}"])
def test_an_answer_that_does_not_cover_every_test_cannot_be_read(text: str) -> None:
    assert read(text, list(TESTS)) is None


def test_fleiss_kappa_of_the_textbook_table() -> None:
    """14 raters, 10 subjects, 5 categories: Fleiss 1971's example as reprinted in the literature, kappa 0.210."""
    table = [(0, 0, 0, 0, 14), (0, 2, 6, 4, 2), (0, 0, 3, 5, 6), (0, 3, 9, 2, 0), (2, 2, 8, 1, 1), (7, 7, 0, 0, 0),
             (3, 2, 6, 3, 0), (2, 5, 3, 2, 2), (6, 5, 2, 1, 0), (0, 2, 2, 3, 7)]  # fmt: skip
    rows = [Counter({str(category): n for category, n in enumerate(row)}) for row in table]
    assert fleiss_kappa(rows) == pytest.approx(0.210, abs=5e-4)


def test_agreement_is_one_when_all_agree_and_about_nothing_when_they_guess() -> None:
    def said(*votes: tuple[bool, bool]) -> Opinion:
        return Opinion((), (), tuple(Reading({"test_a": a, "test_b": b}) for a, b in votes))

    sure = agreement([said((True, False), (True, False), (True, False))])
    assert sure["fleiss_kappa"] == pytest.approx(1.0)
    guess = agreement([said((True, False), (False, True)), said((True, True), (False, False))])
    assert guess["fleiss_kappa"] == pytest.approx(-1.0)
    alike = agreement([said((True, True), (True, True))])
    assert alike["fleiss_kappa"] is None
    assert alike["pairs_agree"] == 1.0
    assert agreement([said((True, True))])["fleiss_kappa"] is None
