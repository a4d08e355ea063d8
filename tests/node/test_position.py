"""Whatever a run did when it was killed, every sample is trained once in the line of weights that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from uniagent.engine.position import Position, Sample, Samples

DATA = [(number, {"row": number}) for number in range(60)]
moves = st.lists(
    st.sampled_from(["begin", "begin", "train", "return", "save", "kill"]) | st.integers(0, 5), max_size=120
)


def rest(at: Position, data: Sequence[Sample] = DATA) -> Iterator[Sample]:
    """What a source that goes on from a position gives."""
    return iter([*(data[n] for n in at.again), *data[at.next :]])


@given(moves=moves)
def test_every_sample_is_done_once_whenever_the_run_is_killed(moves: list[str | int]) -> None:
    saved, kept = Position(), []  # the checkpoint, and what its weights have seen
    samples, seen = Samples.after(saved, rest(saved)), list(kept)
    begun: list[int] = []
    pick = 0
    for move in [*moves, "kill"]:
        if isinstance(move, int):
            pick = move
        elif move == "begin":
            following = next(samples, None)
            if following is not None:
                assert following == DATA[following[0]]
                begun.append(following[0])
        elif move in ("train", "return") and begun:
            number = begun.pop(pick % len(begun))
            samples.done(number, trained=move == "train")
            seen.append(number)
        elif move == "save":
            at = samples.position(step=len(seen))
            saved, kept = Position.of_json(json.loads(json.dumps(at.as_json()))), list(seen)
        elif move == "kill":
            samples, seen, begun = Samples.after(saved, rest(saved)), list(kept), []
            counters = saved.admission()
            assert counters["admitted"] == counters["given_back"] + counters["consumed"] == len(kept)
    for number, _ in samples:
        samples.done(number, trained=True)
        seen.append(number)
    assert sorted(seen) == list(range(len(DATA)))


def test_samples_that_were_under_way_come_first_and_in_order() -> None:
    at = Position(next=5, again=(1, 3))
    assert [number for number, _ in Samples.after(at, rest(at, DATA[:8]))] == [1, 3, 5, 6, 7]
