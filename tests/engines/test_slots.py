"""The slot table against a simulated K/V store, under random requests, aborts, updates and budgets. No torch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from uniagent.adapters.engines.slots import Slots
from uniagent.engine.ports import Finish, Ids, KvPolicy, Sampling, StepRequest

CONTEXT = 48


def request(id: int, prompt: Ids, session: str = "s", tokens: int = 5) -> StepRequest:
    return StepRequest(id, prompt, Sampling(tokens), session)


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


class Store:
    """K/V as what it depends on: the tokens up to a position, and the versions that wrote them."""

    def __init__(self, table: Slots) -> None:
        self.table = table
        self.kv: list[list[tuple[tuple[int, ...], int]]] = [[((), -1)] * CONTEXT for _ in range(table.count)]
        self.step = 0
        self.copied = 0

    def run(self, budget: int) -> list[int]:
        """One step; the slots that sampled, after their new token was appended."""
        table = self.table
        self.step += 1
        plan = table.plan(budget, self.step)
        assert sum(piece.take for piece in plan.pieces) <= budget
        for copy in plan.copies:
            self.copied += copy.end - copy.begin
            self.kv[copy.target][copy.begin : copy.end] = self.kv[copy.source][copy.begin : copy.end]
        spans = [(int(s), int(table.have[s]), int(table.have[s]) + 1) for s in plan.decode]
        spans += [(p.slot, p.begin, p.begin + p.take) for p in plan.pieces]
        assert len({slot for slot, _, _ in spans}) == len(spans)
        for slot, begin, end in spans:
            for position in range(begin, end):
                known = tuple(table.ids[slot, : position + 1].tolist())
                self.kv[slot][position] = (known, table.version)
        table.advance(plan)
        ready = [slot for slot, _, end in spans if end == table.total[slot]]
        for slot in ready:
            self.check(slot)
        if ready:
            rows = np.array(ready)
            tokens = (table.ids[rows, table.total[rows] - 1] * 7 + rows) % 3
            table.append(rows, tokens.astype(np.int32), np.zeros(len(rows), np.float32))
        return ready

    def check(self, slot: int) -> None:
        """Everything a token is about to attend to is K/V of exactly the tokens before it, by the versions recorded."""
        table = self.table
        total = int(table.total[slot])
        assert table.have[slot] == total
        for position in range(total):
            known, version = self.kv[slot][position]
            assert known == tuple(table.ids[slot, : position + 1].tolist())
            assert version == table.kv_versions[slot, position]
        fresh = int(table.fresh[slot])
        assert (table.kv_versions[slot, :fresh] == table.version).all()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), kv=st.sampled_from(list(KvPolicy)), budget=st.integers(1, 40))
def test_no_token_attends_to_anything_but_its_own_past(data: st.DataObject, kv: KvPolicy, budget: int) -> None:
    table = Slots(data.draw(st.integers(1, 5)), CONTEXT)
    store = Store(table)
    histories: dict[str, list[int]] = {}
    waiting: list[StepRequest] = []
    ended = asked = 0
    for number in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["ask", "ask", "step", "step", "step", "abort", "update"]))
        if action == "ask":
            session = f"s{data.draw(st.integers(0, 3))}"
            common = [1] * data.draw(st.sampled_from([0, 1, 20, 30]))
            history = histories.get(session, []) if data.draw(st.booleans()) else common
            prompt = [*history, *data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))][: CONTEXT - 1]
            waiting.append(request(number, ids(*prompt), session, data.draw(st.integers(1, 8))))
            asked += 1
        elif action == "abort" and (running := np.flatnonzero(table.active)).size:
            table.release(int(data.draw(st.sampled_from(running.tolist()))), Finish.ABORTED)
            ended += 1
        elif action == "update":
            table.renew(table.version + 1, kv)
            assert all(table.resident(ids(*history)) == 0 for history in histories.values() if history)
        ended += _go_on(store, waiting, histories, budget)
    for _ in range(2000):
        if not (waiting or table.active.any()):
            break
        ended += _go_on(store, waiting, histories, budget)
    assert ended == asked  # nobody starves
    assert (table.total == table.fresh).all()


def _go_on(store: Store, waiting: list[StepRequest], histories: dict[str, list[int]], budget: int) -> int:
    """Admit, step, end those at their limit; how many ended."""
    table = store.table
    while waiting and table.admit(waiting[0]) is not None:
        waiting.pop(0)
    ended = 0
    for slot in store.run(budget):
        if table.total[slot] >= table.limit[slot]:
            live = table.live[slot]
            assert live is not None
            generation = table.release(slot, Finish.LENGTH)
            ended += 1
            histories[live.request.session] = [*live.request.prompt.tolist(), *generation.token_ids.tolist()]
            assert len(generation.token_ids) == min(
                live.request.sampling.max_tokens, CONTEXT - len(live.request.prompt)
            )
            assert generation.cached_tokens < len(live.request.prompt)
    return ended


def run_to_end(store: Store, budget: int = 100) -> dict[int, int]:
    """Steps until all ended; the step each request ended at."""
    ends: dict[int, int] = {}
    while store.table.active.any():
        for slot in store.run(budget):
            if store.table.total[slot] >= store.table.limit[slot]:
                live = store.table.live[slot]
                assert live is not None
                ends[live.request.id] = store.step
                store.table.release(slot, Finish.LENGTH)
    return ends


def test_a_session_takes_its_own_slot_again_in_place() -> None:
    table = Slots(4, CONTEXT)
    store = Store(table)
    first = table.admit(request(0, ids(*range(20)), "a"))
    run_to_end(store)
    history = table.ids[first, : table.total[first]].copy()
    assert table.admit(request(1, np.concatenate([history, ids(5, 5)]), "a")) == first
    run_to_end(store)
    assert store.copied == 0


def test_the_slot_idle_longest_is_given_up_first() -> None:
    table = Slots(3, CONTEXT)
    store = Store(table)
    for number, start in enumerate((10, 20, 30)):
        table.admit(request(number, ids(*range(start, start + 9)), f"s{number}"))
        run_to_end(store)
    table.admit(request(3, ids(*range(10, 19), 1), "s0"))  # s0 comes back
    run_to_end(store)
    table.admit(request(4, ids(*range(40, 49)), "new"))
    assert table.resident(ids(*range(10, 19))) == 9
    assert table.resident(ids(*range(20, 29))) == 0
    assert table.resident(ids(*range(30, 39))) == 9


def test_a_group_computes_its_prompt_once() -> None:
    table = Slots(8, CONTEXT)
    store = Store(table)
    for number in range(8):
        table.admit(request(number, ids(*range(30)), f"s{number}"))
    run_to_end(store)
    assert store.copied == 7 * 29


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    table = Slots(2, CONTEXT)
    store = Store(table)
    table.admit(request(0, ids(*range(40)), "long", 1))
    store.run(4)
    table.admit(request(1, ids(41, 42, 43, 44), "short", 1))
    ends = run_to_end(store, 4)
    assert ends[1] <= 3
    assert ends[0] == 11


def test_running_requests_share_their_beginning_again_after_recompute() -> None:
    table = Slots(4, CONTEXT)
    store = Store(table)
    for number in range(4):
        table.admit(request(number, ids(*range(25)), f"s{number}", 15))
    for _ in range(5):
        store.run(100)
    copied = store.copied
    table.renew(1, KvPolicy.RECOMPUTE)
    run_to_end(store)
    assert store.copied - copied >= 3 * 25


def test_a_long_tail_of_its_own_does_not_wait_for_a_short_shared_beginning() -> None:
    table = Slots(2, CONTEXT)
    store = Store(table)
    table.admit(request(0, ids(*range(20)), "a", 1))
    table.admit(request(1, ids(*range(18), *[2] * 28), "b", 1))
    assert run_to_end(store) == {0: 1, 1: 1}


def test_after_keep_nobody_waits_for_kv_that_is_never_reused() -> None:
    table = Slots(2, CONTEXT)
    store = Store(table)
    table.admit(request(0, ids(*range(40)), "a", 1))
    store.run(4)
    table.renew(1, KvPolicy.KEEP)
    table.admit(request(1, ids(*range(40)), "b", 1))
    assert run_to_end(store, 80)[1] == 2


def test_kept_old_kv_is_never_called_fresh() -> None:
    """A request that waits with old K/V of its own goes on over it, though another slot has a longer new beginning."""
    table = Slots(3, CONTEXT)
    store = Store(table)
    table.admit(request(0, ids(*range(6)), "a", 1))
    run_to_end(store)
    table.admit(request(1, ids(*range(40)), "other", 1))
    store.run(4)
    waits = table.admit(request(2, ids(*range(40)), "a", 1))
    assert waits is not None
    store.run(4)
    had = int(table.have[waits])
    assert 6 <= had < 39
    table.renew(1, KvPolicy.KEEP)
    table.admit(request(3, ids(*range(40)), "new", 1))
    store.run(40)
    run_to_end(store)
    assert (table.kv_versions[waits, :had] == 0).all()
    assert table.fresh[waits] == 0
