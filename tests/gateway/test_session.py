"""A gateway session without sockets: budgets, sampling truth, cancelling, n > 1, the record."""

from __future__ import annotations

import json

import numpy as np
import pytest
import trio
from gateway_kit import END, Model, Say, call_text, codec, decode, encode, gateway_of, inline, session_of

from uniagent.adapters.engines.scripted import Answer, ScriptedEngine
from uniagent.engine.errors import UserError
from uniagent.engine.gateway.codec import Break
from uniagent.engine.gateway.record import replay
from uniagent.engine.gateway.session import SessionParts
from uniagent.engine.gateway.sessions import Gateway
from uniagent.engine.messages import Delta, Message, ModelCall, Problem
from uniagent.engine.ports import SessionSampling

HI = Message("user", "hi there")
RUN = ({"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}},)


async def test_a_reply_has_text_reasoning_calls_and_true_usage():
    text = "<think>\nhm\n</think>\n\nok\n" + call_text("run", '{"cmd": "ls"}')
    model = Model([text])
    session = session_of(model)
    reply = await session.ask(ModelCall((HI,), tools=RUN))
    assert (reply.text, reply.reasoning, reply.finish) == ("ok", "hm", "tool_calls")
    assert reply.calls[0].name == "run"
    assert reply.calls[0].value == {"cmd": "ls"}
    assert reply.calls[0].id
    assert reply.usage.prompt_tokens == len(encode(model.prompts[0]))
    assert reply.usage.completion_tokens == len(Say(text).answer().token_ids)
    assert reply.usage.reasoning_tokens == len(encode("hm"))


async def test_turns_follow_each_other_and_everything_is_trained():
    session = session_of(["one", "two", "three"])
    messages = [HI]
    for _ in range(3):
        reply = await session.ask(ModelCall(tuple(messages)))
        messages += [reply.message(), Message("user", "go on")]
    export = await session.finish(1.0)
    (chain,) = export.trajectories
    assert export.fates == ("live",) * 3
    assert export.ledger.sampled == export.ledger.trainable == int(chain.loss_mask.sum())
    assert decode(chain.token_ids[chain.loss_mask]) == f"one{END}two{END}three{END}"


async def test_turn_numbers_are_distinct_and_repeatable():
    for _ in range(2):
        model = Model(["a", "b", "c", "d"])
        session = session_of(model)
        await session.complete(ModelCall((HI,), n=3))
        await session.complete(ModelCall((HI, Message("assistant", "a"), HI)))
        assert sorted(s.turn for s in model.samplings) == [0, 1, 2, 3]
        assert model.samplings[-1].turn == 3


async def test_siblings_are_all_live():
    session = session_of(["a", "b"])
    replies = await session.complete(ModelCall((HI,), n=2))
    session.delivered(replies)
    assert sorted(r.text for r in replies) == ["a", "b"]
    assert (await session.finish()).fates == ("live", "live")


# ---------------------------------------------------------------- sampling truth


ASKED = {"temperature": 0.1, "top_p": 0.2, "top_k": 3, "seed": 4}


async def test_in_training_the_sessions_sampling_counts_and_the_clients_is_recorded():
    model = Model(["a"])
    session = session_of(model, trust=True, sampling=SessionSampling(temperature=0.7, max_tokens=50))
    await session.ask(ModelCall((HI,), max_tokens=900, asked=ASKED))
    used = model.samplings[0]
    assert (used.temperature, used.top_p, used.top_k, used.seed, used.max_tokens) == (0.7, 1.0, 0, 0, 50)
    assert session.turns[0]["asked"] == {**ASKED, "max_tokens": 900}
    assert session.turns[0]["sampling"]["temperature"] == 0.7


async def test_a_lower_max_tokens_counts():
    model = Model(["a"])
    await session_of(model).ask(ModelCall((HI,), max_tokens=7))
    assert model.samplings[0].max_tokens == 7


async def test_a_trusted_client_decides_outside_training():
    model = Model(["a"])
    await session_of(model, trust=True, training=False).ask(ModelCall((HI,), asked=ASKED))
    used = model.samplings[0]
    assert (used.temperature, used.top_p, used.top_k, used.seed) == (0.1, 0.2, 3, 4)


def test_temperature_zero_is_refused_in_training_and_greedy_in_evaluation():
    with pytest.raises(UserError, match="temperature 0"):
        session_of([], sampling=SessionSampling(temperature=0.0))
    assert session_of([], sampling=SessionSampling(temperature=0.0), training=False).sampling.temperature == 0


# ---------------------------------------------------------------- budgets


async def test_a_prompt_beyond_the_budget_is_refused_and_changes_nothing():
    session = session_of(["a"], sampling=SessionSampling(max_total_tokens=20))
    with pytest.raises(Problem, match="prompt is too long") as refused:
        await session.ask(ModelCall((Message("user", "x" * 100),)))
    assert (refused.value.status, refused.value.kind) == (400, "context_length_exceeded")
    assert session.turns == ()
    assert (await session.finish()).fates == ()


async def test_what_is_left_of_the_budget_limits_the_answer():
    model = Model([Say("a" * 50)])
    session = session_of(model, sampling=SessionSampling(max_total_tokens=40))
    reply = await session.ask(ModelCall((HI,)))
    assert reply.finish == "length"
    assert reply.usage.prompt_tokens + reply.usage.completion_tokens == 40


async def test_the_engines_context_limits_too():
    session = session_of([Say("a" * 50)], context=40)
    reply = await session.ask(ModelCall((HI,)))
    assert reply.usage.prompt_tokens + reply.usage.completion_tokens == 40
    with pytest.raises(Problem, match="prompt is too long"):
        await session.ask(ModelCall((HI, reply.message(), HI)))


async def test_the_number_of_generations_is_limited():
    session = session_of(["a", "b", "c"], sampling=SessionSampling(max_generations=2))
    await session.ask(ModelCall((HI,)))
    with pytest.raises(Problem, match="max_generations") as refused:
        await session.complete(ModelCall((HI,), n=2))
    assert refused.value.status == 403
    await session.ask(ModelCall((HI,)))
    with pytest.raises(Problem, match="max_generations"):
        await session.ask(ModelCall((HI,)))


# ---------------------------------------------------------------- ending early


def slow(model: Model) -> Gateway:
    """A model that pauses between tokens."""

    class Slow(ScriptedEngine):
        async def generate(self, prompt, sampling, *, session, on_tokens=None, on_abort=None):
            def heard(ids):
                return on_tokens(ids) if on_tokens else None

            return await super().generate(prompt, sampling, session=session, on_tokens=heard, on_abort=on_abort)

    return Gateway(SessionParts(codec(), Slow(model), inline), secret=b"x")


async def test_cancelling_commits_what_was_sampled_as_aborted(autojump_clock):
    session = slow(Model([Say("abcdef"), "fine"])).open("s", SessionSampling())
    seen: list[Delta] = []
    with trio.CancelScope() as scope:

        def cancel_at_three(delta: Delta) -> None:
            seen.append(delta)
            if len(seen) == 3:
                scope.cancel()

        await session.complete(ModelCall((HI,)), cancel_at_three)
    assert scope.cancelled_caught
    assert session.running == 0
    reply = await session.ask(ModelCall((HI,)))
    assert reply.text == "fine"
    export = await session.finish()
    assert export.fates == ("aborted", "live")
    assert export.ledger.discarded == {"aborted": 3}


async def test_cancelling_before_the_first_token_changes_nothing(autojump_clock):
    session = session_of([Say("abc", delay_s=100)])
    with trio.move_on_after(5) as scope:
        await session.ask(ModelCall((HI,)))
    assert scope.cancelled_caught
    assert session.turns == ()
    assert (await session.finish()).fates == ()


async def test_a_session_deadline_ends_generations_in_bounded_time(autojump_clock):
    session = session_of([Say("abc", delay_s=1000)])
    start = trio.current_time()
    with trio.move_on_after(5):
        await session.ask(ModelCall((HI,)))
    assert trio.current_time() - start < 6


async def test_finishing_ends_what_still_runs(autojump_clock):
    session = session_of([Say("abc", delay_s=1000)])
    problems: list[Problem] = []

    async def ask() -> None:
        try:
            await session.ask(ModelCall((HI,)))
        except Problem as problem:
            problems.append(problem)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(1)
        export = await session.finish(0.5)
    assert [p.status for p in problems] == [499]
    assert export.ledger.sampled == 0
    assert await session.finish(0.9) is export
    assert session.reward == 0.5
    with pytest.raises(Problem, match="is finished") as refused:
        await session.ask(ModelCall((HI,)))
    assert refused.value.status == 410


async def test_stop_strings_end_the_generation_and_cut_it():
    session = session_of([Say("abc STOP def")])
    reply = await session.ask(ModelCall((HI,), stop=("STOP",)))
    assert (reply.text, reply.finish, reply.stop) == ("abc ", "stop", "STOP")
    export = await session.finish()
    assert export.ledger.discarded.get("stop_overrun", 0) > 0
    assert export.ledger.trainable > 0


async def test_engine_problems_go_up_and_leave_no_trace():
    session = session_of([])
    with pytest.raises(Problem, match="no answer left") as refused:
        await session.ask(ModelCall((HI,)))
    assert refused.value.status == 409
    with pytest.raises(Problem, match="no answer left"):
        await session.complete(ModelCall((HI,), n=2))
    assert session.turns == ()
    assert session.running == 0


# ---------------------------------------------------------------- streaming, counting, the record


async def test_deltas_add_up_to_the_reply():
    text = (
        "<think>\nhm\n</think>\n\nsome text\n" + call_text("run", '{"cmd": "ls -la"}') + "\n" + call_text("run", "{}")
    )
    session = session_of([text])
    deltas: list[Delta] = []
    (reply,) = await session.complete(ModelCall((HI,), tools=RUN), deltas.append)
    assert "".join(d.text for d in deltas) == reply.text
    assert "".join(d.reasoning for d in deltas) == reply.reasoning
    for i, call in enumerate(reply.calls):
        mine = [d for d in deltas if d.call_index == i]
        assert (mine[0].call_id, mine[0].call_name) == (call.id, call.name)
        assert "".join(d.arguments for d in mine) == call.arguments


async def test_counting_changes_nothing():
    session = session_of(["a"])
    counted = await session.count(ModelCall((HI,)))
    reply = await session.ask(ModelCall((HI,)))
    assert reply.usage.prompt_tokens == counted
    assert len(session.turns) == 1


async def test_long_new_content_goes_through_the_offload_port():
    calls = []

    async def offload(fn, *args):
        calls.append(fn)
        return fn(*args)

    parts = SessionParts(codec(), ScriptedEngine(Model(["a", "b"])), offload)
    session = Gateway(parts).open("s", SessionSampling())
    reply = await session.ask(ModelCall((HI,)))
    assert calls == []
    await session.ask(ModelCall((HI, reply.message(), Message("user", "x" * 5000))))
    assert len(calls) == 1


async def test_a_break_starts_a_new_chain_in_which_old_answers_are_context(monkeypatch):
    session = session_of(["one", "two"])
    reply = await session.ask(ModelCall((HI,)))
    real = type(codec()).delta

    def breaks_after_an_anchor(self, call, pending, anchor):
        if anchor is not None:
            raise Break("the template changed its mind")
        return real(self, call, pending, anchor)

    monkeypatch.setattr(type(codec()), "delta", breaks_after_an_anchor)
    await session.ask(ModelCall((HI, reply.message(), Message("user", "more"))))
    assert session.breaks == 1
    export = await session.finish()
    assert export.fates == ("live", "live")
    assert export.ledger.trainable == export.ledger.sampled
    assert len(export.trajectories) == 2
    second = next(t for t in export.trajectories if "two" in decode(t.token_ids[t.loss_mask]))
    assert decode(second.token_ids).count("one") == 1
    assert decode(second.token_ids[second.loss_mask]) == f"two{END}"


async def test_the_record_gives_every_raw_request_again_and_repeats_none():
    session = session_of(["a", "b", "c", "d"])
    raws = []
    messages = [{"role": "user", "content": "hi there"}]
    tree = [HI]
    for i in range(4):
        raw = {"model": "m", "messages": list(messages), "tools": [{"x": 1}], "user": str(i)}
        raws.append(raw)
        reply = await session.ask(ModelCall(tuple(tree), raw=raw))
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "more"}]
        tree += [reply.message(), Message("user", "more")]
    assert replay(session.turns) == raws
    assert json.loads(json.dumps(session.turns))[3]["request"]["extend"] == {"messages": [5, messages[5:7]]}
    assert "tools" not in session.turns[1]["request"].get("set", {})


async def test_keys_are_known_before_a_session_opens_and_differ():
    gateway = gateway_of([])
    runtime = gateway.runtime("one")
    session = gateway.open("one", SessionSampling())
    assert session.endpoint().api_key == runtime["api_key"]
    assert gateway.by_key(runtime["api_key"]) is session
    assert gateway.by_key(runtime["base_url"].rpartition("/")[2]) is session
    assert runtime["api_key"] != gateway.runtime("two")["api_key"]


async def test_the_store_limits_sessions_and_frees_places():
    gateway = gateway_of([], max_sessions=1)
    gateway.open("a", SessionSampling())
    with pytest.raises(Problem) as full:
        gateway.open("b", SessionSampling())
    assert full.value.status == 429
    await gateway.finish("a")
    gateway.open("b", SessionSampling())
    with pytest.raises(Problem) as twice:
        gateway.open("b", SessionSampling())
    assert twice.value.status == 409
    with pytest.raises(Problem) as unknown:
        gateway.get("a")
    assert unknown.value.status == 404


async def test_versions_and_logprobs_reach_the_trajectory():
    ids = np.array([40, 41, 42], np.int32)

    def respond(prompt, sampling, session):
        return Answer(ids, np.array([-0.5, -1.0, -1.5], np.float32))

    session = session_of(respond)
    await session.ask(ModelCall((HI,)))
    (chain,) = (await session.finish()).trajectories
    assert chain.logprobs[chain.loss_mask].tolist() == [-0.5, -1.0, -1.5]
    assert chain.versions[chain.loss_mask].tolist() == [0, 0, 0]
