"""What harnesses do, one function a behaviour, each with what must come of it. All run in ``test_behaviour`` and
again against every mutant."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from harness_kit import BAD, LS, RUN, SYS, USER, Answer, Harness, alter, check, result, tools

from uniagent.engine.messages import Call, Message
from uniagent.engine.trajectory.tree import TreePolicy
from uniagent.engine.trajectory.types import Provenance

SCENARIOS: list[Callable[[], None]] = []
ERROR = Message("user", "format error")


def scenario(fn: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS.append(fn)
    return fn


def fates(h: Harness) -> list[str]:
    check(h)
    return h.fates()


def user(text: str) -> Message:
    return Message("user", text)


# ---------------------------------------------------------------- echoes


def echoed(
    change: Callable[[Message], Message], answer: Answer | None = None, **policy: str
) -> tuple[Harness, str | None]:
    """A turn whose answer comes back changed, and one more."""
    h = Harness(TreePolicy(**policy))
    a = h.finish(h.start([SYS, USER]), answer or Answer("go  \n", (("run", '{"cmd": "ls", "n": 1.0}'),), "hm so"))
    h.ask([SYS, USER, change(a.message), result(a)], "done")
    check(h)
    return h, h.tree.records()[0].tier


def arguments(value: object) -> Callable[[Message], Message]:
    return lambda m: alter(m, calls=tuple(alter(c, arguments=value) for c in m.calls))


@scenario
def an_echo_in_any_dialect_is_one_chain_and_all_of_it_trained() -> None:
    changes = {
        "verbatim": [lambda m: m, arguments({"cmd": "ls", "n": 1.0})],
        "normalised": [
            lambda m: alter(m, text=m.text.strip()),
            lambda m: alter(m, text="  " + m.text),
            lambda m: alter(m, reasoning=""),
            lambda m: alter(m, reasoning=" hm so \n"),
            lambda m: alter(m, calls=tuple(alter(c, id="other") for c in m.calls)),
            lambda m: alter(m, calls=tuple(alter(c, id=None) for c in m.calls)),
            arguments('{"n":1,"cmd":"ls"}'),
            arguments({"n": 1, "cmd": "ls"}),
        ],
    }
    for tier, forms in changes.items():
        for change in forms:
            h, found = echoed(change)
            out = h.export()
            assert found == tier
            assert out.trajectories[0].echo_tiers == (tier, None)
            assert len(out.trajectories) == 1
            assert out.ledger.trainable == out.ledger.sampled


@scenario
def an_edited_call_is_the_same_action_and_the_difference_is_recorded() -> None:
    good, bad = Answer("go", (("run", '{"cmd": "ls"}'),)), Answer("go", BAD, problem="cut off")

    def renamed(m: Message) -> Message:
        return alter(m, calls=tuple(alter(c, name="invalid", arguments={"e": 1}) for c in m.calls))

    for answer, change, changed in (
        (good, arguments({"cmd": "ls", "timeout": 9}), "arguments"),
        (good, lambda m: Message("assistant", f"go\nCalling {m.calls[0].id}"), "calls"),
        (good, lambda m: Message("assistant", "go\nCalling run with 'ls'"), "calls"),
        (good, lambda m: alter(m, text=""), "text"),
        (bad, arguments('{"cmd": "l"}'), "arguments"),
        (bad, renamed, "names"),
        (bad, lambda m: alter(renamed(m), calls=(Call("new", "run", "{}"),)), "ids"),
        (Answer("go", (("no_such_tool", "{}"),)), renamed, "names"),
        (bad, lambda m: Message("assistant", "go"), "calls"),
    ):
        h, tier = echoed(change, answer)
        record = h.tree.records()[0]
        assert tier == "edited"
        assert changed in record.differences
        assert len(h.export().trajectories) == 1
        assert h.export().ledger.trainable == h.sampled
        h, _ = echoed(change, answer, edited="context")
        assert h.export().ledger.context == len(h.tree.history.actions[0].sampled.said)


@scenario
def an_edited_call_with_an_id_of_the_harness_is_found_again_anywhere() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "go", BAD)
    back = Message("assistant", "go", (Call("mine", "run", {"cmd": "l"}),))
    talk = [SYS, USER, back, Message("tool", "ok", answers="mine")]
    b = h.ask(talk, "then")
    h.tree._tips.clear()
    again = h.ask([*talk, b.message, USER], "more")
    assert again.above is b
    assert b.above is a
    h.ask([SYS, user("summary"), *talk[2:]], "done")
    assert [(s.order, s.home) for s in h.export().trajectories[1].actions] == [(0, False), (3, True)]
    assert fates(h) == ["live"] * 4


@scenario
def what_is_another_message_is_another_action() -> None:
    two = Answer("go", (*LS, ("run", '{"cmd": "pwd"}')))
    for answer, change in (
        (None, lambda m: alter(m, text="something else")),
        (Answer("go", LS), arguments({"cmd": "rm"})),
        (Answer("go", LS), lambda m: alter(m, calls=(alter(m.calls[0], name="look"),))),
        (Answer("go", LS), lambda m: Message("assistant", "go")),
        (two, lambda m: alter(m, calls=m.calls[:1])),
        (Answer("go", LS), lambda m: alter(m, calls=(*m.calls, Call("x", "run", "{}")))),
        (Answer("go"), lambda m: alter(m, calls=(Call("x", "run", "{}"),))),
    ):
        h = Harness()
        a = h.finish(h.start([SYS, USER]), answer or Answer("go", LS))
        h.ask([SYS, USER, change(a.message), USER], "done")
        assert fates(h) == ["replaced", "live"], (answer, a.message)


@scenario
def a_stop_string_put_back_is_an_echo() -> None:
    h = Harness()
    a = h.finish(h.start([SYS, USER], stop=("</code>",)), Answer("<code>ls", overrun=3))
    h.ask([SYS, USER, alter(a.message, text="<code>ls</code>"), USER], "done")
    assert fates(h) == ["live", "live"]
    assert h.tree.records()[0].tier == "edited"
    assert h.export().ledger.discarded == {"stop_overrun": 3}
    assert (h.export().trajectories[0].provenance == Provenance.REPAIR).sum() == 1


@scenario
def the_echo_with_our_id_is_its_action_and_no_twin() -> None:
    h = Harness()
    a, b = (h.ask([SYS, USER], "x", LS) for _ in range(2))
    h.ask([SYS, USER, b.message, result(b), USER], "deep")
    c = h.ask([SYS, USER, a.message, result(a)], "last")
    assert c.above is a
    assert fates(h) == ["live"] * 4


@scenario
def without_ids_the_deepest_match_wins_then_the_newest() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "same", ids=False)
    b = h.ask([SYS, USER, a.message, USER], "next")
    twin = h.ask([SYS, USER], "same", ids=False)
    c = h.ask([SYS, USER, a.message, USER, b.message, USER], "more")
    d = h.ask([SYS, USER, a.message, user("other")], "else")
    assert c.above is b
    assert d.above is twin
    assert fates(h) == ["live"] * 5


@scenario
def an_answer_nobody_delivered_is_the_last_choice() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "same")
    h.ask([SYS, USER], "same", delivered=False)
    c = h.ask([SYS, USER, a.message, USER], "more")
    assert c.above is a
    assert fates(h) == ["live", "undelivered", "live"]


# ---------------------------------------------------------------- answers given up


@scenario
def dropped_replaced_retried() -> None:
    h = Harness()
    h.ask([SYS, USER], "bad")
    h.ask([SYS, USER, ERROR], "worse")
    h.ask([SYS, USER, ERROR, Message("assistant", "hand-written"), USER], "one")
    h.ask([SYS, USER, ERROR, Message("assistant", "hand-written"), USER], "two")
    assert fates(h) == ["dropped", "replaced", "retried", "live"]
    assert len(h.export().trajectories) == 1


@scenario
def a_replacement_is_content() -> None:
    h = Harness()
    h.ask([SYS, USER], "mine")
    h.ask([SYS, USER, Message("assistant", "by hand"), USER], "done")
    (chain,) = h.export().trajectories
    assert fates(h) == ["replaced", "live"]
    assert h.export().ledger.discarded == {"replaced": 2}
    assert h.words["hand"] in chain.token_ids[chain.provenance == Provenance.CONTENT]


@scenario
def a_call_that_could_not_run_and_was_dropped() -> None:
    for refused, fate in (("discard", "refused"), ("train", "live")):
        for calls in (BAD, (("no_such_tool", "{}"),)):
            h = Harness(TreePolicy(refused=refused))
            h.ask([SYS, USER], "x", calls)
            h.ask([SYS, USER, ERROR], "done")
            assert fates(h) == [fate, "live"]
    h = Harness()
    h.ask([SYS, USER], "<tool_call>{", problem="no end")
    h.ask([SYS, USER, ERROR], "done")
    h.ask([SYS, USER, ERROR, Message("assistant", "done"), USER], "more")
    assert fates(h) == ["refused", "live", "live"]


@scenario
def a_guard_rail_that_changes_a_command_replaces_the_action() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "x", (("run", '{"cmd": "rm -r /"}'),))
    h.ask([SYS, USER, arguments({"cmd": "true"})(a.message), result(a)], "done")
    assert fates(h) == ["replaced", "live"]


@scenario
def an_answer_left_out_and_brought_back_is_live() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "go", LS)
    h.ask([SYS, USER, user("is this a new topic?")], "no")
    h.ask([SYS, USER, a.message, result(a)], "done")
    assert fates(h) == ["live"] * 3
    assert [t.kind for t in h.export().trajectories] == ["main", "main"]


@scenario
def a_talk_that_goes_on_without_the_answer_drops_it() -> None:
    line = "all the files are where they should be"
    note = [SYS, USER, user("note")]
    h = Harness()
    first = h.ask(note, "noted")
    h.ask([SYS, USER], line)
    elsewhere = [Message("system", "you help"), USER, user(line)]
    h.ask(elsewhere, "yes", tools=tools("read"))  # it comes back, but not in its place
    h.ask([*note, first.message, USER], "well")
    assert fates(h) == ["live", "dropped", "live", "live"]


@scenario
def a_message_that_was_content_when_it_was_asked_stays_content() -> None:
    h = Harness()
    talk = [SYS, user("other"), Message("assistant", "same"), USER]
    early = h.start(talk)  # nobody has said "same" yet
    h.ask([SYS, USER], "same")
    late = h.ask(talk, "late")
    a = h.finish(early, Answer("early"))
    assert h.prompts[a.order] != h.prompts[late.order]
    assert a.parent is not late.parent
    assert [s.order for t in h.export().trajectories for s in t.actions] == [0, 0, 1, 2]
    check(h)


@scenario
def a_final_answer_stays_when_a_one_off_request_leaves_it_out() -> None:
    for rewind in ("split", "discard"):
        h = Harness(TreePolicy(rewind=rewind))
        a = h.ask([SYS, USER], "go", LS)
        h.ask([SYS, USER, a.message, result(a)], "done")
        h.ask([SYS, USER, a.message, result(a), user("summarise")], "one file was made")
        assert fates(h) == ["live"] * 3


@scenario
def resent_after_the_connection_broke() -> None:
    h = Harness()
    h.ask([SYS, USER], "one two", LS, delivered=False)
    b = h.ask([SYS, USER], "one two", LS)
    h.ask([SYS, USER, b.message, result(b)], "done")
    assert fates(h) == ["undelivered", "live", "live"]
    assert len(h.export().trajectories) == 1


@scenario
def resent_before_the_dead_connection_was_noticed() -> None:
    h = Harness()
    first, second = h.start([SYS, USER]), h.start([SYS, USER])
    h.finish(first, Answer("one", LS), delivered=False)
    b = h.finish(second, Answer("two", LS))
    h.ask([SYS, USER, b.message, result(b)], "done")
    assert fates(h) == ["undelivered", "live", "live"]


@scenario
def an_echo_proves_delivery() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "one two three", delivered=False)
    h.ask([SYS, USER, a.message, USER], "four")
    assert fates(h) == ["live", "live"]
    assert h.export().ledger.trainable == h.sampled


@scenario
def the_head_of_a_cut_stream_keeps_its_tokens() -> None:
    for calls, kept in (((), "one two"), (LS, "one two"), (LS, "one two three"), ((), "one two  ")):
        h = Harness()
        a = h.ask([SYS, USER], "one two three", calls, delivered=False)
        head = Message("assistant", kept)
        h.ask([SYS, USER, head, USER], "four")
        n = len(kept.split())
        out = h.export()
        assert fates(h) == ["live", "live"]
        assert out.ledger.discarded == {"undelivered": len(a.sampled.said) - n}
        (chain,) = out.trajectories
        start, end = chain.actions[0].start, chain.actions[0].end
        assert end - start == n
        assert chain.actions[0].home
        assert chain.loss_mask[start:end].all()
        assert chain.provenance[end] == Provenance.REPAIR
        assert not chain.loss_mask[end]
        h.ask([SYS, user("summary"), head, USER], "five")  # the same head elsewhere is those tokens again
        assert (
            a.sampled.said[:n].tolist()
            == h.export().trajectories[1].token_ids[h.export().trajectories[1].actions[0].start :][:n].tolist()
        )
        check(h)


@scenario
def a_stream_cut_between_two_calls_keeps_the_first() -> None:
    for text in ("go", ""):
        h = Harness()
        two = (("run", '{"cmd": "a"}'), ("run", '{"cmd": "b"}'))
        a = h.ask([SYS, USER], "go", two, delivered=False)
        head = Message("assistant", text, a.message.calls[:1])
        b = h.ask([SYS, USER, head, result(a, "aaa")], "next", LS)
        h.ask([SYS, USER, head, result(a, "aaa"), b.message, result(b)], "done")
        out = h.export()
        assert fates(h) == ["live", "live", "live"]
        assert out.ledger.discarded == {"undelivered": 2}  # the second call and the end of turn
        (chain,) = out.trajectories
        assert chain.loss_mask[chain.actions[0].start : chain.actions[0].end].all()
        assert chain.actions[0].end - chain.actions[0].start == 2
        assert chain.provenance[chain.actions[0].end] == Provenance.REPAIR
        check(h)


@scenario
def a_head_whose_next_request_failed_is_trained_too() -> None:
    h = Harness()
    h.ask([SYS, USER], "one two three", delivered=False)
    h.finish(h.start([SYS, USER, Message("assistant", "one two"), USER]), None)
    (chain,) = h.export().trajectories
    assert fates(h) == ["live"]
    assert chain.loss_mask.sum() == 2
    assert chain.loss_mask[-1]


@scenario
def what_we_ended_is_aborted() -> None:
    h = Harness()
    h.ask([SYS, USER], "one two", finish="aborted", delivered=False)
    h.ask([SYS, USER], "three")
    assert fates(h) == ["aborted", "live"]
    assert h.export().ledger.discarded == {"aborted": 2}


@scenario
def siblings_whose_requests_overlap_are_all_kept() -> None:
    h = Harness()
    s = [h.start([SYS, USER]), h.start([SYS, USER])]
    h.finish(s[0], Answer("one"))
    late = h.start([SYS, USER])  # overlaps the second only
    h.finish(s[1], Answer("two"))
    h.finish(late, Answer("three"))
    assert fates(h) == ["live"] * 3
    assert len(h.export().trajectories) == 3
    h.ask([SYS, USER], "later")
    assert fates(h) == ["retried"] * 3 + ["live"]


@scenario
def several_answers_to_one_request_are_siblings() -> None:
    h = Harness()
    asked = h.start([SYS, USER], n=3)
    nodes = [h.finish(asked, Answer(t, LS)) for t in ("one", "two", "three")]
    h.ask([SYS, USER, nodes[1].message, result(nodes[1])], "done")
    assert fates(h) == ["live"] * 4
    assert len({n.acted.delta for n in nodes}) == 1
    assert [t.weight for t in h.export().trajectories] == [1 / 3] * 3


@scenario
def at_one_instant_the_order_of_events_decides() -> None:
    h = Harness(tick=0.0)  # a clock that stands still
    h.ask([SYS, USER], "one")
    s = [h.start([SYS, USER]) for _ in range(2)]
    for asked, text in zip(s, ("two", "three"), strict=True):
        h.finish(asked, Answer(text))
    assert fates(h) == ["retried", "live", "live"]


@scenario
def the_first_of_two_samples_may_be_the_chosen_one() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "one")
    h.ask([SYS, USER], "two")
    h.ask([SYS, USER, a.message, USER], "three")
    assert fates(h) == ["live"] * 3


@scenario
def asked_again_with_more_room_the_talk_hangs_under_the_answer_that_came_back() -> None:
    h = Harness()
    h.ask([SYS, USER], "x", BAD, finish="length")
    b = h.ask([SYS, USER], "x", BAD, finish="length", max_tokens=64000)
    c = h.ask([SYS, USER, arguments('{"cmd":"l"}')(b.message), result(b)], "done")
    assert c.above is b
    assert fates(h) == ["refused", "live", "live"]
    assert len(h.export().trajectories) == 1


@scenario
def going_on_after_the_length_limit_inserts_a_repair() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "cut off", finish="length")
    h.ask([SYS, USER, a.message, USER], "done")
    (chain,) = h.export().trajectories
    (i,) = np.flatnonzero(chain.provenance == Provenance.REPAIR)
    assert chain.token_ids[i - 1] == a.sampled.said[-1]
    assert not chain.loss_mask[i]
    assert np.isnan(chain.logprobs[i])
    assert fates(h) == ["live", "live"]


# ---------------------------------------------------------------- going back, compaction


@scenario
def rewinding_accepted_actions() -> None:
    for rewind, fate in (("split", "live"), ("discard", "rewound")):
        h = Harness(TreePolicy(rewind=rewind))
        a = h.ask([SYS, USER], "go", LS)
        b = h.ask([SYS, USER, a.message, result(a)], "next", LS)
        h.ask([SYS, USER, a.message, result(a), b.message, result(b)], "done")
        h.ask([SYS, USER, a.message, result(a), user("no, otherwise")], "sure")
        assert fates(h) == ["live", fate, fate, "live"]
        out = h.export()
        assert [(t.kind, t.parent) for t in out.trajectories] == [("main", None), ("branch", 0)][
            : 1 + (rewind == "split")
        ]
        assert sum(t.loss_mask.sum() for t in out.trajectories) == out.ledger.trainable


@scenario
def what_a_live_action_follows_is_not_rewound() -> None:
    h = Harness(TreePolicy(rewind="discard"))
    a = h.ask([SYS, USER], "go", LS)
    side = [SYS, USER, a.message, result(a), user("a side talk")]
    h.ask([SYS, USER, user("meanwhile")], "yes")  # goes back behind a, which then comes back
    b = h.ask(side, "well", LS)
    h.ask([*side, b.message, result(b)], "done")
    assert fates(h)[0] == "live"
    assert fates(h)[2:] == ["live", "live"]


@scenario
def compaction_discards_nothing() -> None:
    summary = "the file exists, its tests are still to be run"
    for rewind in ("split", "discard"):
        h = Harness(TreePolicy(rewind=rewind))
        a = h.ask([SYS, USER], "go", LS)
        h.ask([SYS, USER, a.message, result(a), user("summarise")], summary, tools=())
        h.ask([SYS, USER, user("so far: " + summary)], "done")
        assert fates(h) == ["live"] * 3
        assert h.export().ledger.trainable == h.sampled
        h = Harness(TreePolicy(rewind=rewind))  # the summariser saw only text
        h.ask([SYS, USER], "go", LS)
        h.ask([Message("system", "you summarise"), user("transcript")], summary, tools=())
        h.ask([SYS, USER, user("so far: " + summary)], "done")
        assert fates(h) == ["live"] * 3
        assert [t.kind for t in h.export().trajectories] == ["main", "subagent", "main"]


@scenario
def turns_kept_through_compaction_are_their_sampled_ids() -> None:
    for change in (lambda m: m, lambda m: alter(m, calls=tuple(alter(c, id=None) for c in m.calls))):
        h = Harness()
        a = h.ask([SYS, USER], "go", LS)
        b = h.ask([SYS, USER, a.message, result(a)], "then", LS)
        h.ask([SYS, user("summary"), change(b.message), result(b)], "done")
        out = h.export()
        old, new = out.trajectories
        span = new.actions[0]
        assert (new.kind, new.parent, span.home, span.order) == ("branch", 0, False, 1)
        assert new.token_ids[span.start : span.end].tolist() == b.sampled.said.tolist()
        assert not new.loss_mask[: span.end].any()
        assert old.loss_mask[-len(b.sampled.said) :].all()
        assert fates(h) == ["live"] * 3
        assert out.ledger.trainable == h.sampled


@scenario
def a_trimmed_result_and_changed_tools_start_a_chain() -> None:
    for messages, offered in (
        (lambda a: [a.message, result(a, "trimmed")], RUN),
        (lambda a: [a.message, result(a)], tools("run", "look")),
    ):
        h = Harness()
        a = h.ask([SYS, USER], "go", LS)
        b = h.ask([SYS, USER, a.message, result(a)], "then", LS)
        h.ask([SYS, USER, *messages(a), b.message, result(b)], "done", tools=offered)
        out = h.export()
        assert fates(h) == ["live"] * 3
        assert len(out.trajectories) == 2
        assert out.ledger.trainable == h.sampled
        assert [s.home for s in out.trajectories[1].actions] in ([True, False, True], [False, False, True])


@scenario
def calls_written_out_as_text_are_recognised_after_compaction_too() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "go", LS)
    written = Message("assistant", f"go: run {a.message.calls[0].id}")
    h.ask([SYS, USER, written, user("ok")], "then")
    h.ask([SYS, user("summary"), written, user("ok")], "done")
    new = h.export().trajectories[1]
    assert fates(h) == ["live"] * 3
    assert [(s.order, s.home) for s in new.actions] == [(0, False), (2, True)]


@scenario
def a_template_that_rewrites_the_past_gets_a_chain_of_its_own() -> None:
    h = Harness()
    a = h.ask([SYS, USER], "go", LS)
    talk = [SYS, USER, a.message, result(a)]
    b = h.finish(h.start(talk, apart=True), Answer("then", LS))
    c = h.ask([*talk, b.message, result(b)], "done")
    assert (b.above, c.above) == (None, b)
    assert fates(h) == ["live"] * 3
    old, new = h.export().trajectories
    assert [(s.order, bool(new.loss_mask[s.start])) for s in new.actions] == [(0, False), (1, True), (2, True)]
    assert old.loss_mask.sum() == len(a.sampled.said)


@scenario
def an_unknown_assistant_message_is_content_everywhere() -> None:
    h = Harness()
    shots = [user("2+2?"), Message("assistant", "four"), user("3+3?"), Message("assistant", "six")]
    a = h.ask([SYS, *shots, USER], "go")
    h.ask([SYS, *shots, USER, a.message, USER], "done")
    (chain,) = h.export().trajectories
    assert fates(h) == ["live", "live"]
    assert len(chain.actions) == 2


# ---------------------------------------------------------------- several conversations


@scenario
def subagents_have_a_chain_each() -> None:
    h = Harness()
    main = h.ask([SYS, USER], "delegate", LS)
    talks = [[Message("system", f"helper {i}"), user("do your part")] for i in range(2)]
    started = [h.start(t, tools("read")) for t in talks]
    nodes = [h.finish(s, Answer("same words", (("read", "{}"),))) for s in reversed(started)][::-1]
    for t, n in zip(talks, nodes, strict=True):
        last = h.ask([*t, n.message, result(n)], "finished", tools=tools("read"))
        assert last.above is n
    h.ask([SYS, USER, main.message, result(main)], "done")
    out = h.export()
    assert fates(h) == ["live"] * 6
    assert sorted(t.kind for t in out.trajectories) == ["main", "subagent", "subagent"]
    assert out.trajectories[0].kind == "main"
    assert {len(t.actions) for t in out.trajectories} == {2}
    assert [t.weight for t in out.trajectories] == [1 / 3] * 3


@scenario
def side_calls_are_recorded_and_not_trained() -> None:
    for policy, fate in (("discard", "side_call"), ("train", "live")):
        h = Harness(TreePolicy(side_call=policy))
        h.ask([Message("system", "titles"), USER], "a title of this very thing", tools=())
        a = h.ask([SYS, USER], "go", LS)
        page = "the page says that all is well"
        h.ask([Message("system", "you read pages"), user("page")], page, tools=())
        h.ask([SYS, USER, a.message, result(a, page)], "done")
        assert fates(h) == [fate, "live", "live", "live"]
        assert ("side" in [t.kind for t in h.export().trajectories]) == (policy == "train")
        assert "main" in [t.kind for t in h.export().trajectories]


@scenario
def without_tools_anywhere_the_longest_conversation_is_the_main_one() -> None:
    h = Harness()
    h.ask([Message("system", "titles"), user("x")], "a title of this very thing", tools=())
    a = h.ask([SYS, USER], "well", tools=())
    h.ask([SYS, USER, a.message, user("a long question that goes on")], "yes", tools=())
    assert fates(h) == ["side_call", "live", "live"]


@scenario
def siblings_that_go_on_each_keep_their_own_prefix() -> None:
    h = Harness()
    nodes = [h.finish(h_asked, Answer(f"way {i}", LS)) for i, h_asked in enumerate([h.start([SYS, USER], n=3)] * 3)]
    for _ in range(2):
        for i, n in enumerate(nodes):
            talk: list[Message] = [SYS, USER]
            for up in n.chain():
                talk += [up.message, result(up, f"r{i}")]
            nodes[i] = h.ask(talk, f"more {i}", LS)
    assert fates(h) == ["live"] * 9
    assert len(h.export().trajectories) == 3
