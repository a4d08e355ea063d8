"""What harnesses do, and what must become of the tokens: every behaviour through all three dialects, over sockets."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import trio
from attrs import evolve, field, frozen
from gateway_kit import END, Model, Say, call_text, client_of, decode, session_of
from harness_wire import WIRES, Answered, Call, ChatWire, Harness, Result, Said, Style

from uniagent.engine.gateway.export_json import export_json
from uniagent.engine.gateway.record import replay
from uniagent.engine.registry import load as registered
from uniagent.engine.trajectory.nodes import TreePolicy

SYSTEM = Said("You are an agent that works in a directory.", "system")
TASK = Said("make the file")
MORE = Said("now another one please")
LOOK = "Let me look.  \n" + call_text("run", '{"cmd": "ls", "n": 1}')
THINK = "<think>\n I should look. \n</think>\n\n"
TWO = call_text("run", '{"cmd": "cat a.txt"}') + "\n" + call_text("run", '{"cmd": "cat \\u00e9.txt"}')
DONE = "All is done. "
Done = dict[str, Any]


def results(answer: Answered, *texts: str) -> list[Result]:
    return [Result(c.id, t) for c, t in zip(answer.calls, texts, strict=True)]


def trained(done: Done) -> list[str]:
    """The trained text of each chain."""
    out = []
    for chain in done["trajectories"]:
        out.append(decode(t for t, m in zip(chain["token_ids"], chain["loss_mask"], strict=True) if m))
    return out


def balanced(done: Done) -> None:
    ledger = done["ledger"]
    assert ledger["sampled"] == ledger["trainable"] + ledger["context"] + sum(ledger["discarded"].values())
    assert ledger["trainable"] == sum(sum(t["loss_mask"]) for t in done["trajectories"])


def one_chain(done: Done, *texts: str) -> None:
    """Everything sampled is trained, in one chain, as it was sampled."""
    assert len(done["trajectories"]) == 1, done["fates"]
    assert set(done["fates"]) == {"live"}
    assert done["ledger"]["trainable"] == done["ledger"]["sampled"]
    assert trained(done) == ["".join(t + END for t in texts)]


@frozen
class Behaviour:
    name: str
    script: Sequence[str | Say]
    act: Callable[[Harness, Model], Awaitable[None]]
    check: Callable[[Done], None]
    policy: TreePolicy = field(factory=TreePolicy)
    dialects: tuple[str, ...] = tuple(WIRES)
    streams: tuple[bool, ...] = (False, True)


BEHAVIOURS: list[Behaviour] = []


def behaviour(script: Sequence[str | Say], check: Callable[[Done], None], **options: Any) -> Any:
    def add(act: Callable[[Harness, Model], Awaitable[None]]) -> Any:
        BEHAVIOURS.append(Behaviour(act.__name__, script, act, check, **options))
        return act

    return add


# ---------------------------------------------------------------- echoes


async def four_turns(h: Harness, edit: Callable[[Answered], Answered]) -> None:
    items: list[Any] = [SYSTEM, TASK]
    first = await h.ask(items)
    assert first.text.startswith("Let me look.")
    assert first.reasoning.strip() == "I should look."
    items += [edit(first), *results(first, "a.txt é.txt")]
    second = await h.ask(items)
    assert [json.loads(c.arguments)["cmd"] for c in second.calls] == ["cat a.txt", "cat é.txt"]
    items += [edit(second), *results(second, "aaa", "eee")]
    third = await h.ask(items)
    items += [edit(third), MORE]
    fourth = await h.ask(items)
    assert fourth.text.strip() == "bye"


SCRIPT = [THINK + LOOK, TWO, DONE, "bye"]
WHOLE = (THINK + LOOK, TWO, DONE, "bye")


def echo(name: str, style: Style = Style(), edit: Callable[[Answered], Answered] = lambda a: a) -> None:
    async def act(h: Harness, model: Model) -> None:
        await four_turns(evolve(h, style=style), edit)

    def check(done: Done) -> None:
        one_chain(done, *WHOLE)
        assert None not in done["trajectories"][0]["echo_tiers"][:3]

    BEHAVIOURS.append(Behaviour(name, SCRIPT, act, check))


def renumbered(answer: Answered) -> Answered:
    return evolve(answer, calls=tuple(evolve(c, id=f"x{c.id}"[:20]) for c in answer.calls))


def reordered(answer: Answered) -> Answered:
    def turn(text: str) -> str:
        return json.dumps(dict(reversed(json.loads(text).items())), indent=1)

    return evolve(answer, calls=tuple(evolve(c, arguments=turn(c.arguments)) for c in answer.calls))


echo("echoes verbatim")
echo("sends content as parts", Style(parts=True))
echo("adds null fields", Style(nulls=True))
echo("moves cache_control", Style(cache=True))
echo("trims reasoning", Style(reasoning="trimmed"))
echo("drops reasoning", Style(reasoning="dropped"))
echo("re-serialises arguments", Style(objects=True))
echo("reorders arguments", edit=reordered)
echo("trims white space", edit=lambda a: evolve(a, text=a.text.strip()))
echo("all of it at once", Style(True, True, True, "dropped", True), lambda a: evolve(a, text=a.text.strip()))


@behaviour(SCRIPT, lambda done: one_chain(done, *WHOLE))
async def rewrites_ids(h: Harness, model: Model) -> None:
    items: list[Any] = [SYSTEM, TASK]
    for texts in (["a.txt"], ["aaa", "eee"], []):
        answer = renumbered(await h.ask(items))
        items += [answer, *results(answer, *texts)]
    await h.ask([*items, MORE])


# ---------------------------------------------------------------- edits

BROKEN = 'I run it.\n<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"\n</tool_call>'
UNKNOWN = call_text("runn", '{"cmd": "ls"}')


def edited(done: Done) -> None:
    assert set(done["fates"]) == {"live"}
    assert len(done["trajectories"]) == 1
    assert done["ledger"]["trainable"] == done["ledger"]["sampled"]
    assert done["trajectories"][0]["echo_tiers"][0] == "edited"


@behaviour([BROKEN, DONE], edited)
async def repairs_the_json_of_a_call(h: Harness, model: Model) -> None:
    answer = await h.ask([TASK])
    call_id = answer.calls[0].id if answer.calls else "c1"
    fixed = evolve(answer, calls=(Call(call_id, "run", '{"cmd": "ls"}'),))
    await h.ask([TASK, fixed, Result(call_id, "a.txt")])


@behaviour([UNKNOWN, DONE], edited)
async def renames_a_call_that_names_no_tool(h: Harness, model: Model) -> None:
    answer = await h.ask([TASK])
    call = answer.calls[0]
    renamed = evolve(answer, calls=(Call(call.id, "invalid", json.dumps({"tool": "runn", "error": "no such tool"})),))
    await h.ask([TASK, renamed, Result(call.id, "there is no tool runn")])


@behaviour([LOOK, DONE], edited)
async def turns_calls_into_text(h: Harness, model: Model) -> None:
    answer = await h.ask([TASK])
    (call,) = answer.calls
    shown = [{"id": call.id, "name": call.name, "arguments": json.loads(call.arguments)}]
    text = f"{answer.text.strip()}\nCalling tools:\n{shown}"
    await h.ask([TASK, Answered(text), Said("Observation:\na.txt")])


def fates(*expected: str) -> Callable[[Done], None]:
    def check(done: Done) -> None:
        assert done["fates"] == list(expected)
        assert set(done["ledger"]["discarded"]) == {f for f in expected if f != "live"}

    return check


@behaviour(["My first idea for this.", DONE], fates("replaced", "live"))
async def replaces_the_last_answers_text(h: Harness, model: Model) -> None:
    await h.ask([TASK])
    await h.ask([TASK, Answered("Something else entirely was said here."), MORE])


@behaviour([LOOK, DONE], fates("dropped", "live"))
async def drops_an_answer_with_calls_and_goes_on(h: Harness, model: Model) -> None:
    await h.ask([TASK])
    await h.ask([TASK, MORE])


@behaviour([BROKEN, DONE], fates("refused", "live"))
async def drops_an_answer_whose_call_cannot_be_parsed(h: Harness, model: Model) -> None:
    await h.ask([TASK])
    await h.ask([TASK, Said("Your last call was not valid JSON. Try again.")])


@behaviour([BROKEN, DONE], lambda done: fates_only(done, "live", "live"), policy=TreePolicy(refused="train"))
async def drops_a_malformed_call_where_the_policy_trains_it(h: Harness, model: Model) -> None:
    await h.ask([TASK])
    await h.ask([TASK, Said("Your last call was not valid JSON. Try again.")])


def fates_only(done: Done, *expected: str) -> None:
    assert done["fates"] == list(expected)


@behaviour([call_text("run", '{"cmd": "rm -rf /"}'), DONE], fates("replaced", "live"))
async def changes_the_command_of_a_valid_call(h: Harness, model: Model) -> None:
    answer = await h.ask([TASK])
    call = answer.calls[0]
    guarded = evolve(answer, calls=(evolve(call, arguments='{"cmd": "echo blocked"}'),))
    await h.ask([TASK, guarded, Result(call.id, "blocked")])


@behaviour([LOOK, "second", "third"], lambda done: fates_only(done, "live", "live", "live"))
async def leaves_an_answer_out_and_brings_it_back(h: Harness, model: Model) -> None:
    first = await h.ask([TASK])
    second = await h.ask([TASK, MORE])
    await h.ask([TASK, first, *results(first, "a.txt")])
    assert second.text


# ---------------------------------------------------------------- broken connections


async def cut(h: Harness, items: Sequence[Any], *, after: int) -> bytes:
    """Sends a request and breaks the connection when so many bytes came."""
    body = h.wire.body(items, h.tools, h.style, stream=True)
    data = json.dumps(body).encode()
    client = h.client
    origin = client.server.gateway.origin
    path = client.base_url.removeprefix(origin) + h.wire.path
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    stream = await trio.open_tcp_stream("127.0.0.1", int(origin.rpartition(":")[2]))
    got = b""
    with trio.fail_after(10):
        await stream.send_all(head + data)
        while len(got) < after:
            got += await stream.receive_some(200)
        await stream.aclose()
        while client.session.running:
            await trio.sleep(0.002)
    return got


LONG = "abcdefgh " * 300


@behaviour([LONG, DONE], fates("undelivered", "live"), streams=(False,))
async def resends_after_the_connection_broke(h: Harness, model: Model) -> None:
    await cut(h, [TASK], after=1)
    await h.ask([TASK])


@behaviour([LONG, DONE], lambda done: fates_only(done, "live", "undelivered"), streams=(False,))
async def resends_before_the_dead_connection_is_noticed(h: Harness, model: Model) -> None:
    body = h.wire.body([TASK], h.tools, h.style, stream=True)
    data = json.dumps(body).encode()
    origin = h.client.server.gateway.origin
    path = h.client.base_url.removeprefix(origin) + h.wire.path
    stream = await trio.open_tcp_stream("127.0.0.1", int(origin.rpartition(":")[2]))
    await stream.send_all(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await stream.receive_some(200)  # it has begun to answer; the client reads no more
    await h.ask([TASK])
    await stream.aclose()
    with trio.fail_after(10):
        while h.client.session.running:
            await trio.sleep(0.002)


def prefix_kept(done: Done) -> None:
    assert done["fates"] == ["live", "live"]
    assert set(done["ledger"]["discarded"]) == {"undelivered"}
    (text,) = trained(done)
    head = text.removesuffix(f"{DONE}{END}")
    assert LONG.startswith(head)
    assert 0 < len(head) < len(LONG)
    provenance = done["trajectories"][0]["provenance"]
    assert "repair" in provenance


@behaviour([LONG, DONE], prefix_kept, streams=(False,))
async def takes_a_cut_stream_for_the_end(h: Harness, model: Model) -> None:
    got = await cut(h, [TASK], after=6000)
    kept = h.wire.read_part(got.decode(errors="ignore")).text
    assert LONG.startswith(kept)
    assert kept
    await h.ask([TASK, Answered(kept), MORE])


FIRST, SECOND = call_text("run", '{"cmd": "first"}'), call_text("run", '{"cmd": "second"}')


def first_call_kept(done: Done) -> None:
    assert done["fates"] == ["live", "live"]
    assert set(done["ledger"]["discarded"]) == {"undelivered"}
    (text,) = trained(done)
    assert text.startswith(FIRST)
    assert SECOND not in text
    (chain,) = done["trajectories"]
    whole = decode(chain["token_ids"])
    assert f"{text.removesuffix(DONE + END)}{END}" in whole  # closed by a repair
    assert "repair" in chain["provenance"]


async def cut_between_calls(h: Harness) -> Answered:
    got = await cut(h, [TASK], after=6000)
    kept = h.wire.read_part(got.decode(errors="ignore"))
    assert [json.loads(c.arguments) for c in kept.calls] == [{"cmd": "first"}]
    return kept


@behaviour([FIRST + LONG + SECOND, DONE], first_call_kept, streams=(False,))
async def goes_on_with_the_calls_of_a_cut_stream(h: Harness, model: Model) -> None:
    kept = await cut_between_calls(h)
    await h.ask([TASK, Answered(calls=kept.calls), Result(kept.calls[0].id, "ok")])


@behaviour([FIRST + LONG + SECOND, DONE], first_call_kept, streams=(False,))
async def goes_on_with_the_calls_and_the_text_of_a_cut_stream(h: Harness, model: Model) -> None:
    kept = await cut_between_calls(h)
    assert LONG.startswith(kept.text)
    assert kept.text
    await h.ask([TASK, kept, Result(kept.calls[0].id, "ok")])


# ---------------------------------------------------------------- retries and rewinds


@behaviour([LOOK, DONE], fates("retried", "live"))
async def resends_after_delivery(h: Harness, model: Model) -> None:
    await h.ask([TASK])
    answer = await h.ask([TASK])
    assert answer.text.startswith("All")


@behaviour([Say(LOOK, delay_s=0.1), Say(DONE, delay_s=0.1)], lambda done: fates_only(done, "live", "live"))
async def sends_the_same_request_twice_at_once(h: Harness, model: Model) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(h.ask, [TASK])


async def rewind(h: Harness, model: Model) -> None:
    items: list[Any] = [SYSTEM, TASK]
    for i in range(4):
        items += [await h.ask(items), Said(f"step {i} is accepted")]
    items = [*items[:2], Said("let us try that differently")]
    other = await h.ask(items)
    await h.ask([*items, other, MORE])


REWIND = ["first answer", "second answer", "third answer", "fourth answer", "other way", "done"]


def split(done: Done) -> None:
    assert done["fates"] == ["live"] * 6
    assert len(done["trajectories"]) == 2
    assert done["ledger"]["trainable"] == done["ledger"]["sampled"]
    assert {t["weight"] for t in done["trajectories"]} == {0.5}


BEHAVIOURS.append(Behaviour("rewinds_several_accepted_actions", REWIND, rewind, split))
BEHAVIOURS.append(
    Behaviour(
        "rewinds_where_the_policy_discards",
        REWIND,
        rewind,
        fates("rewound", "rewound", "rewound", "rewound", "live", "live"),
        policy=TreePolicy(rewind="discard"),
    )
)


# ---------------------------------------------------------------- other histories

SUMMARY = "A summary of all that was done so far in this directory, for whoever goes on."


def home_once(n: int) -> Callable[[Done], None]:
    """n chains; every sampled token is trained, once."""

    def check(done: Done) -> None:
        assert set(done["fates"]) == {"live"}, done["fates"]
        assert len(done["trajectories"]) == n
        assert done["ledger"]["trainable"] == done["ledger"]["sampled"]

    return check


@behaviour([LOOK, "it is there now", SUMMARY, "goes on"], home_once(3))
async def compacts(h: Harness, model: Model) -> None:
    items: list[Any] = [SYSTEM, TASK]
    first = await h.ask(items)
    items += [first, *results(first, "a.txt")]
    items += [await h.ask(items)]
    ask = [*items, Said("Summarise the conversation so far.")]
    summary = await h.ask(ask, tools=())
    await h.ask([SYSTEM, Said(f"What we did so far:\n{summary.text}"), MORE])


@behaviour([LOOK, "it is there now", SUMMARY, "goes on"], home_once(3))
async def compacts_and_keeps_later_turns(h: Harness, model: Model) -> None:
    items: list[Any] = [SYSTEM, TASK]
    first = await h.ask(items)
    items += [first, *results(first, "a.txt")]
    second = await h.ask(items)
    summary = await h.ask([*items, second, Said("Summarise the conversation so far.")], tools=())
    await h.ask([SYSTEM, Said(f"What we did so far:\n{summary.text}"), second, MORE])
    assert model.prompts[-1].count("it is there now") == 1


@behaviour([LOOK, "it is there now", "goes on"], home_once(2))
async def trims_a_tool_result(h: Harness, model: Model) -> None:
    first = await h.ask([TASK])
    second = await h.ask([TASK, first, *results(first, "a very long listing " * 20)])
    await h.ask([TASK, first, *results(first, "[trimmed]"), second, MORE])


def moved(done: Done) -> None:
    home_once(2)(done)
    second = done["trajectories"][1]
    sampled = [p == "sampled" for p in second["provenance"]]
    masked = [s and not m for s, m in zip(sampled, second["loss_mask"], strict=True)]
    assert decode(t for t, m in zip(second["token_ids"], masked, strict=True) if m) == LOOK + END


@behaviour([LOOK, "it is there now"], moved)
async def changes_tools_in_mid_run(h: Harness, model: Model) -> None:
    first = await h.ask([TASK])
    await h.ask([TASK, first, *results(first, "a.txt")], tools=("run", "fetch"))


@behaviour(
    [Say('I write it.\n<tool_call>\n{"name": "run", "arguments": {"cmd": "cat > a', length=True), LOOK, DONE],
    lambda done: truncated(done),
)
async def asks_again_with_more_room_after_a_truncated_call(h: Harness, model: Model) -> None:
    await h.ask([TASK], max=60)
    answer = await h.ask([TASK], max=6000)
    await h.ask([TASK, answer, *results(answer, "a.txt")])


def truncated(done: Done) -> None:
    assert done["fates"][0] in ("refused", "retried")
    assert done["fates"][1:] == ["live", "live"]
    assert len(done["trajectories"]) == 1


@behaviour([TWO, DONE], lambda done: one_chain(done, TWO, DONE))
async def returns_parallel_results_in_another_order(h: Harness, model: Model) -> None:
    answer = await h.ask([TASK])
    one, two = results(answer, "first result", "second result")
    await h.ask([TASK, answer, two, one])
    assert model.prompts[1].index("first result") < model.prompts[1].index("second result")


def by_prompt(*pairs: tuple[str, str]) -> Callable[..., Any]:
    """A model that answers by what the prompt contains."""

    def respond(prompt: Any, sampling: Any, session: str) -> Any:
        text = decode(prompt)
        for mark, answer in pairs:
            if mark in text:
                return Say(answer, delay_s=0.02).answer()
        raise AssertionError(text)

    return respond


# ---------------------------------------------------------------- ends


def repaired(done: Done) -> None:
    assert done["fates"] == ["live", "live"]
    (chain,) = done["trajectories"]
    at = chain["provenance"].index("repair")
    assert decode([chain["token_ids"][at]]) == END
    assert chain["loss_mask"][at] == 0
    assert trained(done) == [f"cut off in mid sen{DONE}{END}"]


@behaviour([Say("cut off in mid sen", length=True), DONE], repaired)
async def stops_at_the_length_limit_and_goes_on(h: Harness, model: Model) -> None:
    answer = await h.ask([TASK])
    assert answer.finish in ("length", "max_tokens", "max_output_tokens")
    await h.ask([TASK, answer, Said("go on")])


@behaviour([LOOK, "Making a file", DONE], fates("live", "side_call", "live"))
async def makes_a_title_beside_the_conversation(h: Harness, model: Model) -> None:
    first = await h.ask([SYSTEM, TASK])
    await h.ask([Said("You make titles.", "system"), Said("Title: make the file")], tools=())
    await h.ask([SYSTEM, TASK, first, *results(first, "a.txt")])


@behaviour([LOOK], lambda done: one_chain(done, LOOK))
async def sends_its_own_sampling_parameters(h: Harness, model: Model) -> None:
    await h.ask([TASK], temperature=0.0, top_p=0.1, max=500)
    used = model.samplings[0]
    assert (used.temperature, used.top_p, used.max_tokens) == (1.0, 1.0, 500)
    assert h.client.session.turns[0]["asked"]["temperature"] == 0.0


CASES = [
    pytest.param(b, dialect, stream, id=f"{b.name}-{dialect}{'-stream' * stream}")
    for b in BEHAVIOURS
    for dialect in b.dialects
    for stream in b.streams
]


@pytest.mark.parametrize(("case", "dialect", "stream"), CASES)
async def test_behaviour(case: Behaviour, dialect: str, stream: bool) -> None:
    model = Model(list(case.script))
    async with client_of(model, policy=case.policy) as client:
        await case.act(Harness(client, WIRES[dialect], stream), model)
        done = await client.finish()
        balanced(done)
        case.check(done)
        assert model.script == []
        if stream == case.streams[-1] and len(case.streams) == 2 and "at_once" not in case.name:
            assert await rebuilt(case, dialect, json.loads(json.dumps(client.session.turns))) == done


async def rebuilt(case: Behaviour, dialect: str, turns: Any) -> Done:
    """The same session again, from nothing but its record: raw requests, in order, and the same answers."""
    session = session_of(Model(list(case.script)), policy=case.policy)
    wire = registered("dialects", dialect)()
    for request in replay(turns):
        session.delivered(await session.complete(wire.parse(request)))
    return {"session_id": "s", **export_json(await session.finish(1.0), 1.0)}


@pytest.mark.parametrize("dialect", WIRES)
async def test_two_subagents_in_parallel_have_a_chain_each(dialect: str) -> None:
    pairs = (
        ("child one goes on", "one is done"),
        ("child two goes on", "two is done"),
        ("child one", LOOK),
        ("child two", TWO),
    )
    async with client_of(by_prompt(*pairs)) as client:
        h = Harness(client, WIRES[dialect])

        async def child(name: str) -> None:
            items: list[Any] = [Said(f"You are child {name}", "system"), TASK]
            answer = await h.ask(items)
            items += [answer, *results(answer, *["r"] * len(answer.calls)), Said(f"child {name} goes on")]
            await h.ask(items)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(child, "one")
            nursery.start_soon(child, "two")
        done = await client.finish()
        home_once(2)(done)
        assert sorted(trained(done)) == sorted([LOOK + END + "one is done" + END, TWO + END + "two is done" + END])


def test_every_row_is_there() -> None:
    assert len(BEHAVIOURS) >= 30
    assert ChatWire.path in {w.path for w in WIRES.values()}
