"""Leases: who holds what, whatever order messages come in."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.engine.separate.leases import Kind, Leases

ROOM = {Kind.GROUP: 100, Kind.ASK: 100}
NONE = {Kind.GROUP: 0, Kind.ASK: 0}


def leases(groups: int, parts: int = 2) -> Leases:
    made = Leases()
    for i in range(groups):
        made.add(f"g{i}", Kind.GROUP, range(parts), i)
    return made


def test_nodes_share_evenly_and_older_items_go_first() -> None:
    work = leases(5)
    work.pull("late", {}, NONE, 0.0)
    first = work.pull("a", {}, ROOM, 0.0)
    assert [lease.id for lease in first.give] == [f"g{i}" for i in range(5)]  # nobody else takes any
    work = leases(5)
    for name in "ab":
        work.pull(name, {}, NONE, 0.0)
        work.nodes[name].capacity = ROOM
    assert [lease.id for lease in work.pull("a", {}, ROOM, 0.0).give] == ["g0", "g1", "g2"]
    assert [lease.id for lease in work.pull("b", {}, ROOM, 0.0).give] == ["g3", "g4"]


def test_a_lost_answer_is_given_again_and_a_held_lease_is_not() -> None:
    work = leases(1)
    (given,) = work.pull("a", {}, ROOM, 0.0).give
    assert work.pull("a", {}, ROOM, 1.0).give == (given,)
    again = work.pull("a", {given.id: given.attempt}, ROOM, 2.0)
    assert (again.give, again.drop) == ((), ())


def test_a_silent_node_loses_what_is_not_done_and_is_told_when_it_returns() -> None:
    work = leases(1)
    work.pull("a", {}, ROOM, 0.0)
    assert work.push("a", "g0", 1, 1.0)
    assert work.expire(100.0, 30.0) == ["a"]
    assert work.lost == 1
    (given,) = work.pull("b", {}, ROOM, 100.0).give
    assert (given.parts, given.attempt) == ((0,), 2)
    assert work.pull("a", {"g0": 1}, ROOM, 101.0).drop == ("g0",)
    assert work.push("a", "g0", 0, 102.0)  # it had finished all the same: the first result counts
    assert not work.push("b", "g0", 0, 103.0)
    assert work.pull("b", {"g0": 2}, ROOM, 104.0).drop == ("g0",)


def test_a_node_that_was_only_silent_keeps_what_nobody_took() -> None:
    work = leases(1)
    work.pull("a", {}, ROOM, 0.0)
    work.expire(100.0, 30.0)
    back = work.pull("a", {"g0": 1}, NONE, 101.0)
    assert (back.give, back.drop) == ((), ())
    assert work.holder("g0") == "a"


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["pull", "push", "silent", "forget", "cancel", "leave"]),
        st.sampled_from("abc"),
        st.integers(0, 5),
        st.integers(0, 1),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(MESSAGES)
def test_every_part_is_done_once_and_no_item_has_two_holders(messages: list[tuple[str, str, int, int]]) -> None:
    work, now = leases(6), 0.0
    held: dict[str, dict[str, int]] = {name: {} for name in "abc"}
    finished: set[tuple[str, int]] = set()
    for verb, name, number, part in messages:
        now += 1.0
        id = f"g{number}"
        if verb == "pull":
            pulled = work.pull(name, held[name], {Kind.GROUP: number, Kind.ASK: 0}, now)
            for dropped in pulled.drop:
                del held[name][dropped]
            for lease in pulled.give:
                held[name][lease.id] = lease.attempt
                assert not {(lease.id, part) for part in lease.parts} & finished
            assert all(work.holder(i) == name for i in held[name])
        elif verb == "push":
            assert work.push(name, id, part, now) == ((id, part) not in finished)
            finished.add((id, part))
        elif verb == "silent":
            work.expire(now, 5.0)
        elif verb == "forget":
            held[name] = {}  # it was started anew under its old name
        elif verb == "cancel":
            work.cancel(id, part)
            finished.add((id, part))
        elif verb == "leave":
            work.leave(name)
    for id in (f"g{i}" for i in range(6)):
        assert (id in work) == ({part for item, part in finished if item == id} != {0, 1})
